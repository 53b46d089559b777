// The config of a kernel of the wgmma_dq family, and the arguments of its main kernel. Plain C++20
// without CUDA types, because the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"
#include "common/constants.cuh"
#include "common/program_args.cuh"

namespace flashsmith {

// The fields, their order and their meaning match the Python class. A new knob is added at the end,
// and a knob of 0 must change nothing.
struct WgmmaDqKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warpgroups;  // consumers, 64 queries each; the producer is one more
    int k_stages;
    int v_stages;
    int producer_registers;
    int consumer_registers;
    bool late_dq;   // a step's dq overlaps the next step's scores
    bool pingpong;  // warpgroups alternate in issuing their products
    int d_v;        // columns of V and do; 0: d_head

    constexpr auto operator<=>(const WgmmaDqKernelConfig&) const = default;

    constexpr int n_threads() const { return kWarpgroupThreads * (n_warpgroups + 1); }
    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }

    // Bytes of Q and do, and of the stages of K and V.
    constexpr int64_t tile_bytes() const {
        const int64_t of_qk = (B_r + int64_t{k_stages} * B_c) * tile_columns(d_head);
        const int64_t of_v = (B_r + int64_t{v_stages} * B_c) * tile_columns(d_head_v());
        return (of_qk + of_v) * kElementBytes;
    }
    // Dynamic shared memory of one CTA: the tiles and barriers.
    static constexpr int kBarrierPage = 256;
    constexpr int64_t smem_bytes() const { return tile_bytes() + kBarrierPage; }
};

// Everything that the main kernel needs. It is the only parameter, in constant memory.
struct HopperDqKernelArgs {
    TensorMap q, k, v, d_o;
    BackwardKernelArgs problem;
};

// The arguments of kernels that run a caller's program.
struct HopperDqProgramArgs : HopperDqKernelArgs {
    ProgramArgs program;
};

using hopper_dq_kernel_fn = void (*)(const HopperDqKernelArgs);

}  // namespace flashsmith
