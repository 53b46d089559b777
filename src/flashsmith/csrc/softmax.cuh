// Online softmax in fp32 over accumulator tiles. Base 2 throughout: scores carry scale * log2(e).
//
// In an accumulator of 16x8 tiles a lane holds, of each tile, columns 2 (lane % 4) + {0, 1} of rows
// lane / 4 (elements 0, 1) and lane / 4 + 8 (elements 2, 3): four lanes, a quad, share a row.
#pragma once

#include "ptx_functions.cuh"

namespace flashsmith {

constexpr float kLn2 = 0.693147180559945309f;

FS_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

FS_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

// Row statistics of 16 kMTiles rows: two rows a lane and tile.
//
// kFoldScale (optimized_softmax): the maximum is kept in raw scores and the scale is folded into
// the one FMA before exp2; otherwise the scores are scaled first, by multiplications of their own.
template <int kMTiles, bool kFoldScale>
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
                if constexpr (!kFirst) rescale(o, m, r, exp2_scaled(old_max, new_max));

                const float offset = kFoldScale ? new_max * scale_log2 : new_max;
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

    // Completes the row sums, divides O by them and leaves the log-sum-exp (natural) in row_max.
    template <int kONTiles>
    FS_DEVICE void finish(float (&o)[kMTiles][kONTiles][4]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = quad_sum(row_sum[m][r]);
                rescale(o, m, r, 1.0f / sum);
                const float max_log2 = kFoldScale ? row_max[m][r] * scale_log2 : row_max[m][r];
                row_max[m][r] = (max_log2 + log2_approx(sum)) * kLn2;
            }
    }

  private:
    FS_DEVICE float exp2_scaled(float old_max, float new_max) const {
        const float difference = old_max - new_max;
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
