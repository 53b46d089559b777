// The scales of a cache's keys and values.
#pragma once

#include "common/canonical.cuh"
#include "common/stored_row.cuh"
#include "mma_sync_decode/row_state.cuh"

namespace flashsmith {

// The scales in the arguments of kernels that have them.
FS_DEVICE const CacheScales& scales_of(const DecodeKernelArgs& args) {
    return static_cast<const DecodeCacheArgs&>(args).scales;
}

FS_DEVICE float k_scale(const DecodeKernelArgs& args, int head_k) {
    const CacheScales& scales = scales_of(args);
    return scale_of_head(scales.k, scales.k_step, scales.k_value, head_k);
}
FS_DEVICE float v_scale(const DecodeKernelArgs& args, int head_k) {
    const CacheScales& scales = scales_of(args);
    return scale_of_head(scales.v, scales.v_step, scales.v_value, head_k);
}

// Multiplies the factor of the scores by the keys' scale. If the scale is a number, the host has
// already done so.
FS_DEVICE float scaled_by_k(const DecodeKernelArgs& args, float factor, int head_k) {
    const CacheScales& scales = scales_of(args);
    return scales.k == nullptr ? factor : __fmul_rn(factor, k_scale(args, head_k));
}

// Finishes a row whose values have a scale.
struct ScaledRowEnd : RowEnd {
    float v_scale;

    FS_DEVICE float scaled(float sum) const { return __fmul_rn(RowEnd::scaled(sum), v_scale); }
};

template <class Kernel>
FS_DEVICE auto row_end(const DecodeKernelArgs& args, const RowState& row, int head, int head_k) {
    const RowEnd end(row, args.sinks == nullptr ? nullptr : args.sinks + head);
    if constexpr (Kernel::has_scales)
        return ScaledRowEnd{end, v_scale(args, head_k)};
    else
        return end;
}

// An element of o, computed in the canonical order.
template <class Kernel>
FS_DEVICE float canonical_element(const DecodeKernelArgs& args, float sum, float factor,
                                  int head_k) {
    const float x = CanonicalEnd::scaled(sum, factor);
    if constexpr (Kernel::has_scales)
        return __fmul_rn(x, v_scale(args, head_k));
    else
        return x;
}

}  // namespace flashsmith
