// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "common/types.cuh"
#include "first_row/config.cuh"
#include "host/plan.h"

namespace flashsmith {

// One launch or, staged, two over a workspace. Throws std::invalid_argument without a row to copy.
Plan plan_first_row(const FirstRowKernelConfig& config, NumberReader& numbers, Tensors tensors,
                    const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
