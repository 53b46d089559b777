// The config that identifies a kernel of the mma_sync_backward family. Plain C++20 without CUDA
// types, because the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"
#include "common/program_args.cuh"

namespace flashsmith {

// How dq is summed over CTAs that hold parts of it.
enum class DqMode : int {
    two_kernels = 0,  // no sum: a separate kernel recomputes scores per block of queries
    atomics = 1,      // fp32 atomic additions to a workspace, in arbitrary order
};

// Fields, order and meaning match the Python class. New knobs go at the end, and their zero means
// the previous behaviour.
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
    // Query rows per CTA of the separate dq kernel: 16 per warp.
    constexpr int dq_rows() const { return 16 * n_warps; }

    // Tiles of dS that are passed between warps. With atomics there are two, for two steps, since
    // dq is computed a step later.
    constexpr int dS_tiles() const { return dq == DqMode::atomics ? 2 : column_warps > 1 ? 1 : 0; }
    // Dynamic shared memory of a CTA with resident keys: K and V, the stages of Q and do with their
    // row statistics, and the tiles of dS and P that are passed between warps.
    constexpr int keys_smem_bytes() const {
        const int streamed = stages * (2 * B_r * d_head * element_bytes() + 2 * B_r * 4);
        const int tiles = dS_tiles() + (column_warps > 1 ? 1 : 0);
        return 2 * B_c * d_head * element_bytes() + streamed + tiles * B_r * B_c * element_bytes();
    }
    // Dynamic shared memory of a CTA with resident queries: Q, `do`, and the stages of K and V.
    constexpr int queries_smem_bytes() const {
        return 2 * (dq_rows() + stages * B_r) * d_head * element_bytes();
    }
    // The largest shared memory of a CTA in any of the kernels.
    constexpr int smem_bytes() const {
        const int keys = keys_smem_bytes();
        const int queries = dq == DqMode::two_kernels ? queries_smem_bytes() : 0;
        return keys > queries ? keys : queries;
    }
};

// The arguments of kernels of a program that compute scores.
struct BackwardProgramArgs : BackwardKernelArgs {
    ProgramArgs program;
};

using backward_kernel_fn = void (*)(const BackwardKernelArgs);

}  // namespace flashsmith
