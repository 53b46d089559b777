// What a forward kernel is called with, and what it computes (Semantics). Plain C++20 without CUDA
// types: the host compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>
#include <cstdint>

namespace flashsmith {

// The ScalarType codes that tensors carry.
enum class DType : int { FP16 = 5, BF16 = 15 };

// Which keys a query may see. Positions count from the bottom right: query i of seq_q stands at key
// i + seq_k - seq_q.
enum class MaskKind : int {
    none = 0,
    causal = 1,  // up to its own position
    window = 2,  // from window_left before to window_right after it
};

// What a library's kernels compute, as far as it is decided at compile time. Zero is the plain
// case.
struct Semantics {
    MaskKind mask;
    bool softcap;  // scores go through softcap * tanh(score / softcap)
    bool packed;   // sequences of unequal length one after the other, told apart by cu_seqlens
    bool uneven;   // lengths need not be multiples of the tiles, nor d be d_head

    constexpr auto operator<=>(const Semantics&) const = default;
    // Whether a kernel may meet a tile that is partly out of sight.
    constexpr bool masked() const { return mask != MaskKind::none || uneven; }
};

// No limit on this side of a window; longer than any sequence.
constexpr int32_t kUnlimited = 1 << 30;

// Everything a forward kernel needs, passed by value as its only parameter.
// Strides count elements. The last dimension of q, k, v and o is contiguous.
struct ForwardKernelArgs {
    const void* q;
    const void* k;
    const void* v;
    void* o;
    float* lse;          // natural log-sum-exp of every row; null when nobody asked for it
    float* row_max;      // maximum of every row's scaled and capped scores; null likewise
    const float* sinks;  // (heads_q): a logit per head that joins every row's softmax; may be null
    const int32_t* cu_seqlens_q;  // (batch + 1) offsets of packed sequences; null unless packed
    const int32_t* cu_seqlens_k;

    int64_t q_batch_stride, q_seq_stride, q_head_stride;
    int64_t k_batch_stride, k_seq_stride, k_head_stride;
    int64_t v_batch_stride, v_seq_stride, v_head_stride;
    int64_t o_batch_stride, o_seq_stride, o_head_stride;
    int64_t lse_batch_stride, lse_head_stride;  // of lse and row_max; rows are neighbours

    int32_t batch;
    int32_t seq_q, seq_k;      // packed: the longest, and no sequence counts beyond it
    int32_t total_q, total_k;  // packed: rows of all sequences together
    int32_t heads_q, heads_k;
    int32_t d;  // <= d_head
    int32_t n_Q_blocks, n_KV_blocks;
    int32_t window_left, window_right;
    int32_t heads_per_group;  // query heads whose blocks run side by side

    float scale_log2;  // what turns a score into base-2 logits: scale * log2(e), or with a softcap
                       // softcap * log2(e)
    float softcap_scale_2log2e;  // with a softcap: 2 log2(e) scale / softcap, for the tanh
};

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

}  // namespace flashsmith
