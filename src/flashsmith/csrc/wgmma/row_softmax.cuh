// The online softmax of a warp's sixteen rows: maximum, exponentials and rescaling apart, so that
// products may run between them.
#pragma once

#include "common/softmax.cuh"
#include "wgmma/exp2_fma.cuh"

namespace flashsmith {

// kLazy: exponents stay relative to an older maximum, `row_max`, until some row of the warp has
// outgrown it further than room_to_grow() or by more than `threshold` (log2). A threshold of 0
// keeps row_max the maximum.
// kFmaShare: percent of the exponentials that the FMA pipe computes.
// kStale: row_max may be out of date when exponentiate() is called.
template <bool kLazy, int kFmaShare = 0, bool kStale = false>
struct RowSoftmax : OnlineSoftmax<1, true, false> {
    using Base = OnlineSoftmax<1, true, false>;
    using Base::row_max, Base::row_sum, Base::scale_log2;

    FS_DEVICE explicit RowSoftmax(float scale_log2) : Base(scale_log2) {}

    // Takes the maximum of the scores in. Where it returns true (to a whole warp), what was summed
    // up so far, O included, is to be multiplied by `factors`.
    template <bool kFirst, int kTiles>
    FS_DEVICE bool raise_maximum(const float (&scores)[1][kTiles][4], float (&factors)[2],
                                 float threshold) {
        float seen[2] = {largest(scores, 0), largest(scores, 1)};
        return raise_to<kFirst>(seen, factors, threshold);
    }
    // Of this lane's in its row `r`.
    template <int kTiles>
    FS_DEVICE static float largest(const float (&scores)[1][kTiles][4], int r) {
        // Two chains, for the latency.
        float even = fmaxf(scores[0][0][2 * r], scores[0][0][2 * r + 1]);
        float odd = fmaxf(scores[0][1][2 * r], scores[0][1][2 * r + 1]);
#pragma unroll
        for (int n = 2; n < kTiles; n += 2) {
            even = fmaxf(even, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
            odd = fmaxf(odd, fmaxf(scores[0][n + 1][2 * r], scores[0][n + 1][2 * r + 1]));
        }
        return fmaxf(even, odd);
    }
    // raise_maximum() of what each lane has seen.
    template <bool kFirst>
    FS_DEVICE bool raise_to(float (&seen)[2], float (&factors)[2], float threshold) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            seen[r] = fmaxf(quad_max(seen[r]), kFirst ? Base::floor() : row_max[0][r]);
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
                factors[r] = exp2_approx((row_max[0][r] - seen[r]) * scale_log2);
                row_max[0][r] = seen[r];
                row_sum[0][r] *= factors[r];
            }
            return true;
        }
    }

    // What a block adds to the rows: kSums sums of a row, as many independent chains.
    static constexpr int kSums = kStale ? 4 : 2;
    struct Added {
        float sum[2];
        float largest[2];  // of the kSums; nobody reads it unless kStale
    };

    // Turns scores into probabilities relative to row_max and adds them up. Where that is out of
    // date and the floor, they are infinite, which is noticed.
    template <int kTiles>
    FS_DEVICE Added exponentiate(float (&scores)[1][kTiles][4]) const {
        Added added;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float offset = row_max[0][r] * scale_log2;
            float sums[kSums] = {};
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = scores[0][n][2 * r + e];
                    x = exp2_shared_out<kFmaShare>(2 * n + e, fmaf(x, scale_log2, -offset));
                    sums[(2 * n + e) % kSums] += x;
                }
            added.sum[r] = sums[0] + sums[1];
            added.largest[r] = fmaxf(sums[0], sums[1]);
            if constexpr (kSums == 4) {
                added.sum[r] += sums[2] + sums[3];
                added.largest[r] = fmaxf(added.largest[r], fmaxf(sums[2], sums[3]));
            }
        }
        return added;
    }
    template <bool kFirst>
    FS_DEVICE void add(const Added& added) {
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[0][r] = (kFirst ? 0.0f : row_sum[0][r]) + added.sum[r];
    }

    // ---- a maximum that may be out of date ----

    // Whether no probability of this lane has outgrown row_max further than room_to_grow(). None is
    // above the sum it is in, and sums are at hand: nobody need look for the largest.
    FS_DEVICE bool holds(const Added& added, float threshold) const {
        bool holds = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float limit = fminf(fmaf(row_sum[0][r], kMaxShare, 1.00001f), threshold);
            holds = holds && added.largest[r] <= limit && in_reach(added.sum[r]);
        }
        return holds;
    }
    // Whether scores are lost: in a row without a maximum, or too far above it.
    FS_DEVICE static bool overflown(const Added& added) {
        return any_lane(!(in_reach(added.sum[0]) && in_reach(added.sum[1])));
    }
    // raise_maximum() when the scores are probabilities already.
    template <int kTiles>
    FS_DEVICE bool catch_up(float (&p)[1][kTiles][4], Added& added, float (&factors)[2],
                            float threshold) {
        float grown[2];
        bool outgrown = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // A maximum never falls.
            grown[r] = log2_approx(quad_max(fmaxf(largest(p, r), 1.0f)));
            outgrown |= grown[r] > fminf(room_to_grow(row_sum[0][r]), threshold);
        }
        if (!any_lane(outgrown)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = fmaf(grown[r], reciprocal_approx(scale_log2), row_max[0][r]);
            // By what exponents will differ, roundings included.
            factors[r] =
                exp2_approx(__fmul_rn(row_max[0][r], scale_log2) - __fmul_rn(raised, scale_log2));
            row_max[0][r] = raised;
            row_sum[0][r] *= factors[r];
            added.sum[r] *= factors[r];
        }
        rescale(p, factors);
        return true;
    }

    template <int kTiles>
    FS_DEVICE static void rescale(float (&o)[1][kTiles][4], const float (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][n][e] *= factors[e / 2];
    }

  private:
    // What can be brought back: fp32 holds it, and holds the factor to 1 without being subnormal,
    // which ex2 takes for 0. NaN is not.
    FS_DEVICE static bool in_reach(float sum) { return sum < 0x1p100f; }
};

}  // namespace flashsmith
