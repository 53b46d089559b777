// Launching a plan on a GPU. Plain C++20 without CUDA headers.
#pragma once

#include <atomic>
#include <utility>

#include "host/launch_plan.h"

namespace flashsmith {

// A plan for one GPU, launched as often as asked for, on the tensors of one call after another that
// differ in nothing but their addresses. Threads may share it. Launches make the GPU current for
// their duration and throw std::runtime_error with CUDA's words when they are refused.
class PreparedLaunch {
  public:
    PreparedLaunch(LaunchPlan plan, int device)
        : plan_(std::move(plan)), device_(device), encoded_(plan_.tensor_maps) {}

    // Throws std::invalid_argument too when offsets are missing, or given to kernels without.
    void launch(const Addresses& at, void* stream) const;
    // The same between two events, waiting for both; milliseconds.
    float launch_timed(const Addresses& at, void* stream) const;

  private:
    void launch_on_current_device(const Addresses& at, void* stream) const;
    void raise_smem_limit() const;

    LaunchPlan plan_;
    int device_;
    mutable std::atomic<bool> smem_limit_raised_{false};
    mutable EncodedTensorMaps encoded_;
};

}  // namespace flashsmith
