// The scale of a latent cache's rows.
#pragma once

#include "common/stored_row.cuh"
#include "mla/args.cuh"

namespace flashsmith {

FS_DEVICE float row_scale(const MlaScaledArgs& args) {
    return scale_of_head(args.row_scale.on_device, 0, args.row_scale.value, 0);
}

// The factor that turns scores into base-2 logits. If the scale is a number, the host has already
// multiplied it in.
FS_DEVICE float score_factor(const MlaKernelArgs& args) {
    return args.scale_log2;
}
FS_DEVICE float score_factor(const MlaScaledArgs& args) {
    if (args.row_scale.on_device == nullptr) return args.scale_log2;
    return __fmul_rn(args.scale_log2, row_scale(args));
}

// Multiplies elements of rows of o by the scale of the values.
FS_DEVICE void scale_values(const MlaKernelArgs&, float&) {}
FS_DEVICE void scale_values(const MlaScaledArgs& args, float& x) {
    x = __fmul_rn(x, row_scale(args));
}

}  // namespace flashsmith
