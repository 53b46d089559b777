// The config that identifies a kernel of the mma.sync family. Plain C++20 without CUDA types,
// because the host compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>

#include "common/constants.cuh"
#include "common/forward_args.cuh"
#include "common/program_args.cuh"

namespace flashsmith {

// Identifies one kernel of the mma.sync family. Fields, order and meaning match the Python class; a
// K-tile is 8 columns. New knobs go at the end, and a knob of 0 keeps the previous behaviour.
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
    int split_keys;
    bool pack_gqa;  // the rows of a tile are the query heads of a group, token after token
    int canonical;  // version of the canonical order of operations; 0 means none
    int d_v;        // columns of V and O; 0 means d_head

    constexpr auto operator<=>(const FlashForwardKernelConfig&) const = default;

    constexpr int n_threads() const { return kWarpSize * n_warps; }
    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }

    // Number of K tiles in shared memory; V has the same number.
    constexpr int kv_tiles() const { return kv_stages > 0 ? kv_stages : 1; }

    // Bytes of shared memory for a Q tile and the K and V tiles. O reuses Q's.
    constexpr int tile_bytes(int elem_size = kElementBytes) const {
        const int d = tile_columns(d_head), d_v = tile_columns(d_head_v());
        return (B_r * (d > d_v ? d : d_v) + B_c * kv_tiles() * (d + d_v)) * elem_size;
    }
    // Dynamic shared memory of one CTA: the tiles and, if canonical, the state of all rows over the
    // finished chunks. Each thread stores its own state, in groups of four floats.
    constexpr int smem_bytes(int elem_size = kElementBytes) const {
        return tile_bytes(elem_size) + (canonical > 0 ? B_r * (d_head_v() + 8) * 4 : 0);
    }

    // CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
    // count per thread; 0 ignores the register file.
    constexpr int num_ctas_per_sm(int max_smem_bytes, int registers = 0) const {
        return ctas_that_fit(smem_bytes(), n_threads(), max_smem_bytes, registers);
    }
};

// The arguments of kernels that run a caller's program.
struct ForwardProgramArgs : ForwardKernelArgs {
    ProgramArgs program;
};

using forward_kernel_fn = void (*)(const ForwardKernelArgs);

}  // namespace flashsmith
