// The arguments of the kernels of a backward pass. Plain C++20 without CUDA types, because the host
// compiler, the kernels and the tests read this file.
#pragma once

#include <cstdint>

#include "common/program_args.cuh"
#include "common/types.cuh"

namespace flashsmith {

// Row statistics are padded to whole blocks of this many rows, a multiple of every query tile size.
constexpr int kStatisticsRows = 128;

// Everything that the kernels of one backward pass need. It is their only parameter, passed by
// value. Strides count elements. The last dimension of every tensor is contiguous.
struct BackwardKernelArgs {
    const void *d_o, *q, *k, *v, *o;
    const float* lse;             // natural log-sum-exp of each row
    const float* dlse;            // gradient of lse; null means zero
    const float* sinks;           // (heads_q); may be null
    void *dq, *dk, *dv;           // null for gradients that are not requested
    float* dsinks;                // (heads_q); null if not requested
    const int32_t* cu_seqlens_q;  // (batch + 1): offsets of packed sequences, else null
    const int32_t* cu_seqlens_k;

    // Workspaces. The statistics of each row: log2(e) lse, and D = rowsum(do o) - dlse. Past the
    // last row, log2(e) lse is infinite and D is 0. log2(e) lse is also infinite if lse is -inf, or
    // if a program's mask hides all keys of the row.
    float *lse_log2, *D;
    float* dq_sums;  // dq / scale in fp32, in the layout of the warps' accumulators; null unless
                     // atomics

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
    int32_t seq_q, seq_k;      // packed: the maximum, to which longer sequences are cut
    int32_t total_q, total_k;  // packed: the rows of all sequences
    int32_t heads_q, heads_k;
    union {
        int32_t d;  // <= d_head
        struct {
            int16_t qk, v;  // kernels with d_v: the widths of q and k, and of v and o
        } widths;
    };
    int32_t window_left, window_right;
    int32_t grads_fp32;  // whether dq, dk and dv are fp32

    // The two score factors are not adjacent: nvcc would load them as a pair, and half of the pair
    // would be undefined where only one factor is needed.
    float scale_log2;  // turns a score into base-2 logits: scale * log2(e), or softcap * log2(e)
                       // with a softcap
    float scale;
    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh
};

// A config's d_v: the columns of V's tiles, or 0 if v is as wide as q and k.
template <class Config>
constexpr int pair_width(const Config& config) {
    if constexpr (requires { config.d_v; })
        return config.d_v;
    else
        return 0;
}
template <class Kernel>
constexpr int kPairWidth = pair_width(Kernel::CFG);

// The arguments of kernels that run a caller's program.
struct BackwardProgramArgs : BackwardKernelArgs {
    ProgramArgs program;
};

// Whether backward_prepare_kernel takes BackwardProgramArgs; it then evaluates the program's mask.
constexpr bool prepare_takes_program(const Semantics& semantics) {
    return semantics.program_masks;
}

}  // namespace flashsmith
