// canonical-1: an order of operations that determines a row's bits, whichever kernel computes the
// row.
//
// docs/bits.md is the specification. A row's keys lie in tiles and chunks at absolute positions. A
// chunk starts from an empty state and takes its tiles in ascending order; chunks are merged in
// ascending order. A kernel may distribute a row's tiles over warps and CTAs freely, as long as
// each sum below adds its terms in its order.
//
// Every operation specifies its rounding; otherwise ptxas may fuse a product and a sum.
#pragma once

#include "common/accumulators.cuh"
#include "common/canonical_sizes.cuh"
#include "common/softmax.cuh"

namespace flashsmith {

// The target architecture, 90 for 9.0.
#ifdef __CUDA_ARCH__
constexpr int kTargetArch = __CUDA_ARCH__ / 10;
#else
constexpr int kTargetArch = 90;  // any value: the host compiler parses kernels but builds none
#endif

// A row's state in one chunk or in several merged chunks: the base-2 offset of its exponents and
// the sum of its probabilities. A sum of 0 means that the row saw no key.
struct RowStatistics {
    float offset, sum;
};

// The weights with which two states of a row are merged. If one state has no key, the other is kept
// unchanged.
struct StateMerge {
    float weight, weight_next;
    bool none, none_next;

    // Replaces `row` with the merged state.
    FS_DEVICE StateMerge(RowStatistics& row, const RowStatistics& next)
        : none(row.sum == 0.0f), none_next(next.sum == 0.0f) {
        const float offset = fmaxf(row.offset, next.offset);
        weight = exp2_approx(__fsub_rn(row.offset, offset));
        weight_next = exp2_approx(__fsub_rn(next.offset, offset));
        const float sum = merged(row.sum, next.sum);
        row.offset = none_next ? row.offset : none ? next.offset : offset;
        row.sum = sum;
    }
    // Converts to and from two numbers, where a negative number marks a state without keys.
    FS_DEVICE explicit StateMerge(const float (&weights)[2])
        : weight(weights[0]),
          weight_next(weights[1]),
          none(weight < 0.0f),
          none_next(weight_next < 0.0f) {}
    FS_DEVICE void put(float (&weights)[2]) const {
        weights[0] = none ? -1.0f : weight;
        weights[1] = none_next ? -1.0f : weight_next;
    }
    FS_DEVICE float merged(float x, float next) const {
        const float both = __fmaf_rn(weight_next, next, __fmul_rn(weight, x));
        return none_next ? x : none ? next : both;
    }
};

// The final factor and LSE of a row whose chunks are all merged. `sink` (natural, may be null)
// joins the sum.
struct CanonicalEnd {
    float factor;  // -1 for a row without keys, for which o is 0
    float lse;     // natural

    FS_DEVICE CanonicalEnd(const RowStatistics& row, const float* sink) {
        constexpr float kLargest = 3.402823466e38f;
        const bool empty = row.sum == 0.0f;
        float base = empty ? -kLargest : row.offset, weight = 1.0f, total = row.sum;
        float base_ln = __fmul_rn(base, kLn2);
        if (sink != nullptr) {
            const float ln = *sink;
            // Clamped so that differences stay finite; a NaN stays NaN.
            float log2 = __fmul_rn(ln, kLog2E);
            log2 = log2 > kLargest ? kLargest : log2 < -kLargest ? -kLargest : log2;
            const float joined = fmaxf(base, log2);
            weight = exp2_approx(__fsub_rn(base, joined));
            total = __fmaf_rn(total, weight, exp2_approx(__fsub_rn(log2, joined)));
            // The largest sinks were clamped in base 2, so the natural value is used.
            base_ln = joined == log2 ? ln : base_ln;
        }
        factor = empty ? -1.0f : __fmul_rn(weight, reciprocal_approx(total));
        lse = __fmaf_rn(log2_approx(total), kLn2, base_ln);
    }
    // Adding +0 turns -0 into +0: a sum of zeros may be -0 here but +0 in a kernel that skips tiles
    // without keys.
    FS_DEVICE static float scaled(float o, float factor) {
        return factor < 0.0f ? 0.0f : __fadd_rn(__fmul_rn(o, factor), 0.0f);
    }
};

// A warp's 16 kMTiles rows of the chunk in progress, two rows per lane and accumulator tile.
template <int kMTiles>
struct CanonicalRows : OnlineSoftmax<kMTiles, true, false> {
    using Base = OnlineSoftmax<kMTiles, true, false>;
    // Maxima of raw scores, not below floor(); sums of this lane's columns only.
    using Base::row_max, Base::row_sum, Base::scale_log2;

    FS_DEVICE explicit CanonicalRows(float scale_log2) : Base(scale_log2) { reset(); }

    FS_DEVICE void reset() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) row_max[m][r] = floor(), row_sum[m][r] = 0.0f;
    }
    // Base::floor() with explicit rounding.
    FS_DEVICE float floor() const {
        constexpr float kFloor = -3e38f;
        return fmaxf(__fmul_rn(kFloor, reciprocal_approx(scale_log2)), kFloor);
    }
    FS_DEVICE float offset(int m, int r) const { return __fmul_rn(row_max[m][r], scale_log2); }

    // ---- a tile ----

    // Turns all scores of a tile into probabilities and rescales `o` to the new maximum.
    template <int kNTiles, int kONTiles>
    FS_DEVICE void update(float (&scores)[kMTiles][kNTiles][4], float (&o)[kMTiles][kONTiles][4]) {
        float factors[kMTiles][2];
        if (raise(scores, factors)) rescale(o, factors);
        exponentiate(scores);
    }
    // Updates the maxima with a tile's scores. Returns whether any row of the warp has a new
    // maximum. If so, the caller multiplies the accumulators by `factors`, which are exactly 1 for
    // other rows.
    template <int kNTiles>
    FS_DEVICE bool raise(const float (&scores)[kMTiles][kNTiles][4], float (&factors)[kMTiles][2]) {
        float maxima[kMTiles][2];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) maxima[m][r] = quad_max(largest(scores, m, r));
        return raise_to(maxima, factors);
    }
    FS_DEVICE bool raise_to(const float (&maxima)[kMTiles][2], float (&factors)[kMTiles][2]) {
        bool grows = false;
        // Branch-free: with a branch, the probabilities, which need the maxima, would wait for the
        // factors.
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float before = offset(m, r);
                const bool row_grows = maxima[m][r] > row_max[m][r];
                grows |= row_grows;
                row_max[m][r] = fmaxf(row_max[m][r], maxima[m][r]);
                const float factor = exp2_approx(__fsub_rn(before, offset(m, r)));
                factors[m][r] = row_grows ? factor : 1.0f;
                row_sum[m][r] = __fmul_rn(row_sum[m][r], factors[m][r]);
            }
        return any_lane(grows);
    }
    template <int kNTiles>
    FS_DEVICE static float largest(const float (&scores)[kMTiles][kNTiles][4], int m, int r) {
        // Two chains reduce the latency; the result does not depend on the order.
        float even = fmaxf(scores[m][0][2 * r], scores[m][0][2 * r + 1]);
        float odd = fmaxf(scores[m][1][2 * r], scores[m][1][2 * r + 1]);
#pragma unroll
        for (int n = 2; n < kNTiles; n += 2) {
            even = fmaxf(even, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
            odd = fmaxf(odd, fmaxf(scores[m][n + 1][2 * r], scores[m][n + 1][2 * r + 1]));
        }
        return fmaxf(even, odd);
    }
    // Turns the scores of 16 keys, in two tiles of 8, into probabilities. Returns this lane's part
    // of their sum.
    FS_DEVICE float exponentiate_16_keys(float (&left)[4], float (&right)[4], int m, int r) const {
        const float relative_to = -offset(m, r);
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
            left[e] = exp2_approx(__fmaf_rn(left[e], scale_log2, relative_to));
            right[e] = exp2_approx(__fmaf_rn(right[e], scale_log2, relative_to));
        }
        return __fadd_rn(__fadd_rn(left[2 * r], right[2 * r]),
                         __fadd_rn(left[2 * r + 1], right[2 * r + 1]));
    }
    // Turns the scores of a whole tile into probabilities and adds their sum to the row's.
    template <int kNTiles>
    FS_DEVICE void exponentiate(float (&scores)[kMTiles][kNTiles][4]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = exponentiate_16_keys(scores[m][0], scores[m][1], m, r);
#pragma unroll
                for (int n = 2; n < kNTiles; n += 2)
                    sum =
                        __fadd_rn(sum, exponentiate_16_keys(scores[m][n], scores[m][n + 1], m, r));
                add(m, r, sum);
            }
    }
    FS_DEVICE void add(int m, int r, float sum_of_tile) {
        row_sum[m][r] = __fadd_rn(row_sum[m][r], sum_of_tile);
    }
    template <int kONTiles>
    FS_DEVICE static void rescale(float (&o)[kMTiles][kONTiles][4],
                                  const float (&factors)[kMTiles][2]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kONTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m][n][e] = __fmul_rn(o[m][n][e], factors[m][e / 2]);
    }

    // ---- a chunk's end ----

    // Reduces the lanes' sums to the rows' sums.
    FS_DEVICE void finish_chunk() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& x = row_sum[m][r];
                x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
            }
    }
    // Merges the running state into this chunk's state, which then covers all chunks so far.
    // Returns the weights for the other sums. The running state includes a raw maximum.
    FS_DEVICE StateMerge merge_after(int m, int r, float running_max, float running_sum) {
        RowStatistics row{__fmul_rn(running_max, scale_log2), running_sum};
        const StateMerge merge(row, {offset(m, r), row_sum[m][r]});
        // It is chosen as the offset is. A sum may be 0 despite a maximum if scores are so large
        // that fp32 has no fraction bits left.
        const float joined = fmaxf(running_max, row_max[m][r]);
        row_max[m][r] = merge.none_next ? running_max : merge.none ? row_max[m][r] : joined;
        row_sum[m][r] = row.sum;
        return merge;
    }

    // ---- the rows' end ----

    // Like Base::finalize(), but for rows whose chunks have all been merged.
    FS_DEVICE void finalize(float (&factors)[kMTiles][2], const float* sink) {
        finalize(factors, sink, [](int, int) { return 0; });
    }
    template <class Head>
    FS_DEVICE void finalize(float (&factors)[kMTiles][2], const float* sinks, const Head& head) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = row_sum[m][r], base = offset(m, r);
                const CanonicalEnd end({base, sum},
                                       sinks == nullptr ? nullptr : sinks + head(m, r));
                factors[m][r] = end.factor;
                row_sum[m][r] = end.lse;
                // Comparisons ignore NaN: the maximum of the other scores is not the row's.
                const bool unknown = sum != sum && row_max[m][r] < INFINITY;
                row_max[m][r] = sum == 0.0f ? -INFINITY : unknown ? NAN : __fmul_rn(base, kLn2);
            }
    }
    template <int kONTiles>
    FS_DEVICE static void normalize(float (&o)[kMTiles][kONTiles][4],
                                    const float (&factors)[kMTiles][2]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kONTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    o[m][n][e] = CanonicalEnd::scaled(o[m][n][e], factors[m][e / 2]);
    }
};

}  // namespace flashsmith
