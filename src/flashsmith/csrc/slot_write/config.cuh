// The config of a kernel of the slot_write family, and the arguments of the kernel. Plain C++20
// without CUDA types, because the host compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/types.cuh"

namespace flashsmith {

// The fields, their order and their meaning match the Python class.
struct SlotWriteKernelConfig {
    DType dtype;
    int d_head;
    int n_warps;
    CacheFormat cache;
    int d_v;

    constexpr auto operator<=>(const SlotWriteKernelConfig&) const = default;

    constexpr bool has_scales() const { return cache != CacheFormat::plain; }
    // The columns of v. If d_v is 0, these are as many as k has.
    constexpr int v_columns() const { return d_v > 0 ? d_v : d_head; }
    constexpr int most_columns() const { return d_head > v_columns() ? d_head : v_columns(); }
    constexpr int n_threads() const { return kWarpSize * n_warps; }
};

// Strides in elements. The last dimension of every tensor is contiguous.
struct NewRowStrides {
    int64_t row, head;
};
struct SlotStrides {
    int64_t block, slot, head;
};

struct SlotWriteKernelArgs {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t* slot_mapping;  // (count)
    NewRowStrides k_strides, v_strides;
    SlotStrides k_cache_strides, v_cache_strides;
    int32_t count;  // rows to copy
    int32_t heads, d;
    int32_t slots_per_block;
    int32_t total_slots;
    int32_t d_v;  // used only if the config has a d_v
};

// The arguments of kernels whose cache has scales.
struct SlotWriteScaledArgs : SlotWriteKernelArgs {
    CacheScales scales;
};

using slot_write_kernel_fn = void (*)(const SlotWriteKernelArgs);

}  // namespace flashsmith
