// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "wgmma_dq/config.cuh"

namespace flashsmith {

// Plans one backward pass for dq and dsinks. Throws std::invalid_argument if dk or dv is requested,
// if the semantics do not match the problem, if the device cannot hold the kernels, or if TMA
// cannot read the tensors.
Plan plan_dq(const WgmmaDqKernelConfig& config, NumberReader& numbers, Tensors tensors,
             const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
