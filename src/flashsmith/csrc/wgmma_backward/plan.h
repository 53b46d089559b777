// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "wgmma_backward/config.cuh"

namespace flashsmith {

// Plans one backward pass: prepare, the GEMMs, the kernel that rounds the sums of dq, and dsinks. A
// gradient whose address is 0 is not stored. Throws std::invalid_argument if the semantics do not
// match the problem, if the device cannot hold the kernels, or if TMA cannot read the tensors.
Plan plan_backward(const WgmmaBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
