// States of rows over some keys, and how they are merged: states of warps that have different keys
// of a part, and states of parts. Sums are relative to the state's own maximum, in base 2. If the
// sum of probabilities is 0, there was no key, and the rest of the state is ignored.
#pragma once

#include "common/ptx_functions.cuh"
#include "mma_sync_decode/config.cuh"

namespace flashsmith {

constexpr float kLargestFloat = 3.402823466e38f;

FS_DEVICE uint32_t as_uint(float x) {
    return __float_as_uint(x);
}

struct RowState {
    float maximum = -kLargestFloat;
    float sum = 0.0f;
    float o[4] = {};

    FS_DEVICE RowState() {}
    // Reads a state in the format in which memory holds it.
    FS_DEVICE RowState(float2 statistics, uint4 sums) {
        maximum = statistics.x, sum = statistics.y;
        o[0] = __uint_as_float(sums.x), o[1] = __uint_as_float(sums.y);
        o[2] = __uint_as_float(sums.z), o[3] = __uint_as_float(sums.w);
    }
    FS_DEVICE uint2 bits_of_statistics() const { return {as_uint(maximum), as_uint(sum)}; }
    FS_DEVICE uint4 bits_of_sums() const {
        return {as_uint(o[0]), as_uint(o[1]), as_uint(o[2]), as_uint(o[3])};
    }

    FS_DEVICE bool is_empty() const { return sum == 0.0f; }

    // Adds a state whose maximum is not above this one's. Branch-free, so that sums of several
    // states overlap.
    FS_DEVICE void add_if_any(const RowState& its) {
        const bool none = its.is_empty();
        const float weight = exp2_approx(its.maximum - maximum);
        const float added = fmaf(weight, its.sum, sum);
        sum = none ? sum : added;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float added_o = fmaf(weight, its.o[i], o[i]);
            o[i] = none ? o[i] : added_o;
        }
    }

    // Merges the state of the keys that follow into this one.
    FS_DEVICE void join(const RowState& next) {
        if (next.is_empty()) return;
        if (is_empty()) {
            *this = next;
            return;
        }
        const float joined = fmaxf(maximum, next.maximum);
        const float weight_before = exp2_approx(maximum - joined);
        const float weight = exp2_approx(next.maximum - joined);
        maximum = joined;
        sum = fmaf(weight, next.sum, weight_before * sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] = fmaf(weight, next.o[i], weight_before * o[i]);
    }

    // Merges the state of the preceding keys into this one, without a branch. In the sum of several
    // warps' states, sums without keys are 0, so the selection affects only the sign of zeros.
    FS_DEVICE void merge_after(const RowState& before) {
        const bool none_before = before.is_empty(), none = is_empty();
        const float joined = fmaxf(before.maximum, maximum);
        const float weight_before = exp2_approx(before.maximum - joined);
        const float weight = exp2_approx(maximum - joined);
        const auto chosen = [&](float one_before, float own, float both) {
            return none ? one_before : none_before ? own : both;
        };
        maximum = chosen(before.maximum, maximum, joined);
        sum = chosen(before.sum, sum, fmaf(weight, sum, weight_before * before.sum));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            o[i] = chosen(before.o[i], o[i], fmaf(weight, o[i], weight_before * before.o[i]));
    }
};

// The factor for a row's sums, and the row's natural log-sum-exp, both including the sink of its
// head. A row without keys has output 0 and a log-sum-exp of -inf or the sink. Its sums may be NaN,
// as products of weight 0 and NaN values. Its factor is therefore -1, and no other factor is
// negative.
struct RowEnd {
    float factor, lse;

    FS_DEVICE RowEnd(const RowState& row, const float* sink) {
        const float sink_ln = sink == nullptr ? 0.0f : *sink;
        // Clamped so that differences stay finite; a NaN stays NaN.
        float sink_log2 = sink_ln * kLog2E;
        sink_log2 = sink_log2 > kLargestFloat    ? kLargestFloat
                    : sink_log2 < -kLargestFloat ? -kLargestFloat
                                                 : sink_log2;
        const float accumulated = row.is_empty() ? -kLargestFloat : row.maximum;
        float base = accumulated, weight = 1.0f, total = row.sum;
        if (sink != nullptr) {
            base = fmaxf(accumulated, sink_log2);
            weight = exp2_approx(accumulated - base);
            total = total * weight + exp2_approx(sink_log2 - base);
        }
        factor = row.is_empty() ? -1.0f : weight * reciprocal_approx(total);
        // The largest sinks were clamped in base 2, so the natural value is used.
        const float base_ln = sink != nullptr && base == sink_log2 ? sink_ln : base * kLn2;
        lse = fmaf(log2_approx(total), kLn2, base_ln);
    }

    FS_DEVICE float scaled(float sum) const { return factor < 0.0f ? 0.0f : sum * factor; }
};

// The widths of a call's heads: one for q and k, one for v and o. They are equal in kernels without
// d_v.
template <class Kernel>
FS_DEVICE int d_of_qk(const DecodeKernelArgs& args) {
    return Kernel::has_d_v ? args.d & 0xffff : args.d;
}
template <class Kernel>
FS_DEVICE int d_of_v(const DecodeKernelArgs& args) {
    return Kernel::has_d_v ? args.d >> 16 : args.d;
}

// The steps of storing a row of o: finding an element's address, storing four elements, and storing
// the log-sum-exp.
FS_DEVICE char* row_of_o(const DecodeKernelArgs& args, int batch, int first_query, int query,
                         int head, int column) {
    return static_cast<char*>(args.o) +
           (batch * args.o_strides.batch + int64_t{first_query + query} * args.o_strides.row +
            head * args.o_strides.head + column) *
               kElementBytes;
}
template <typename value_t, class End>
FS_DEVICE void store_columns(char* target, const RowState& row, const End& end) {
    store_global_8B(target, {pack_16bit<value_t>(end.scaled(row.o[0]), end.scaled(row.o[1])),
                             pack_16bit<value_t>(end.scaled(row.o[2]), end.scaled(row.o[3]))});
}
FS_DEVICE void store_lse(const DecodeKernelArgs& args, float lse, int batch, int first_query,
                         int query, int head) {
    if (args.lse != nullptr)
        args.lse[batch * args.lse_batch_stride + head * args.lse_head_stride + first_query +
                 query] = lse;
}

// Stores four neighbouring elements of a row of o. The row's first thread also stores its
// log-sum-exp.
template <class Kernel, class End>
FS_DEVICE void store_row(const DecodeKernelArgs& args, const RowState& row, const End& end,
                         int batch, int first_query, int query, int head, int column) {
    if (column < d_of_v<Kernel>(args))
        store_columns<typename Kernel::value_t>(
            row_of_o(args, batch, first_query, query, head, column), row, end);
    if (column == 0) store_lse(args, end.lse, batch, first_query, query, head);
}

}  // namespace flashsmith
