// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "wgmma_dq/config.cuh"

namespace flashsmith {

// One backward pass for dq, and dsinks: prepare, and the products. Throws std::invalid_argument
// when dk or dv is wanted, the semantics are not the problem's, the device cannot hold the kernels,
// or TMA cannot read the tensors.
Plan plan_dq(const HopperDqKernelConfig& config, NumberReader& numbers, Tensors tensors,
             const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
