// The online softmax of a warp's sixteen rows. Maximum, exponentials and rescaling are separate, so
// that GEMMs may run between them.
#pragma once

#include "common/softmax.cuh"
#include "sm90_forward/exp2_fma.cuh"

namespace flashsmith {

// kLazy: a row's exponents stay relative to an older maximum, `row_max`, until the row has outgrown
// it by more than room_to_grow() or `threshold` (log2). Rows do not influence each other. With a
// threshold of 0, row_max is always the maximum.
//
// kFmaShare: percent of the exponentials that the FMA pipe computes.
//
// kSums: the number of independent sums per row in which a block is added up.
template <bool kLazy, int kFmaShare, int kSums>
struct RowSoftmax : OnlineSoftmax<1, true, false> {
    using Base = OnlineSoftmax<1, true, false>;
    using Base::row_max, Base::row_sum, Base::scale_log2;

    FS_DEVICE explicit RowSoftmax(float scale_log2) : Base(scale_log2) {}

    // Updates the maximum with the scores. If it returns true (to the whole warp), O must be
    // multiplied by `factors`, as the row sums were.
    template <bool kFirst, int kTiles>
    FS_DEVICE bool update_max(const float (&scores)[1][kTiles][4], float (&factors)[2],
                              float threshold) {
        float lane_max[2] = {largest(scores, 0), largest(scores, 1)};
        return update_max_to<kFirst>(lane_max, factors, threshold);
    }
    // The largest of this lane's scores in its row `r`.
    template <int kTiles>
    FS_DEVICE static float largest(const float (&scores)[1][kTiles][4], int r) {
        // Two chains reduce the latency.
        float even = fmaxf(scores[0][0][2 * r], scores[0][0][2 * r + 1]);
        float odd = fmaxf(scores[0][1][2 * r], scores[0][1][2 * r + 1]);
#pragma unroll
        for (int n = 2; n < kTiles; n += 2) {
            even = fmaxf(even, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
            odd = fmaxf(odd, fmaxf(scores[0][n + 1][2 * r], scores[0][n + 1][2 * r + 1]));
        }
        return fmaxf(even, odd);
    }
    // Like update_max(), but from the largest score of each lane.
    template <bool kFirst>
    FS_DEVICE bool update_max_to(float (&lane_max)[2], float (&factors)[2], float threshold) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            lane_max[r] = fmaxf(quad_max(lane_max[r]), kFirst ? Base::floor() : row_max[0][r]);
        if constexpr (kFirst) {
            row_max[0][0] = lane_max[0];
            row_max[0][1] = lane_max[1];
            return false;
        } else {
            if constexpr (kLazy) {
                bool outgrown[2];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    outgrown[r] = (lane_max[r] - row_max[0][r]) * scale_log2 >
                                  fminf(room_to_grow(row_sum[0][r]), threshold);
                if (!any_lane(outgrown[0] || outgrown[1])) return false;
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (!any_lane_of_quad(outgrown[r])) lane_max[r] = row_max[0][r];
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                factors[r] = exp2_approx((row_max[0][r] - lane_max[r]) * scale_log2);
                row_max[0][r] = lane_max[r];
                row_sum[0][r] *= factors[r];
            }
            return true;
        }
    }

    // The sum of a block for each row, and the largest of the kSums partial sums.
    struct BlockSums {
        float sum[2];
        float largest[2];
    };

    // Turns scores into probabilities relative to row_max and adds them up.
    template <int kTiles>
    FS_DEVICE BlockSums exponentiate(float (&scores)[1][kTiles][4]) const {
        BlockSums block;
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
            block.sum[r] = sums[0] + sums[1];
            block.largest[r] = fmaxf(sums[0], sums[1]);
            if constexpr (kSums == 4) {
                block.sum[r] += sums[2] + sums[3];
                block.largest[r] = fmaxf(block.largest[r], fmaxf(sums[2], sums[3]));
            }
        }
        return block;
    }
    template <bool kFirst>
    FS_DEVICE void add(const BlockSums& block) {
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[0][r] = (kFirst ? 0.0f : row_sum[0][r]) + block.sum[r];
    }

    template <int kTiles>
    FS_DEVICE static void rescale(float (&o)[1][kTiles][4], const float (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][n][e] *= factors[e / 2];
    }
};

}  // namespace flashsmith
