// Merging softmax rows: what several parts of the keys have given, as one sum over all of them.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// A row that parts are added to one after the other, and kColumns of its output. The order of the
// parts decides the bits. Maxima are natural logarithms, or of base 2 (kBase2).
//
// A NaN anywhere makes the row NaN, as it would in one kernel over all keys; +inf too.
template <int kColumns, bool kBase2 = false>
struct MergedRow {
    float max = -INFINITY;  // what sum and o are relative to
    float sum = 0.0f;       // 0: no part had a key
    float o[kColumns] = {};

    // A part's exponentials relative to `part_max` add up to `part_sum`, and weigh in `part`. An
    // output with its LSE is one with the LSE for a maximum and a sum of 1. The output of a part
    // without a key (-inf) does not count, whatever it is.
    FS_DEVICE void add(float part_max, float part_sum, const float (&part)[kColumns]) {
        if (part_max == -INFINITY) return;
        const float new_max = fmaxf(max, part_max);
        const float kept = exponential(max - new_max), weight = exponential(part_max - new_max);
        max = new_max;
        sum = fmaf(part_sum, weight, sum * kept);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) o[i] = fmaf(part[i], weight, o[i] * kept);
    }

    // Normalises o, and returns the row's log-sum-exp; a `sink` (natural, as it stands in memory)
    // joins the sum. Without a key o is 0, and the LSE -inf or the sink.
    FS_DEVICE float finish(const float* sink) {
        float base = max, kept = 1.0f;
        if (sink != nullptr && *sink != -INFINITY) {
            const float logit = kBase2 ? *sink * kLog2E : *sink;
            // Finite, so that differences are; a NaN stays one.
            const float joined = logit > kLargest ? kLargest : logit;
            base = fmaxf(max, joined);
            kept = exponential(max - base);
            sum = fmaf(sum, kept, exponential(joined - base));
            if (logit > kLargest) base = logit;
        }
        if (sum == 0.0f) return -INFINITY;
        const float factor = kept * reciprocal_approx(sum);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) o[i] *= factor;
        return kBase2 ? base + log2_approx(sum) : fmaf(log2_approx(sum), kLn2, base);
    }

  private:
    static constexpr float kLargest = 3.402823466e38f;  // finite fp32

    FS_DEVICE static float exponential(float x) { return exp2_approx(kBase2 ? x : x * kLog2E); }
};

}  // namespace flashsmith
