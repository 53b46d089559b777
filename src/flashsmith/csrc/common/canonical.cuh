// canonical-1: an order of operations that fixes a row's bits, whichever kernel computes it.
//
// docs/bits.md is the specification. A row's keys lie in tiles and chunks at absolute positions.
// Within a chunk tiles follow each other in ascending order, from a state of nothing; chunks are
// merged in ascending order. A kernel may give a row's tiles to whatever warps and CTAs it likes,
// as long as each sum below has its terms in its order.
//
// Every operation names its rounding: ptxas may fuse a product and a sum that do not.
#pragma once

#include "common/accumulators.cuh"
#include "common/canonical_sizes.cuh"
#include "common/softmax.cuh"

namespace flashsmith {

// The architecture that is compiled for.
#ifdef __CUDA_ARCH__
constexpr int kTargetArch = __CUDA_ARCH__ / 10;
#else
constexpr int kTargetArch = 90;  // the host compiler reads kernels, and builds none
#endif

// A chunk's state, or several chunks' merged one, of a row: what exponents are relative to, base 2,
// and the sum of the probabilities. A sum of 0 means that the row saw no key.
struct RowStatistics {
    float offset, sum;
};

// How the sums of two states of a row become one. Without a key on one side the other stands.
struct StateMerge {
    float weight, weight_next;
    bool none, none_next;

    // `row` becomes the merged row's.
    FS_DEVICE StateMerge(RowStatistics& row, const RowStatistics& next)
        : none(row.sum == 0.0f), none_next(next.sum == 0.0f) {
        const float offset = fmaxf(row.offset, next.offset);
        weight = exp2_approx(__fsub_rn(row.offset, offset));
        weight_next = exp2_approx(__fsub_rn(next.offset, offset));
        const float sum = merged(row.sum, next.sum);
        row.offset = none_next ? row.offset : none ? next.offset : offset;
        row.sum = sum;
    }
    FS_DEVICE float merged(float x, float next) const {
        const float both = __fmaf_rn(weight_next, next, __fmul_rn(weight, x));
        return none_next ? x : none ? next : both;
    }
};

// A row's end, once all chunks are merged: `sink` (natural, may be null) joins the sum.
struct CanonicalEnd {
    float factor;  // -1 of a row without keys, whose o is 0
    float lse;     // natural

    FS_DEVICE CanonicalEnd(const RowStatistics& row, const float* sink) {
        constexpr float kLargest = 3.402823466e38f;
        const bool empty = row.sum == 0.0f;
        float base = empty ? -kLargest : row.offset, weight = 1.0f, total = row.sum;
        float base_ln = __fmul_rn(base, kLn2);
        if (sink != nullptr) {
            const float ln = *sink;
            // Finite, so that differences are; a NaN stays one.
            float log2 = __fmul_rn(ln, kLog2E);
            log2 = log2 > kLargest ? kLargest : log2 < -kLargest ? -kLargest : log2;
            const float joined = fmaxf(base, log2);
            weight = exp2_approx(__fsub_rn(base, joined));
            total = __fmaf_rn(total, weight, exp2_approx(__fsub_rn(log2, joined)));
            // The largest sinks were clamped in base 2.
            base_ln = joined == log2 ? ln : base_ln;
        }
        factor = empty ? -1.0f : __fmul_rn(weight, reciprocal_approx(total));
        lse = __fmaf_rn(log2_approx(total), kLn2, base_ln);
    }
    // A sum of zeros may be -0 where another kernel, which skips a tile without keys, has +0.
    FS_DEVICE static float scaled(float o, float factor) {
        return factor < 0.0f ? 0.0f : __fadd_rn(__fmul_rn(o, factor), 0.0f);
    }
};

// The rows of a chunk in the making: 16 kMTiles rows of a warp, two a lane and tile of
// accumulators.
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
    // Base::floor() with its rounding named.
    FS_DEVICE float floor() const {
        constexpr float kFloor = -3e38f;
        return fmaxf(__fmul_rn(kFloor, reciprocal_approx(scale_log2)), kFloor);
    }
    FS_DEVICE float offset(int m, int r) const { return __fmul_rn(row_max[m][r], scale_log2); }

    // ---- a tile ----

    // All scores of a tile, which become probabilities; `o` becomes relative to the new maximum.
    template <int kNTiles, int kONTiles>
    FS_DEVICE void update(float (&scores)[kMTiles][kNTiles][4], float (&o)[kMTiles][kONTiles][4]) {
        float factors[kMTiles][2];
        if (raise(scores, factors)) rescale(o, factors);
        exponentiate(scores);
    }
    // Takes a tile's scores into the maxima. Whether a row of the warp has a new one: then its sums
    // are to be multiplied by `factors`, which are exactly 1 of rows that have not.
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
        // Without a branch: probabilities, which need the maxima, would wait for the factors.
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
        // Two chains, for the latency: maxima have no order.
        float even = fmaxf(scores[m][0][2 * r], scores[m][0][2 * r + 1]);
        float odd = fmaxf(scores[m][1][2 * r], scores[m][1][2 * r + 1]);
#pragma unroll
        for (int n = 2; n < kNTiles; n += 2) {
            even = fmaxf(even, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
            odd = fmaxf(odd, fmaxf(scores[m][n + 1][2 * r], scores[m][n + 1][2 * r + 1]));
        }
        return fmaxf(even, odd);
    }
    // Scores of 16 keys, in two tiles of 8, become probabilities. Returns their sum as far as this
    // lane has them.
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
    // A whole tile's.
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

    // The lanes' sums become the rows'.
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
    // A row of this chunk, which becomes that of all chunks up to it, and how sums are merged. The
    // running state has a raw maximum, too.
    FS_DEVICE StateMerge merge_after(int m, int r, float running_max, float running_sum) {
        RowStatistics row{__fmul_rn(running_max, scale_log2), running_sum};
        const StateMerge merge(row, {offset(m, r), row_sum[m][r]});
        // The maximum follows the offset's rule. A sum may be 0 beside a maximum, where scores have
        // no bits behind the point.
        const float joined = fmaxf(running_max, row_max[m][r]);
        row_max[m][r] = merge.none_next ? running_max : merge.none ? row_max[m][r] : joined;
        row_sum[m][r] = row.sum;
        return merge;
    }

    // ---- the rows' end ----

    // As Base::finalize(), of rows whose chunks are merged.
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
                // Comparisons skip NaN: the maximum of the other scores is not the row's.
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
