// Functions for a library's struct Score, which changes scores before the softmax.
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// Computes tanh x from y = 2 log2(e) x, with a relative error of at most 8e-7 even for small x.
// Small x matter because with a large cap tanh x is small, and the cap multiplies it, with its
// error, in the logit. The formula 1 - 2 / (e^2x + 1) is off by up to 8e-7 for large x, but cancels
// for small x (it is off by 1e-3 at x = 1e-4). Below |x| = 0.25 an odd minimax polynomial replaces
// it, which is off by 4e-7.
//
// A rational function of y, with one special function instead of two, takes 9% longer. The
// hardware's tanh is off by 2^-11, which is 1.5e-2 in a logit with a cap of 30.
FS_DEVICE float tanh_of_2log2e(float y) {
    constexpr float kSmall = 0.7213475f;  // 0.25 x 2 log2(e)
    // Every operation specifies its rounding: the bits of canonical kernels must not depend on
    // ptxas.
    const float square = __fmul_rn(y, y);
    float p = fmaf(square, 6.420915e-4f, -1.38712712e-2f);
    p = fmaf(square, p, 0.34657344f);
    const float large = fmaf(-2.0f, reciprocal_approx(__fadd_rn(exp2_approx(y), 1.0f)), 1.0f);
    return fabsf(y) < kSmall ? __fmul_rn(y, p) : large;
}

}  // namespace flashsmith
