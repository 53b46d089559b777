// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "common/forward_args.cuh"
#include "host/plan.h"
#include "mma_sync/flash_attention.cuh"

namespace flashsmith {

// One forward pass as a plan of one launch. A problem without rows has an empty grid. Throws
// std::invalid_argument when the semantics are not the problem's, or the device cannot hold the
// kernel.
Plan plan_forward(const FlashForwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                  const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
