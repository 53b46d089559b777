// The config of a kernel of the row_merge family, and the arguments of the kernel. Plain C++20
// without CUDA types, because the host compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/types.cuh"

namespace flashsmith {

// The most parts that one launch can merge. The operation has tensors for this many parts.
constexpr int kMostParts = 8;

// The fields, their order and their meaning match the Python class.
struct RowMergeKernelConfig {
    DType dtype;
    int d_head;
    int n_warps;

    constexpr auto operator<=>(const RowMergeKernelConfig&) const = default;

    constexpr int n_threads() const { return kWarpSize * n_warps; }
};

// Strides in elements. The last dimension of every output and of every LSE is contiguous.
struct MergedTensor {
    int64_t batch_stride, seq_stride, head_stride;
};
struct MergedStatistic {
    int64_t batch_stride, head_stride;
};

struct RowMergeKernelArgs {
    void* o;
    float* lse;
    const float* sinks;  // (heads): may be null
    const void* outs[kMostParts];
    const float* lses[kMostParts];
    MergedTensor o_strides, outs_strides[kMostParts];
    MergedStatistic lse_strides, lses_strides[kMostParts];
    int32_t rows;  // number of rows, over all heads and sequences
    int32_t seq, heads, d;
    int32_t n_parts;
    int32_t first_fp32, others_fp32, o_fp32;  // whether parts and output are fp32; otherwise they
                                              // have the config's dtype
};

using row_merge_kernel_fn = void (*)(const RowMergeKernelArgs);

}  // namespace flashsmith
