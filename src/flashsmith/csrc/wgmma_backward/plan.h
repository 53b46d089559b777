// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "wgmma_backward/config.cuh"

namespace flashsmith {

// One backward pass: prepare, the products, what is to be made of their sums, and dsinks. Gradients
// without an address are not stored. Throws std::invalid_argument when the semantics are not the
// problem's, the device cannot hold the kernels, or TMA cannot read the tensors.
Plan plan_backward(const HopperBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
