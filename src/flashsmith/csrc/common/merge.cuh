// Merges softmax rows: combines results over parts of the keys into a result over all keys.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// A row to which parts are added one after another, with kColumns of its output. The order of the
// parts determines the bits. Maxima are natural logarithms, or base 2 with kBase2.
//
// A NaN or +inf anywhere makes the row NaN, as in one kernel over all keys.
template <int kColumns, bool kBase2 = false>
struct MergedRow {
    float max = -INFINITY;  // the maximum to which sum and o are relative
    float sum = 0.0f;       // 0: no part had a key
    float o[kColumns] = {};

    // Adds a part. Its exponentials are relative to `part_max`, sum to `part_sum` and weight the
    // values in `part`. For a normalised output, pass its LSE as the maximum and 1 as the sum. The
    // output of a part without a key (-inf) is ignored.
    FS_DEVICE void add(float part_max, float part_sum, const float (&part)[kColumns]) {
        if (part_max == -INFINITY) return;
        const float new_max = fmaxf(max, part_max);
        const float kept = exponential(max - new_max), weight = exponential(part_max - new_max);
        max = new_max;
        sum = fmaf(part_sum, weight, sum * kept);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) o[i] = fmaf(part[i], weight, o[i] * kept);
    }

    // Normalises o and returns the row's log-sum-exp. A `sink` (a natural logarithm, as in memory)
    // joins the sum. For a row without a key, o is 0 and the LSE is -inf or the sink.
    FS_DEVICE float finish(const float* sink) {
        float base = max, kept = 1.0f;
        if (sink != nullptr && *sink != -INFINITY) {
            const float logit = kBase2 ? *sink * kLog2E : *sink;
            // Clamped so that differences stay finite; a NaN stays NaN.
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
