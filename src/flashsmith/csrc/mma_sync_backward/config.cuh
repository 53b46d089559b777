// The config that names a kernel of the mma_sync_backward family. Plain C++20 without CUDA types:
// the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"

namespace flashsmith {

// How dq is summed over the CTAs that have parts of it.
enum class DqMode : int {
    two_kernels = 0,  // by none: a kernel of its own computes scores again, per block of queries
    atomics = 1,      // by fp32 additions to a workspace, in whatever order they come
};

// Fields, order and meaning are those of the Python class. Later knobs go at the end and their zero
// means 'as before'.
struct FlashBackwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warps;
    int column_warps;
    int stages;
    DqMode dq;

    constexpr auto operator<=>(const FlashBackwardKernelConfig&) const = default;

    constexpr int element_bytes() const { return 2; }
    // Query rows of a CTA of the kernel that computes dq alone: 16 a warp.
    constexpr int dq_rows() const { return 16 * n_warps; }

    // Tiles of dS that go from warp to warp: with atomics those of two steps, since dq comes a step
    // later.
    constexpr int dS_tiles() const { return dq == DqMode::atomics ? 2 : column_warps > 1 ? 1 : 0; }
    // Dynamic shared memory of a CTA that keeps keys: K and V, the stages of Q and do with their
    // row statistics, and what of dS and P goes from warp to warp.
    constexpr int keys_smem_bytes() const {
        const int streamed = stages * (2 * B_r * d_head * element_bytes() + 2 * B_r * 4);
        const int tiles = dS_tiles() + (column_warps > 1 ? 1 : 0);
        return 2 * B_c * d_head * element_bytes() + streamed + tiles * B_r * B_c * element_bytes();
    }
    // Of one that keeps queries: Q and do, and the stages of K and V.
    constexpr int queries_smem_bytes() const {
        return 2 * (dq_rows() + stages * B_r) * d_head * element_bytes();
    }
    // The most that a CTA of any of the kernels has.
    constexpr int smem_bytes() const {
        const int keys = keys_smem_bytes();
        const int queries = dq == DqMode::two_kernels ? queries_smem_bytes() : 0;
        return keys > queries ? keys : queries;
    }
};

using backward_kernel_fn = void (*)(const BackwardKernelArgs);

}  // namespace flashsmith
