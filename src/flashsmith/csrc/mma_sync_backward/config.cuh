// The config of a kernel of the mma_sync_backward family. Plain C++20 without CUDA types, because
// the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"
#include "common/constants.cuh"

namespace flashsmith {

// How the parts of dq, which several CTAs compute, are added up.
enum class DqMode : int {
    two_kernels = 0,  // no sums: another kernel, whose CTAs keep queries, computes the scores again
    atomics = 1,      // fp32 atomics add the parts in a workspace, in any order
};

// The fields, their order and their meaning match the Python class. A new knob is added at the end,
// and a knob of 0 must change nothing.
struct FlashBackwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warps;
    int column_warps;
    int stages;
    DqMode dq;
    int d_v;  // columns of V and do; 0 means d_head

    constexpr auto operator<=>(const FlashBackwardKernelConfig&) const = default;

    constexpr int element_bytes() const { return 2; }
    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }
    // Columns in shared memory of a row of K and of V together, as many as of Q and do.
    constexpr int columns() const { return tile_columns(d_head) + tile_columns(d_head_v()); }
    // Columns of the sums of dq: d_head rounded up to a multiple of 16, which is 80 for 72.
    constexpr int dq_sum_columns() const { return (d_head + 15) / 16 * 16; }
    // Query rows per CTA of the kernel that computes only dq: 16 per warp.
    constexpr int dq_rows() const { return 16 * n_warps; }

    // The number of tiles of dS, which warps pass to each other. With atomics there are two,
    // for two steps, because dq is computed a step later.
    constexpr int dS_tiles() const { return dq == DqMode::atomics ? 2 : column_warps > 1 ? 1 : 0; }
    // Dynamic shared memory of a CTA that keeps keys: K and V, the stages of Q and do with their
    // row statistics, and the tiles of dS and P that warps pass to each other.
    constexpr int keys_smem_bytes() const {
        const int streamed = stages * (B_r * columns() * element_bytes() + 2 * B_r * 4);
        const int tiles = dS_tiles() + (column_warps > 1 ? 1 : 0);
        return B_c * columns() * element_bytes() + streamed + tiles * B_r * B_c * element_bytes();
    }
    // Dynamic shared memory of a CTA that keeps queries: Q, `do`, and the stages of K and V.
    constexpr int queries_smem_bytes() const {
        return (dq_rows() + stages * B_r) * columns() * element_bytes();
    }
    // The most shared memory that a CTA of any of the kernels has.
    constexpr int smem_bytes() const {
        const int keys = keys_smem_bytes();
        const int queries = dq == DqMode::two_kernels ? queries_smem_bytes() : 0;
        return keys > queries ? keys : queries;
    }
};

using backward_kernel_fn = void (*)(const BackwardKernelArgs);

}  // namespace flashsmith
