// How scores change before the softmax: what a library's struct Score calls, and what calls it.
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// tanh x of y = 2 log2(e) x, within 8e-7 of itself however small: a large cap leaves small
// tangents, and the logit is the cap times them. 1 - 2 / (e^2x + 1) cancels there (at x = 1e-4 it
// is off by 1e-3), so that an odd polynomial serves below |x| = 0.25, where it is off by 4e-7
// (least maximum of the relative error) and the other formula by up to 8e-7. A rational function of
// y, with one special function in place of two, takes 9% longer; the hardware's tanh is off by
// 2^-11, with a cap of 30 an error of 1.5e-2 in a logit.
FS_DEVICE float tanh_of_2log2e(float y) {
    constexpr float kSmall = 0.7213475f;  // 0.25 x 2 log2(e)
    // Each with its rounding: what canonical kernels compute must not depend on ptxas.
    const float square = __fmul_rn(y, y);
    float p = fmaf(square, 6.420915e-4f, -1.38712712e-2f);
    p = fmaf(square, p, 0.34657344f);
    const float large = fmaf(-2.0f, reciprocal_approx(__fadd_rn(exp2_approx(y), 1.0f)), 1.0f);
    return fabsf(y) < kSmall ? __fmul_rn(y, p) : large;
}

}  // namespace flashsmith
