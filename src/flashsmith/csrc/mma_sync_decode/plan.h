// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>

#include "host/plan.h"
#include "mma_sync_decode/config.cuh"

namespace flashsmith {

// Up to four launches: to append, to compute states of parts, of sequences with many rows and of
// others, and to merge them. Throws std::invalid_argument.
Plan plan_decode(const FlashDecodeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                 const DeviceSpec& device, const Semantics& semantics);

// What numbers of runs cost, for all plans from now on: RunCosts' numbers, of which there must be
// `count`. False, and nothing is set, if there are not.
extern "C" bool flashsmith_set_plan_costs(const double* values, size_t count);

}  // namespace flashsmith
