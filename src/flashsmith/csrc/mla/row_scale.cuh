// The scale of a latent cache's rows.
#pragma once

#include "common/stored_row.cuh"
#include "mla/args.cuh"

namespace flashsmith {

FS_DEVICE float row_scale(const MlaScaledArgs& args) {
    return scale_of_head(args.row_scale.on_device, 0, args.row_scale.value, 0);
}

// A factor of scores with the scale of the keys. If that scale is a number, the host has already
// multiplied it in.
FS_DEVICE float with_key_scale(const MlaKernelArgs&, float factor) {
    return factor;
}
FS_DEVICE float with_key_scale(const MlaScaledArgs& args, float factor) {
    if (args.row_scale.on_device == nullptr) return factor;
    return __fmul_rn(factor, row_scale(args));
}

// Multiplies elements of rows of o by the scale of the values.
FS_DEVICE void scale_values(const MlaKernelArgs&, float&) {}
FS_DEVICE void scale_values(const MlaScaledArgs& args, float& x) {
    x = __fmul_rn(x, row_scale(args));
}

}  // namespace flashsmith
