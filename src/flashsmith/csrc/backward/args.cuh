// What the kernels of a backward pass are called with. Plain C++20 without CUDA types: the host
// compiler, the kernels and the tests read this file.
#pragma once

#include <cstdint>

#include "common/types.cuh"

namespace flashsmith {

// Rows for which statistics are kept, in whole blocks of so many: every tile of queries divides it.
constexpr int kStatisticsRows = 128;

// Everything the kernels of one backward pass need, passed by value as their only parameter.
// Strides count elements. The last dimension of every tensor is contiguous.
struct BackwardKernelArgs {
    const void *d_o, *q, *k, *v, *o;
    const float* lse;             // natural log-sum-exp of every row
    const float* dlse;            // its gradient; null: zero
    const float* sinks;           // (heads_q); may be null
    void *dq, *dk, *dv;           // null for what nobody asked for
    float* dsinks;                // (heads_q), likewise
    const int32_t* cu_seqlens_q;  // (batch + 1) offsets of packed sequences; null unless packed
    const int32_t* cu_seqlens_k;

    // Workspaces. Statistics of a row: log2(e) lse, infinite where that is -inf and behind the last
    // row; and D = rowsum(do o) - dlse, 0 there.
    float *lse_log2, *D;
    float* dq_sums;  // dq / scale in fp32, as the warps' accumulators lie; null unless atomics

    int64_t do_batch_stride, do_seq_stride, do_head_stride;
    int64_t q_batch_stride, q_seq_stride, q_head_stride;
    int64_t k_batch_stride, k_seq_stride, k_head_stride;
    int64_t v_batch_stride, v_seq_stride, v_head_stride;
    int64_t o_batch_stride, o_seq_stride, o_head_stride;
    int64_t dq_batch_stride, dq_seq_stride, dq_head_stride;
    int64_t dk_batch_stride, dk_seq_stride, dk_head_stride;
    int64_t dv_batch_stride, dv_seq_stride, dv_head_stride;
    int64_t lse_batch_stride, lse_head_stride;
    int64_t dlse_batch_stride, dlse_head_stride;
    int64_t statistics_batch_stride, statistics_head_stride;

    int32_t batch;
    int32_t seq_q, seq_k;      // packed: the longest, and no sequence counts beyond it
    int32_t total_q, total_k;  // packed: rows of all sequences together
    int32_t heads_q, heads_k;
    int32_t d;  // <= d_head
    int32_t window_left, window_right;
    int32_t grads_fp32;  // whether dq, dk and dv are

    // Neither factor of a score stands beside the other: nvcc would load them as a pair, and keep
    // half of one undefined where it needs the other alone.
    float scale_log2;  // what turns a score into base-2 logits: scale * log2(e), or with a softcap
                       // softcap * log2(e)
    float scale;
    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh
};

}  // namespace flashsmith
