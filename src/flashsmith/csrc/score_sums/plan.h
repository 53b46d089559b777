// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "score_sums/config.cuh"

namespace flashsmith {

// Plans the row statistics and the sums. Throws std::invalid_argument if the semantics do not match
// the problem, or if the device cannot hold the kernels.
Plan plan_score_sums(const ScoreSumsKernelConfig& config, NumberReader& numbers, Tensors tensors,
                     const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
