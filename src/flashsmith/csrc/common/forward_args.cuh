// The arguments of a forward kernel. Plain C++20 without CUDA types, because the host compiler, the
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
    float* lse;  // natural log-sum-exp of each row; null if not requested
    // The unions overlay fields of partial kernels with fields that only other kernels use, so that
    // all kernels take the same argument type.
    union {
        float* row_max;          // maximum of each row's scaled, capped scores; may be null
        const int32_t* k_begin;  // partial: (batch), each sequence's first key; may be null
    };
    union {
        const float* sinks;  // (heads_q): a logit per head that joins every row's softmax, or null
        const int32_t* seqused_k;  // partial: (batch), each sequence's number of keys; may be null
    };
    const int32_t* cu_seqlens_q;  // (batch + 1): offsets of packed sequences, else null
    const int32_t* cu_seqlens_k;

    int64_t q_batch_stride, q_seq_stride, q_head_stride;
    int64_t k_batch_stride, k_seq_stride, k_head_stride;
    int64_t v_batch_stride, v_seq_stride, v_head_stride;
    int64_t o_batch_stride, o_seq_stride, o_head_stride;
    // Strides of lse and row_max, whose rows are contiguous. Kernels that split keys compute these
    // strides from the lengths and store the parts' location here: see common/split_keys.cuh.
    union {
        int64_t lse_batch_stride;
        float* parts;
    };
    union {
        int64_t lse_head_stride;
        int64_t part_rows;  // number of rows of all parts together
    };

    int32_t batch;
    int32_t seq_q, seq_k;      // packed: the maximum, to which longer sequences are cut
    int32_t total_q, total_k;  // packed: the rows of all sequences
    int32_t heads_q, heads_k;
    union {
        int32_t d;  // <= d_head; wgmma with d_v: width of v and o (tensor maps have q's and k's)
        struct {
            int16_t qk, v;  // mma_sync with d_v: the widths of q and k, and of v and o
        } widths;
    };
    int32_t n_Q_blocks, n_KV_blocks;
    int32_t window_left, window_right;
    int32_t heads_per_group;  // query heads in a group that shares L2; 1: no grouping

    float scale_log2;  // turns a score into base-2 logits: scale * log2(e), or softcap * log2(e)
                       // with a softcap
    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh

    int32_t n_whole_tiles;  // with split_keys: tiles from this index on are computed in parts
};

}  // namespace flashsmith
