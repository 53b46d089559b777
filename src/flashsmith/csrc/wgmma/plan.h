// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "common/forward_args.cuh"
#include "host/plan.h"
#include "sm90_forward/config.cuh"

namespace flashsmith {

// Plans one forward pass as one launch, or two if keys are split. A problem without rows has an
// empty grid. Throws std::invalid_argument if the semantics do not match the problem or the device
// cannot hold the kernel.
Plan plan_forward(const WgmmaForwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                  const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
