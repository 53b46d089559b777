// What a forward kernel is called with, and the config that names a kernel.
// Plain C++20 without CUDA types: the host compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>
#include <cstdint>

namespace flashsmith {

// The ScalarType codes that tensors carry.
enum class DType : int { FP16 = 5, BF16 = 15 };

// Everything a forward kernel needs, passed by value as its only parameter.
// Strides count elements. The last dimension of q, k, v and o is contiguous.
struct ForwardKernelArgs {
    const void* q;
    const void* k;
    const void* v;
    void* o;
    float* lse;  // (batch, heads_q, seq_q), natural logarithm; null when nobody asked for it

    int64_t q_batch_stride, q_seq_stride, q_head_stride;
    int64_t k_batch_stride, k_seq_stride, k_head_stride;
    int64_t v_batch_stride, v_seq_stride, v_head_stride;
    int64_t o_batch_stride, o_seq_stride, o_head_stride;

    int32_t batch;
    int32_t seq_q, seq_k;
    int32_t heads_q, heads_k;
    int32_t n_Q_blocks, n_KV_blocks;

    // scale * log2(e): the kernels exponentiate in base 2.
    float scale_log2;
};

// Names one kernel of the mma.sync family. Fields, order and meaning are those of the Python class;
// a K-tile is 8 columns. Later knobs go at the end and their zero means 'as before'.
struct FlashForwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warps;
    bool async_copy;
    bool eager_load_blocks;
    bool swizzled;
    int Q_mma_load_K_tiles;
    int K_mma_load_K_tiles;
    int V_mma_load_K_tiles;
    bool mma_double_buffer_loads;
    bool optimized_softmax;

    constexpr auto operator<=>(const FlashForwardKernelConfig&) const = default;

    // Dynamic shared memory of one CTA, bytes: a Q tile, a K tile and a V tile. O reuses Q's.
    constexpr int smem_bytes(int elem_size = 2) const {
        return (B_r + 2 * B_c) * d_head * elem_size;
    }

    // CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
    // count per thread; 0 leaves the register file out of account.
    constexpr int num_ctas_per_sm(int max_smem_bytes, int registers = 0) const;
};

using forward_kernel_fn = void (*)(const ForwardKernelArgs);

}  // namespace flashsmith
