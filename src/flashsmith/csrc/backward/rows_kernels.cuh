// The small kernels before and after the GEMMs: row statistics, rows that belong to no sequence,
// and gradients of sinks.
#pragma once

#include "backward/rows.cuh"
#include "common/key_mask.cuh"
#include "common/layout.cuh"
#include "common/program_scores.cuh"

namespace flashsmith {

constexpr int kRowsKernelThreads = 256;

template <typename value_t>
FS_DEVICE float2 unpacked(uint32_t pair);
template <>
FS_DEVICE float2 unpacked<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
FS_DEVICE float2 unpacked<__nv_bfloat16>(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Returns sum + do o for two elements. A row that sees no key has o = 0, and its do may be
// anything.
template <typename value_t>
FS_DEVICE float dot(uint32_t d_o, uint32_t o, float sum) {
    const float2 x = unpacked<value_t>(d_o), y = unpacked<value_t>(o);
    sum = y.x == 0.0f ? sum : fmaf(x.x, y.x, sum);
    return y.y == 0.0f ? sum : fmaf(x.y, y.y, sum);
}

// Whether the row sees any of the keys that this lane checks, which are every kLanes-th key from
// number `first` of the row's range on.
template <Semantics SEMANTICS, int kLanes>
FS_DEVICE bool sees_a_key(const BackwardProgramArgs& args, const ProgramSequence& of, int head,
                          int row, int first) {
    const KeyRange range = visible_range<SEMANTICS>(args, row + of.seq_k - of.seq_q, of.seq_k);
    for (int key = range.first + first; key <= range.last; key += kLanes)
        if (ProgramOf<SEMANTICS>::sees(args.program, of.batch, head, row, key, of.seq_q, of.seq_k))
            return true;
    return false;
}

// Computes D and log2(e) lse. Each CTA handles kStatisticsRows rows of one head. Rows past the last
// one get values with which they contribute 0: P is exp2(-inf), and dS is P times 0 - 0. For rows
// that see no key because of a program's mask, log2(e) lse is infinite even if there are sinks. The
// kernel also sets the sums of dq, if any, to zero.
template <class Kernel>
__global__ void __launch_bounds__(kRowsKernelThreads)
    backward_prepare_kernel(const typename Kernel::PrepareArgs args) {
    using value_t = typename Kernel::value_t;
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    constexpr int kColumns = kPairWidth<Kernel> > 0 ? kPairWidth<Kernel> : Kernel::d_head;
    constexpr int kLanes = kColumns <= 64 ? 8 : kColumns <= 128 ? 16 : 32;
    const int n_blocks = (args.seq_q + kStatisticsRows - 1) / kStatisticsRows;
    // The data that the next kernel reads first are processed last, so that they are still in L2.
    const uint32_t number = gridDim.x - 1 - block_index();
    const uint32_t sequence = number / n_blocks;
    const int block = number % n_blocks;
    const int batch = sequence / args.heads_q, head = sequence % args.heads_q;
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    if (SEMANTICS.packed && block * kStatisticsRows >= q.count) return;
    [[maybe_unused]] const SequenceRows k =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    const int64_t statistic = first_statistic<SEMANTICS>(args, batch, head, q.first);
    const int chunk = thread_index() % kLanes;
    const int end = (block + 1) * kStatisticsRows;
    if constexpr (Kernel::clears_dq_sums && Kernel::has_dq_counters) {
        // The counters are between the sums.
        float* const sums =
            args.dq_sums + Kernel::first_dq_sum(statistic + block * kStatisticsRows);
        constexpr int kFloats = kStatisticsRows / Kernel::B_r * Kernel::dq_block_floats;
        for (int i = thread_index() * 4; i < kFloats; i += kRowsKernelThreads * 4)
            store_global_16B(sums + i, uint4{0, 0, 0, 0});
    }
    for (int row = block * kStatisticsRows + thread_index() / kLanes; row < end;
         row += kRowsKernelThreads / kLanes) {
        if constexpr (Kernel::clears_dq_sums && !Kernel::has_dq_counters)
            if (Kernel::always_sums_dq || args.dq_sums != nullptr)
                for (int column = chunk * 4; column < Kernel::dq_sum_columns; column += kLanes * 4)
                    store_global_16B(
                        args.dq_sums + (statistic + row) * Kernel::dq_sum_columns + column,
                        uint4{0, 0, 0, 0});
        float sum = 0.0f;
        bool has_output = false;
        // A row of more chunks than lanes takes several rounds.
#pragma unroll
        for (int first = 0; first < kColumns / kChunkElements; first += kLanes)
            if (row < q.count && first + chunk < d_of_v<Kernel>(args) / kChunkElements) {
                const uint4 x = load_global_16B(
                    row_address<value_t>(args.d_o,
                                         batch * args.do_batch_stride + head * args.do_head_stride,
                                         q.first + row, args.do_seq_stride) +
                    (first + chunk) * kChunkBytes);
                const uint4 y = load_global_16B(
                    row_address<value_t>(args.o,
                                         batch * args.o_batch_stride + head * args.o_head_stride,
                                         q.first + row, args.o_seq_stride) +
                    (first + chunk) * kChunkBytes);
                sum = dot<value_t>(x.x, y.x, sum);
                sum = dot<value_t>(x.y, y.y, sum);
                sum = dot<value_t>(x.z, y.z, sum);
                sum = dot<value_t>(x.w, y.w, sum);
                if constexpr (SEMANTICS.program_masks)
                    has_output |= ((y.x | y.y | y.z | y.w) & 0x7fff7fffu) != 0;
            }
#pragma unroll
        for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        // With sinks, lse does not show whether the row sees a key. A row whose o is not 0
        // certainly does.
        bool sees = true;
        if constexpr (SEMANTICS.program_masks) {
            const uint32_t of_row = (kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1)
                                    << (lane_index() - chunk);
            if (args.sinks != nullptr) {
                sees = (__ballot_sync(0xffffffffu, has_output) & of_row) != 0;
                if (!sees && row < q.count)
                    sees = sees_a_key<SEMANTICS, kLanes>(args, {batch, q.count, k.count}, head, row,
                                                         chunk);
                sees = (__ballot_sync(0xffffffffu, sees) & of_row) != 0;
            }
        }
        if (chunk != 0) continue;
        float lse_log2 = INFINITY;
        if (row < q.count) {
            const int64_t place = q.first + row;
            const float lse =
                args.lse[batch * args.lse_batch_stride + head * args.lse_head_stride + place];
            if (lse != -INFINITY && sees) lse_log2 = lse * kLog2E;
            if (args.dlse != nullptr)
                sum -= args.dlse[batch * args.dlse_batch_stride + head * args.dlse_head_stride +
                                 place];
        }
        args.lse_log2[statistic + row] = lse_log2;
        args.D[statistic + row] = sum;
    }
}

// Computes dsinks of one head: minus the sum over all rows of exp(sink - lse) D, in a fixed order.
// A sink of -inf contributes nothing.
template <class Kernel>
__global__ void __launch_bounds__(kRowsKernelThreads)
    backward_sinks_kernel(const BackwardKernelArgs args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    __shared__ float sums[kRowsKernelThreads];
    const int head = block_index(), thread = thread_index();
    const float sink_log2 = args.sinks[head] * kLog2E;
    float sum = 0.0f;
    for (int batch = 0; batch < args.batch; ++batch) {
        const SequenceRows q =
            sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        const int64_t statistic = first_statistic<SEMANTICS>(args, batch, head, q.first);
        for (int row = thread; row < q.count; row += kRowsKernelThreads) {
            float lse_log2 = args.lse_log2[statistic + row];
            if constexpr (SEMANTICS.program_masks) {
                // The statistic of a row that sees no key is infinite.
                const float lse = args.lse[batch * args.lse_batch_stride +
                                           head * args.lse_head_stride + q.first + row];
                lse_log2 = lse == -INFINITY ? INFINITY : lse * kLog2E;
            }
            sum = fmaf(-exp2_approx(sink_log2 - lse_log2), args.D[statistic + row], sum);
        }
    }
    sums[thread] = sum;
    for (int half = kRowsKernelThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) sums[thread] += sums[thread + half];
    }
    if (thread == 0) args.dsinks[head] = sums[0];
}

// Zeroes the gradients of packed rows that belong to no sequence or lie past the maximum length.
// Each warp handles one row of dq, or of dk and dv.
template <class Kernel>
__global__ void __launch_bounds__(kRowsKernelThreads)
    backward_gaps_kernel(const BackwardKernelArgs args) {
    using value_t = typename Kernel::value_t;
    const int lane = thread_index() % kWarpSize;
    int64_t row =
        int64_t{block_index()} * (kRowsKernelThreads / kWarpSize) + thread_index() / kWarpSize;
    const bool is_key = row >= args.total_q;
    if (is_key) row -= args.total_q;
    if (is_key && row >= args.total_k) return;
    bool found = false;
    for (int batch = lane; batch < args.batch; batch += kWarpSize) {
        const SequenceRows rows =
            is_key ? sequence_rows<true>(args.cu_seqlens_k, batch, args.seq_k, args.total_k)
                   : sequence_rows<true>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        found |= row >= rows.first && row < rows.first + rows.count;
    }
    if (any_lane(found)) return;
    const int element_bytes = args.grads_fp32 ? 4 : int{sizeof(value_t)};
    const auto clear = [&](void* gradient, int d, int heads, int64_t seq_stride,
                           int64_t head_stride) {
        if (gradient == nullptr) return;
        const int chunks = d * element_bytes / kChunkBytes;
        for (int i = lane; i < heads * chunks; i += kWarpSize) {
            const int64_t element = row * seq_stride + i / chunks * head_stride;
            store_global_16B(
                static_cast<char*>(gradient) + element * element_bytes + i % chunks * kChunkBytes,
                uint4{0, 0, 0, 0});
        }
    };
    if (is_key) {
        clear(args.dk, d_of_qk<Kernel>(args), args.heads_k, args.dk_seq_stride,
              args.dk_head_stride);
        clear(args.dv, d_of_v<Kernel>(args), args.heads_k, args.dv_seq_stride, args.dv_head_stride);
    } else {
        clear(args.dq, d_of_qk<Kernel>(args), args.heads_q, args.dq_seq_stride,
              args.dq_head_stride);
    }
}

}  // namespace flashsmith
