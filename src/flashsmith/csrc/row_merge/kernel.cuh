// Merges the outputs and LSEs of attention over parts of the keys. A thread has four columns of one
// row, so that fp32 rows are read and written by 16 bytes.
#pragma once

#include <type_traits>

#include "common/merge.cuh"
#include "row_merge/config.cuh"

namespace flashsmith {

template <RowMergeKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticRowMergeConfig {
    static constexpr RowMergeKernelConfig CFG = CFG_;
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int kThreads = CFG.n_threads();
    static constexpr int kColumns = 4;
    static constexpr int kThreadsPerRow = CFG.d_head / kColumns;
    static_assert(CFG.d_head % kColumns == 0 && kThreads <= 1024);
};

FS_DEVICE float2 unpack_16bit(__half2 x) {
    return __half22float2(x);
}
FS_DEVICE float2 unpack_16bit(__nv_bfloat162 x) {
    return __bfloat1622float2(x);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    row_merge_kernel(const RowMergeKernelArgs args) {
    using value_t = typename Kernel::value_t;
    constexpr int kColumns = Kernel::kColumns;
    const int64_t index = int64_t{block_index()} * Kernel::kThreads + thread_index();
    const int64_t row_index = index / Kernel::kThreadsPerRow;
    const int column = index % Kernel::kThreadsPerRow * kColumns;
    if (row_index >= args.rows || column >= args.d) return;
    const auto row = static_cast<uint32_t>(row_index);
    const int head = row % args.heads, seq = row / args.heads % args.seq;
    const int batch = row / args.heads / args.seq;
    const auto element = [&](const MergedTensor& of) {
        return batch * of.batch_stride + seq * of.seq_stride + head * of.head_stride + column;
    };
    const auto statistic = [&](const MergedStatistic& of) {
        return batch * of.batch_stride + head * of.head_stride + seq;
    };

    // All loads come before the sums, each of which depends on the one before.
    float lses[kMostParts], parts[kMostParts][kColumns];
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) {
        lses[i] = -INFINITY;
        if (i >= args.n_parts) continue;
        lses[i] = args.lses[i][statistic(args.lses_strides[i])];
        const int64_t at = element(args.outs_strides[i]);
        if (i == 0 ? args.first_fp32 : args.others_fp32) {
            const auto x =
                *reinterpret_cast<const float4*>(static_cast<const float*>(args.outs[i]) + at);
            parts[i][0] = x.x, parts[i][1] = x.y, parts[i][2] = x.z, parts[i][3] = x.w;
        } else {
            using pair_t =
                std::conditional_t<std::is_same_v<value_t, __half>, __half2, __nv_bfloat162>;
            const auto* pairs =
                reinterpret_cast<const pair_t*>(static_cast<const value_t*>(args.outs[i]) + at);
            const float2 left = unpack_16bit(pairs[0]), right = unpack_16bit(pairs[1]);
            parts[i][0] = left.x, parts[i][1] = left.y;
            parts[i][2] = right.x, parts[i][3] = right.y;
        }
    }
    MergedRow<kColumns> merged;
#pragma unroll
    for (int i = 0; i < kMostParts; ++i)
        if (i < args.n_parts) merged.add(lses[i], 1.0f, parts[i]);
    const float lse = merged.finish(args.sinks == nullptr ? nullptr : args.sinks + head);

    if (column == 0) args.lse[statistic(args.lse_strides)] = lse;
    const int64_t at = element(args.o_strides);
    if (args.o_fp32)
        *reinterpret_cast<float4*>(static_cast<float*>(args.o) + at) = {merged.o[0], merged.o[1],
                                                                        merged.o[2], merged.o[3]};
    else
        store_global_8B(static_cast<value_t*>(args.o) + at,
                        uint2{pack_16bit<value_t>(merged.o[0], merged.o[1]),
                              pack_16bit<value_t>(merged.o[2], merged.o[3])});
}

}  // namespace flashsmith
