// The online softmax of a warp's sixteen rows: maximum, exponentials and rescaling apart, so that
// products may run between them.
#pragma once

#include "../softmax.cuh"
#include "exp2_fma.cuh"

namespace flashsmith {

// kLazy: exponents stay relative to an older maximum, `row_max`, until some row of the warp has
// outgrown it further than room_to_grow() or by more than `threshold` (log2). A threshold of 0
// keeps row_max the maximum.
// kFmaShare: percent of the exponentials that the FMA pipe computes.
template <bool kMasked, bool kLazy, int kFmaShare = 0>
struct RowSoftmax : OnlineSoftmax<1, true, kMasked, false> {
    using Base = OnlineSoftmax<1, true, kMasked, false>;
    using Base::row_max, Base::row_sum, Base::scale_log2;

    FS_DEVICE explicit RowSoftmax(float scale_log2) : Base(scale_log2) {}

    // Takes the maximum of the scores in. Where it returns true (to a whole warp), what was summed
    // up so far, O included, is to be multiplied by `factors`.
    template <bool kFirst, int kTiles>
    FS_DEVICE bool raise_maximum(const float (&scores)[1][kTiles][4], float (&factors)[2],
                                 float threshold) {
        float seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Two chains, for the latency.
            float even = fmaxf(scores[0][0][2 * r], scores[0][0][2 * r + 1]);
            float odd = fmaxf(scores[0][1][2 * r], scores[0][1][2 * r + 1]);
#pragma unroll
            for (int n = 2; n < kTiles; n += 2) {
                even = fmaxf(even, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
                odd = fmaxf(odd, fmaxf(scores[0][n + 1][2 * r], scores[0][n + 1][2 * r + 1]));
            }
            seen[r] = quad_max(fmaxf(even, odd));
            if constexpr (!kFirst) seen[r] = fmaxf(seen[r], row_max[0][r]);
        }
        if constexpr (kFirst) {
            row_max[0][0] = seen[0];
            row_max[0][1] = seen[1];
            return false;
        } else {
            if constexpr (kLazy) {
                bool outgrown = false;
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    outgrown |= (seen[r] - row_max[0][r]) * scale_log2 >
                                fminf(room_to_grow(row_sum[0][r]), threshold);
                if (!any_lane(outgrown)) return false;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                factors[r] = exp2_approx((row_max[0][r] - finite(seen[r])) * scale_log2);
                row_max[0][r] = seen[r];
                row_sum[0][r] *= factors[r];
            }
            return true;
        }
    }

    // Turns scores into probabilities relative to row_max and sums them up.
    template <bool kFirst, int kTiles>
    FS_DEVICE void exponentiate(float (&scores)[1][kTiles][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float offset = finite(row_max[0][r]) * scale_log2;
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                float (&tile)[4] = scores[0][n];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = tile[2 * r + e];
                    x = exp2_shared_out<kFmaShare>(2 * n + e, fmaf(x, scale_log2, -offset));
                }
                even += tile[2 * r];
                odd += tile[2 * r + 1];
            }
            row_sum[0][r] = kFirst ? even + odd : row_sum[0][r] + (even + odd);
        }
    }

    template <int kTiles>
    FS_DEVICE static void rescale(float (&o)[1][kTiles][4], const float (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][n][e] *= factors[e / 2];
    }

  private:
    // -inf - (-inf) must not be asked for.
    FS_DEVICE static float finite(float maximum) {
        return kMasked && maximum == -INFINITY ? 0.0f : maximum;
    }
};

}  // namespace flashsmith
