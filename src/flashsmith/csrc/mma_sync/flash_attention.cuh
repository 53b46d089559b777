// The config that names a kernel of the mma.sync family. Plain C++20 without CUDA types: the host
// compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>

#include "common/forward_args.cuh"

namespace flashsmith {

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
    int kv_stages;
    bool lazy_rescale;
    bool ping_pong;
    int min_ctas_per_sm;
    bool trim_masks;
    int l2_group_mib;

    constexpr auto operator<=>(const FlashForwardKernelConfig&) const = default;

    // Tiles of K, and as many of V, in shared memory.
    constexpr int kv_tiles() const { return kv_stages > 0 ? kv_stages : 1; }

    // Dynamic shared memory of one CTA, bytes: a Q tile and the K and V tiles. O reuses Q's.
    constexpr int smem_bytes(int elem_size = 2) const {
        return (B_r + 2 * B_c * kv_tiles()) * d_head * elem_size;
    }

    // CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
    // count per thread; 0 leaves the register file out of account.
    constexpr int num_ctas_per_sm(int max_smem_bytes, int registers = 0) const;
};

constexpr int FlashForwardKernelConfig::num_ctas_per_sm(int max_smem_bytes, int registers) const {
    constexpr int kReservedSmemPerCta = 1024, kRegistersPerSm = 65536, kThreadsPerWarp = 32;
    constexpr int kMaxThreadsPerSm = 2048, kMaxCtasPerSm = 32;

    int ctas = max_smem_bytes / (smem_bytes() + kReservedSmemPerCta);
    const int by_threads = kMaxThreadsPerSm / (kThreadsPerWarp * n_warps);
    ctas = by_threads < ctas ? by_threads : ctas;
    ctas = kMaxCtasPerSm < ctas ? kMaxCtasPerSm : ctas;
    if (registers > 0) {
        // A warp's registers are handed out 8 per thread at a time: 256 per warp.
        const int per_warp = (registers + 7) / 8 * 8 * kThreadsPerWarp;
        const int by_registers = kRegistersPerSm / per_warp / n_warps;
        ctas = by_registers < ctas ? by_registers : ctas;
    }
    return ctas;
}

using forward_kernel_fn = void (*)(const ForwardKernelArgs);

}  // namespace flashsmith
