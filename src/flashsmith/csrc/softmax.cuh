// Online softmax in fp32 over accumulator tiles. Base 2 throughout: logits carry log2(e).
//
// In an accumulator of 16x8 tiles a lane holds, of each tile, columns 2 (lane % 4) + {0, 1} of rows
// lane / 4 (elements 0, 1) and lane / 4 + 8 (elements 2, 3): four lanes, a quad, share a row.
#pragma once

#include "ptx_functions.cuh"

namespace flashsmith {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;

FS_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

FS_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

// scores -> tanh(scores * scale), with `scale_2log2e` = 2 log2(e) scale: tanh x = 1 - 2 / (e^2x +
// 1). The hardware's tanh is off by 2^-11, which a cap of 30 would make a logit's error of 1.5e-2.
template <int kMTiles, int kNTiles>
FS_DEVICE void tanh_scaled(float (&scores)[kMTiles][kNTiles][4], float scale_2log2e) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float exp_2x = exp2_approx(scores[m][n][e] * scale_2log2e);
                scores[m][n][e] = fmaf(-2.0f, reciprocal_approx(exp_2x + 1.0f), 1.0f);
            }
}

// Row statistics of 16 kMTiles rows: two rows a lane and tile.
//
// kFoldScale (optimized_softmax): the maximum is kept in raw scores and the scale is folded into
// the one FMA before exp2; otherwise the scores are scaled first, by multiplications of their own.
// kMasked: scores may be -inf, and a row may have met nothing else so far.
template <int kMTiles, bool kFoldScale, bool kMasked>
struct OnlineSoftmax {
    float scale_log2;
    float row_max[kMTiles][2];
    float row_sum[kMTiles][2];  // this lane's columns only, until finish()

    FS_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_max[m][r] = -INFINITY;
                row_sum[m][r] = 0.0f;
            }
    }

    // Turns a tile of scores into probabilities relative to the running maximum and rescales what
    // was accumulated under the old one. On the first tile nothing was.
    template <bool kFirst, int kNTiles, int kONTiles>
    FS_DEVICE void update(float (&scores)[kMTiles][kNTiles][4], float (&o)[kMTiles][kONTiles][4]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            if constexpr (!kFoldScale) {
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) scores[m][n][e] *= scale_log2;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float old_max = row_max[m][r];
                float new_max = kFirst ? scores[m][0][2 * r] : old_max;
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
                    new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
                new_max = quad_max(new_max);
                row_max[m][r] = new_max;
                // What exponents are taken relative to: finite, so that -inf - (-inf) cannot be.
                const float base = kMasked && new_max == -INFINITY ? 0.0f : new_max;
                if constexpr (!kFirst) rescale(o, m, r, exp2_scaled(old_max - base));

                const float offset = kFoldScale ? base * scale_log2 : base;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        const float x = kFoldScale ? fmaf(scores[m][n][e], scale_log2, -offset)
                                                   : scores[m][n][e] - offset;
                        scores[m][n][e] = exp2_approx(x);
                        sum += scores[m][n][e];
                    }
                row_sum[m][r] = kFirst ? sum : row_sum[m][r] + sum;
            }
        }
    }

    // Completes the row sums, lets the head's sink join them, and divides O by them. Leaves the
    // natural log-sum-exp in row_sum and the natural maximum in row_max. A row that saw nothing
    // gives 0, and -inf or the sink alone.
    template <int kONTiles>
    FS_DEVICE void finish(float (&o)[kMTiles][kONTiles][4], const float* sink) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float max_log2 = kFoldScale ? row_max[m][r] * scale_log2 : row_max[m][r];
                float total = quad_sum(row_sum[m][r]);
                float base = max_log2;
                float weight = 1.0f;  // of what was accumulated, in terms of `base`
                if (sink != nullptr) {
                    const float sink_log2 = *sink * kLog2E;
                    base = fmaxf(max_log2, sink_log2);
                    // A sink of -inf and nothing seen: exponents need something finite, as above.
                    if (base == -INFINITY) base = 0.0f;
                    weight = exp2_approx(max_log2 - base);
                    total = total * weight + exp2_approx(sink_log2 - base);
                }
                rescale(o, m, r, total == 0.0f ? 0.0f : weight / total);
                row_sum[m][r] = (base + log2_approx(total)) * kLn2;
                row_max[m][r] = max_log2 * kLn2;
            }
    }

  private:
    FS_DEVICE float exp2_scaled(float difference) const {
        return exp2_approx(kFoldScale ? difference * scale_log2 : difference);
    }

    template <int kONTiles>
    FS_DEVICE void rescale(float (&o)[kMTiles][kONTiles][4], int m, int r, float factor) {
        row_sum[m][r] *= factor;
#pragma unroll
        for (int n = 0; n < kONTiles; ++n) {
            o[m][n][2 * r] *= factor;
            o[m][n][2 * r + 1] *= factor;
        }
    }
};

}  // namespace flashsmith
