// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "mma_sync_backward/config.cuh"

namespace flashsmith {

// One backward pass: prepare, what is to be computed of dk, dv and dq, and dsinks. Gradients
// without an address are not computed. Throws std::invalid_argument when the semantics are not the
// problem's, or the device cannot hold the kernels.
Plan plan_backward(const FlashBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
