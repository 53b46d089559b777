// Planning of the launch for sequences with many rows on sm_90. Plain C++20 without CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

#include "host/forward_problem.h"
#include "mma_sync_decode/config.cuh"

namespace flashsmith {

// The data of a call that the launch needs besides the arguments of the other kernels.
struct WarpgroupCall {
    const ForwardProblem& problem;  // seq_k is the capacity
    int64_t blocks, slots;
    bool is_paged, appends;
    // The locations of the tensors. Rotated queries are in a workspace.
    Place q, k_cache, v_cache, o, lse, cache_lens, page_table, sinks, cu_seqlens_q;
    // Workspaces that the launch uses: the tile counter and, in canonical configs, the running
    // states of rows.
    Place tile_counter, running_states;
};

// The most rows of a K/V head with which the other kernels compute a sequence. INT_MAX if they
// compute all sequences, because the config has no kernel with warpgroups, the device cannot run
// it, or TMA cannot copy the call's tensors.
int64_t most_rows_without_warpgroups(const FlashDecodeKernelConfig& config,
                                     const ForwardProblem& problem, int64_t blocks, int64_t slots,
                                     bool is_paged, bool may_depend_on_batch,
                                     const DecodeKernelArgs& args, const DeviceSpec& device);

// Bytes of the running states of a launch; 0 if it needs none.
int64_t running_state_bytes(const FlashDecodeKernelConfig& config, const ForwardProblem& problem,
                            const DeviceSpec& device);

// The launch, which runs kernel `kernel`.
Launch plan_warpgroups(const FlashDecodeKernelConfig& config, size_t kernel, int64_t most_rows,
                       const WarpgroupCall& call, const DecodeKernelArgs& args,
                       const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
