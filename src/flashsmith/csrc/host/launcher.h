// Launching a plan on a GPU. Plain C++20 without CUDA headers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "host/launch_graph.h"
#include "host/plan.h"

namespace flashsmith {

// A plan for one GPU, launched any number of times, for calls whose tensors differ in nothing but
// their addresses. Threads may share it. Calls make the GPU current for their
// duration and throw std::runtime_error with CUDA's words when a launch is refused.
class PreparedPlan {
  public:
    // `kernels` are the config's, by their role; the plan was checked with them.
    PreparedPlan(Plan plan, const std::vector<const void*>& kernels, int device);

    // Bytes of the block that a call brings, or has allocated; 0: it needs none.
    size_t block_bytes() const { return needs_block_ ? layout_.block_bytes : 0; }

    // `block`, of at least block_bytes(), aligned to 256 bytes, is the call's own until what is
    // enqueued here is done; 0 has one allocated in the stream's order. Throws
    // std::invalid_argument too when a tensor is missing, or given to kernels without.
    void launch(Tensors tensors, uintptr_t block, void* stream) const;
    // The same between two events, waiting for both; milliseconds.
    float launch_timed(Tensors tensors, uintptr_t block, void* stream) const;

  private:
    void run_on_current_device(Tensors tensors, uintptr_t block, void* stream, bool by_graph) const;
    void launch_step(const Step& step, const Buffers& buffers, void* stream) const;
    void raise_smem_limits() const;

    Plan plan_;  // its launches are the steps'
    WorkspaceLayout layout_;
    std::deque<Step> steps_;
    mutable LaunchGraph graph_;
    bool needs_block_;
    int device_;
    mutable std::atomic<bool> smem_limits_raised_{false};
};

}  // namespace flashsmith
