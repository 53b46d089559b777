// What a forward kernel is called with. Plain C++20 without CUDA types: the host compiler, the
// kernels and the tests all read this file.
#pragma once

#include <cstdint>

#include "common/types.cuh"

namespace flashsmith {

// Everything a forward kernel needs, passed by value as its only parameter.
// Strides count elements. The last dimension of q, k, v and o is contiguous.
struct ForwardKernelArgs {
    const void* q;
    const void* k;
    const void* v;
    void* o;
    float* lse;  // natural log-sum-exp of every row; null when it is not asked for
    // What partial kernels have lies where others have what they do not: all take one argument.
    union {
        float* row_max;          // maximum of every row's scaled and capped scores; null likewise
        const int32_t* k_begin;  // partial, (batch): where a sequence's keys begin; may be null
    };
    union {
        const float* sinks;  // (heads_q): a logit per head that joins every row's softmax, or null
        const int32_t* seqused_k;  // partial, (batch): how many keys count; may be null
    };
    const int32_t* cu_seqlens_q;  // (batch + 1) offsets of packed sequences; null unless packed
    const int32_t* cu_seqlens_k;

    int64_t q_batch_stride, q_seq_stride, q_head_stride;
    int64_t k_batch_stride, k_seq_stride, k_head_stride;
    int64_t v_batch_stride, v_seq_stride, v_head_stride;
    int64_t o_batch_stride, o_seq_stride, o_head_stride;
    // Of lse and row_max, whose rows are neighbours. Kernels that split keys know them from the
    // lengths, and have their parts here: see common/split_keys.cuh.
    union {
        int64_t lse_batch_stride;
        float* parts;
    };
    union {
        int64_t lse_head_stride;
        int64_t part_rows;  // of all parts
    };

    int32_t batch;
    int32_t seq_q, seq_k;      // packed: the longest, and no sequence counts beyond it
    int32_t total_q, total_k;  // packed: rows of all sequences together
    int32_t heads_q, heads_k;
    int32_t d;  // <= d_head
    int32_t n_Q_blocks, n_KV_blocks;
    int32_t window_left, window_right;
    int32_t heads_per_group;  // query heads that are grouped for L2; 1: none

    float scale_log2;  // what turns a score into base-2 logits: scale * log2(e), or with a softcap
                       // softcap * log2(e)
    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh

    int32_t n_whole_tiles;  // split_keys: tiles from here on are computed in parts
};

}  // namespace flashsmith
