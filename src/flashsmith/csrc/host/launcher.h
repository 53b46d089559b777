// Launches a plan on a GPU. Plain C++20 without CUDA headers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "host/launch_graph.h"
#include "host/plan.h"

namespace flashsmith {

// A plan that is ready to be launched on one GPU. It can be launched any number of times, for calls
// whose tensors differ only in their addresses. Several threads may use it. During a call, the GPU
// is the current device. The functions throw std::runtime_error with CUDA's message if a launch is
// refused.
class PreparedPlan {
  public:
    // `kernels` are the config's, by their role. The plan must have been checked with them.
    PreparedPlan(Plan plan, const std::vector<const void*>& kernels, int device);

    // The bytes of workspaces that a call provides or allocates; 0 if it needs none.
    size_t block_bytes() const { return needs_block_ ? layout_.block_bytes : 0; }

    // `block` is the address of at least block_bytes() bytes, aligned to 256. They belong to the
    // call until everything that is enqueued here has finished. If `block` is 0, memory is
    // allocated in stream order. Also throws std::invalid_argument if a tensor is missing, or is
    // given to kernels that do not take it.
    void launch(Tensors tensors, uintptr_t block, void* stream) const;
    // Launches like launch(), between two events. Waits for both and returns milliseconds.
    float launch_timed(Tensors tensors, uintptr_t block, void* stream) const;

  private:
    void run_on_current_device(Tensors tensors, uintptr_t block, void* stream, bool by_graph) const;
    void launch_step(const Step& step, const Buffers& buffers, void* stream) const;
    void raise_smem_limits() const;

    Plan plan_;  // without its launches, which were moved to steps_
    WorkspaceLayout layout_;
    std::deque<Step> steps_;
    mutable LaunchGraph graph_;
    bool needs_block_;
    int device_;
    mutable std::atomic<bool> smem_limits_raised_{false};
};

}  // namespace flashsmith
