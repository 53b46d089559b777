// Online softmax in fp32 over accumulator tiles. It works in base 2: logits include log2(e).
#pragma once

#include <type_traits>

#include "common/accumulators.cuh"
#include "common/forward_args.cuh"

namespace flashsmith {

// How far a row's maximum may outgrow the offset of its exponents, in log2. `sum` is the sum so far
// of this lane, one of the row's four.
//
// With lazy rescaling the largest probability is no longer exactly 1 but rounded to 16 bits. If
// this key dominates the row, that rounding is most of the row's error. With only a bound on growth
// (2^8 keeps P far below fp16's 65,504), 3 of 1,000 small problems have more than twice the error
// of a textbook kernel. With a bound on the weight too, such problems are about as rare as with
// eager rescaling. If the rounded probabilities were summed instead of bounding the weight, a fifth
// of those 3 in 1,000 would remain. The constant added to 1 is slack for a maximum that has not
// grown.
constexpr float kMaxGrowth = 8.0f;
constexpr float kMaxShare = 0.25f;
FS_DEVICE float room_to_grow(float sum) {
    return fminf(log2_approx(fmaf(sum, kMaxShare, 1.00001f)), kMaxGrowth);
}

// Statistics of 16 kMTiles rows, two rows per lane and tile.
//
// kFoldScale (optimized_softmax): the maximum is kept in raw scores and the scale is folded into
// the single FMA before exp2. Otherwise separate multiplications scale the scores first. kLazy
// (lazy_rescale): a row's exponents stay relative to an earlier maximum until the row has outgrown
// it by more than room_to_grow(). Other rows have no influence.
//
// Scores may be -inf, and a row may have seen nothing else so far. Maxima therefore have a floor,
// so that no step computes -inf - (-inf) or has to check for it.
template <int kMTiles, bool kFoldScale, bool kLazy>
struct OnlineSoftmax {
    float scale_log2;
    float row_max[kMTiles][2];  // not below floor()
    float row_sum[kMTiles][2];  // sums over only this lane's columns, until finalize()
    float offset[kMTiles][2];   // offset of exponents (log2); lazy kernels keep it across steps

    FS_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_max[m][r] = floor();
                row_sum[m][r] = 0.0f;
                offset[m][r] = log2_units(floor());
            }
    }

    // A finite number, in both units, that is below every score that matters. Raw scores may be as
    // large as bf16 values, or tanh values times a scale of up to 2^127 log2(e), for which -3e38 /
    // scale is still below -1.
    FS_DEVICE float floor() const {
        constexpr float kFloor = -3e38f;
        return kFoldScale ? fmaxf(kFloor * reciprocal_approx(scale_log2), kFloor) : kFloor;
    }

    // Turns a tile of scores into probabilities relative to the running maximum, and rescales the
    // sums from the old maximum to the new one. On the first tile there are no sums yet.
    template <bool kFirst, int kNTiles, int kONTiles>
    FS_DEVICE void update(float (&scores)[kMTiles][kNTiles][4], float (&o)[kMTiles][kONTiles][4]) {
        update_max<kFirst>(scores, o);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) exponentiate(scores[m][n], m);
    }

    // The first half of an update: computes the new maxima and rescales to them.
    template <bool kFirst, int kNTiles, int kONTiles>
    FS_DEVICE void update_max(float (&scores)[kMTiles][kNTiles][4],
                              float (&o)[kMTiles][kONTiles][4]) {
        bool outgrown[kMTiles][2], any_outgrown = false;
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
                float new_max = old_max;
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
                    new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
                new_max = quad_max(new_max);
                row_max[m][r] = new_max;
                if constexpr (kLazy) {
                    outgrown[m][r] =
                        log2_units(new_max) - offset[m][r] > room_to_grow(row_sum[m][r]);
                    any_outgrown |= outgrown[m][r];
                } else {
                    if constexpr (!kFirst)
                        rescale(o, m, r, exp2_approx(log2_units(old_max - new_max)));
                    offset[m][r] = log2_units(new_max);
                }
            }
        }
        if constexpr (kLazy)
            if (any_lane(any_outgrown)) rescale_to_max<kFirst>(o, outgrown);
    }

    // The second half of an update, for one 16x8 tile at a time.
    FS_DEVICE void exponentiate(float (&tile)[4], int m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = kFoldScale ? fmaf(tile[e], scale_log2, -offset[m][e / 2])
                                       : tile[e] - offset[m][e / 2];
            tile[e] = exp2_approx(x);
            row_sum[m][e / 2] += tile[e];
        }
    }

    // Completes the row sums and adds the head's sink to them. Leaves the natural log-sum-exp in
    // row_sum, the natural maximum in row_max, and the factors for normalize() in `factors`. A row
    // that saw no key, or only scores of -inf, has output 0 and a log-sum-exp of -inf or the sink.
    FS_DEVICE void finalize(float (&factors)[kMTiles][2], const float* sink) {
        const Sink of_all = sink_at(sink);
        finalize_rows(factors, sink != nullptr, [&](int, int) { return of_all; });
    }
    // finalize() for rows with different sinks: `head(m, r)` is the head of a row.
    template <class Head>
    FS_DEVICE void finalize(float (&factors)[kMTiles][2], const float* sinks, const Head& head) {
        finalize_rows(factors, sinks != nullptr, [&](int m, int r) {
            return sink_at(sinks == nullptr ? nullptr : sinks + head(m, r));
        });
    }

    // O of an empty row is 0 whatever was accumulated: V may hold NaN where P is 0.
    template <int kONTiles>
    FS_DEVICE static void normalize(float (&o)[kMTiles][kONTiles][4],
                                    const float (&factors)[kMTiles][2]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            // Few warps have such a row, and selecting every element in all warps would cost short
            // sequences 1%.
            if (any_lane(factors[m][0] < 0.0f || factors[m][1] < 0.0f)) {
#pragma unroll
                for (int n = 0; n < kONTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (factors[m][e / 2] < 0.0f) o[m][n][e] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kONTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m][n][e] *= fabsf(factors[m][e / 2]);
        }
    }

    // Writes the log-sum-exp and, with kMaxima, the maximum that finalize() left, if they are
    // requested. With kRowsEnd, only rows below `row_end` are written. `row(m, r)` is the index of
    // a row. `offset()` is the position of row 0, or `offset(i)` that of row i. Functions and
    // references are evaluated where they are used: kernels then compile to the same code as if
    // this body were inlined by hand. With values that the callers compute, the compiler would
    // generate different code.
    template <bool kRowsEnd, bool kMaxima, class Row, class Offset>
    FS_DEVICE void store_statistics(const ForwardKernelArgs& args, const int& lane, const Row& row,
                                    const int& row_end, const Offset& offset) const {
        if ((args.lse == nullptr && (!kMaxima || args.row_max == nullptr)) || lane % 4 != 0) return;
        constexpr bool kEven = std::is_invocable_v<const Offset&>;
        int64_t first = 0;
        if constexpr (kEven) first = offset();
        const auto at = [&](int i) {
            if constexpr (kEven)
                return first + i;
            else
                return offset(i);
        };
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = row(m, r);
                if (kRowsEnd && i >= row_end) continue;
                if (args.lse != nullptr) args.lse[at(i)] = row_sum[m][r];
                if (kMaxima && args.row_max != nullptr) args.row_max[at(i)] = row_max[m][r];
            }
    }

  private:
    static constexpr float kLargest = 3.402823466e38f;  // finite fp32
    static constexpr float kEmptyRow = -1.0f;           // marks an empty row; factors are >= 0

    // A sink logit in both units.
    struct Sink {
        float ln, log2;
    };
    FS_DEVICE static Sink sink_at(const float* sink) {
        const float ln = sink == nullptr ? 0.0f : *sink;
        // Clamped so that differences stay finite; a NaN stays NaN.
        float log2 = ln * kLog2E;
        log2 = log2 > kLargest ? kLargest : log2 < -kLargest ? -kLargest : log2;
        return {ln, log2};
    }

    template <class SinkOf>
    FS_DEVICE void finalize_rows(float (&factors)[kMTiles][2], bool has_sink,
                                 const SinkOf& sink_of) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Sink sink = sink_of(m, r);
                float total = quad_sum(row_sum[m][r]);
                // The sum of a row with keys is positive: its largest score's exponential is above
                // 0.
                const bool empty = total == 0.0f, is_nan = total != total;
                const float max_log2 = log2_units(row_max[m][r]);
                const float accumulated = empty ? -kLargest : kLazy ? offset[m][r] : max_log2;
                float base = accumulated;
                float weight = 1.0f;  // weight of the accumulated sum, relative to `base`
                if (has_sink) {
                    base = fmaxf(accumulated, sink.log2);
                    weight = exp2_approx(accumulated - base);
                    total = total * weight + exp2_approx(sink.log2 - base);
                }
                // A true division would branch, and all lanes would wait for it.
                factors[m][r] = empty ? kEmptyRow : weight * reciprocal_approx(total);
                // The largest sinks were clamped in base 2, so the natural value is used.
                const bool sink_is_base = has_sink && base == sink.log2;
                const float base_ln = sink_is_base ? sink.ln : base * kLn2;
                row_sum[m][r] = fmaf(log2_approx(total), kLn2, base_ln);
                // Comparisons ignore NaN: the maximum of the other scores is not the row's.
                const bool unknown = is_nan && row_max[m][r] < INFINITY;
                row_max[m][r] = empty ? -INFINITY : unknown ? NAN : max_log2 * kLn2;
            }
    }

    FS_DEVICE float log2_units(float x) const { return kFoldScale ? x * scale_log2 : x; }

    // Makes the exponents of rows that have outgrown their offset relative to the current maximum.
    template <bool kFirst, int kONTiles>
    FS_DEVICE void rescale_to_max(float (&o)[kMTiles][kONTiles][4],
                                  const bool (&outgrown)[kMTiles][2]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const bool is_raised = any_lane_of_quad(outgrown[m][r]);
                const float maximum = is_raised ? log2_units(row_max[m][r]) : offset[m][r];
                if constexpr (!kFirst) rescale(o, m, r, exp2_approx(offset[m][r] - maximum));
                offset[m][r] = maximum;
            }
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
