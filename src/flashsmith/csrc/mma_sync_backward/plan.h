// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "mma_sync_backward/config.cuh"

namespace flashsmith {

// Plans one backward pass: prepare, those of dk, dv and dq that are requested, and dsinks. A
// gradient whose address is 0 is not computed. Throws std::invalid_argument if the semantics do not
// match the problem, or if the device cannot hold the kernels.
Plan plan_backward(const FlashBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
