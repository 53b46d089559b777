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

// How far a row's maximum may outgrow what its exponents are relative to, log2. `sum` is what this
// lane, one of the row's four, has summed up.
//
// The largest probability is no longer exactly 1 then but rounded to 16 bits: most of the row's
// error where it has much of the row's weight. With a bound on growth alone (2^8: P stays far below
// fp16's 65,504) 3 small problems of 1,000 err more than twice what a textbook kernel does, with
// one on the weight too no more than without laziness. Adding up rounded probabilities instead
// leaves a fifth of them. What is added to 1 is room for a maximum that has not grown.
constexpr float kMaxGrowth = 8.0f;
constexpr float kMaxShare = 0.25f;
FS_DEVICE float room_to_grow(float sum) {
    return fminf(log2_approx(fmaf(sum, kMaxShare, 1.00001f)), kMaxGrowth);
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
// kLazy (lazy_rescale): exponents are relative to an earlier maximum until some row of the warp has
// outgrown it further than room_to_grow().
template <int kMTiles, bool kFoldScale, bool kMasked, bool kLazy>
struct OnlineSoftmax {
    // Stands for 'no maximum yet' where -inf - (-inf) could be asked for.
    static constexpr float kLowest = -1e30f;

    float scale_log2;
    float row_max[kMTiles][2];
    float row_sum[kMTiles][2];  // this lane's columns only, until finish()
    float offset[kMTiles][2];   // what exponents are relative to, log2; lazy: from step to step

    FS_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_max[m][r] = -INFINITY;
                row_sum[m][r] = 0.0f;
                offset[m][r] = kLowest;
            }
    }

    // Turns a tile of scores into probabilities relative to the running maximum and rescales what
    // was accumulated under the old one. On the first tile nothing was.
    template <bool kFirst, int kNTiles, int kONTiles>
    FS_DEVICE void update(float (&scores)[kMTiles][kNTiles][4], float (&o)[kMTiles][kONTiles][4]) {
        raise_maximum<kFirst>(scores, o);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) exponentiate(scores[m][n], m);
    }

    // The first half of an update: the new maxima, and everything under them.
    template <bool kFirst, int kNTiles, int kONTiles>
    FS_DEVICE void raise_maximum(float (&scores)[kMTiles][kNTiles][4],
                                 float (&o)[kMTiles][kONTiles][4]) {
        bool outgrown = false;
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
                if constexpr (kLazy) {
                    outgrown |= log2_units(new_max) - offset[m][r] > room_to_grow(row_sum[m][r]);
                } else {
                    const float base = kMasked && new_max == -INFINITY ? 0.0f : new_max;
                    if constexpr (!kFirst)
                        rescale(o, m, r, exp2_approx(log2_units(old_max - base)));
                    offset[m][r] = log2_units(base);
                }
            }
        }
        if constexpr (kLazy)
            if (any_lane(outgrown)) catch_up<kFirst>(o);
    }

    // The second half, a tile of 16x8 at a time.
    FS_DEVICE void exponentiate(float (&tile)[4], int m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = kFoldScale ? fmaf(tile[e], scale_log2, -offset[m][e / 2])
                                       : tile[e] - offset[m][e / 2];
            tile[e] = exp2_approx(x);
            row_sum[m][e / 2] += tile[e];
        }
    }

    // Completes the row sums, lets the head's sink join them, and divides O by them. Leaves the
    // natural log-sum-exp in row_sum and the natural maximum in row_max. A row that saw nothing
    // gives 0, and -inf or the sink alone.
    template <int kONTiles>
    FS_DEVICE void finish(float (&o)[kMTiles][kONTiles][4], const float* sink) {
        float factors[kMTiles][2];
        conclude(factors, sink);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) multiply(o, m, r, factors[m][r]);
    }

    // finish(), but for O: it is to be multiplied by `factors`.
    FS_DEVICE void conclude(float (&factors)[kMTiles][2], const float* sink) {
        const float sink_log2 = sink == nullptr ? 0.0f : *sink * kLog2E;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float max_log2 = log2_units(row_max[m][r]);
                const float accumulated = kLazy ? offset[m][r] : max_log2;
                float total = quad_sum(row_sum[m][r]);
                float base = accumulated;
                float weight = 1.0f;  // of what was accumulated, in terms of `base`
                if (sink != nullptr) {
                    base = fmaxf(accumulated, sink_log2);
                    // A sink of -inf and nothing seen: exponents need something finite, as above.
                    if (base == -INFINITY) base = 0.0f;
                    weight = exp2_approx(accumulated - base);
                    total = total * weight + exp2_approx(sink_log2 - base);
                }
                // A division proper would branch, and its wait is everybody's.
                factors[m][r] = total == 0.0f ? 0.0f : weight * reciprocal_approx(total);
                row_sum[m][r] = (base + log2_approx(total)) * kLn2;
                row_max[m][r] = max_log2 * kLn2;
            }
    }

  private:
    FS_DEVICE float log2_units(float x) const { return kFoldScale ? x * scale_log2 : x; }

    // Every row's exponents become relative to its maximum; a row without one keeps kLowest.
    template <bool kFirst, int kONTiles>
    FS_DEVICE void catch_up(float (&o)[kMTiles][kONTiles][4]) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float maximum = fmaxf(log2_units(row_max[m][r]), kLowest);
                if constexpr (!kFirst) rescale(o, m, r, exp2_approx(offset[m][r] - maximum));
                offset[m][r] = maximum;
            }
    }

    template <int kONTiles>
    FS_DEVICE void rescale(float (&o)[kMTiles][kONTiles][4], int m, int r, float factor) {
        row_sum[m][r] *= factor;
        multiply(o, m, r, factor);
    }

    template <int kONTiles>
    FS_DEVICE static void multiply(float (&o)[kMTiles][kONTiles][4], int m, int r, float factor) {
#pragma unroll
        for (int n = 0; n < kONTiles; ++n) {
            o[m][n][2 * r] *= factor;
            o[m][n][2 * r + 1] *= factor;
        }
    }
};

}  // namespace flashsmith
