// 2^x without the special function unit, for a share of the exponentials. At small d_head that
// unit is as busy as the tensor cores, while the FMA pipe is half idle.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

FS_DEVICE float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// Valid for x < 127.5. 2^x = 2^n 2^f, where n is the integer nearest to x (Cody and Waite). A cubic
// approximates 2^f with a relative error of at most 1.02e-4, less than half of what rounding to 16
// bits adds. It is the minimax polynomial on [-1/2, 1/2] with p(0) = 1. The result is 0 for x of
// -127 and below, including -inf, as masked scores require. NaN stays NaN.
FS_DEVICE float exp2_fma(float x) {
    // Between 2^23 and 2^24, consecutive floats are consecutive integers. The low bits of the sum
    // are n + 127, the exponent of 2^n. The low bits of a NaN make the power -inf, and NaN times
    // -inf is NaN.
    constexpr float kShift = 12582912.0f + 127.0f;
    x = max_or_nan(x, -127.0f);
    const float shifted = x + kShift;
    const float f = x - (shifted - kShift);
    float p = fmaf(f, 0.05500895f, 0.24221101f);
    p = fmaf(f, p, 0.6932829f);
    p = fmaf(f, p, 1.0f);
    return p * __int_as_float(__float_as_int(shifted) << 23);
}

// Computes the i-th of many exponentials. Of every hundred, exp2_fma() computes kShare, which are
// evenly spread.
template <int kShare>
FS_DEVICE float exp2_shared_out(int i, float x) {
    return (i + 1) * kShare / 100 > i * kShare / 100 ? exp2_fma(x) : exp2_approx(x);
}

}  // namespace flashsmith
