// The config that names a kernel of the family, and what kernels are called with. Plain C++20
// without CUDA types: the host compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/types.cuh"

namespace flashsmith {

// Fields, order and meaning are those of the Python class.
struct FirstRowKernelConfig {
    DType dtype;
    int d_head;
    int n_warps;
    bool staged;

    constexpr auto operator<=>(const FirstRowKernelConfig&) const = default;
};

struct FirstRowArgs {
    const void* v;
    void* o;
    uint32_t* sums;  // of staged kernels: (batch, heads, d), zero at first
    int32_t heads, d;
    int64_t v_batch_stride, v_head_stride;  // elements
    int64_t o_batch_stride, o_head_stride;
};

using first_row_kernel_fn = void (*)(const FirstRowArgs);

}  // namespace flashsmith
