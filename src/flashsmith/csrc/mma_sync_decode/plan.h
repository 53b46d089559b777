// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>

#include "host/plan.h"
#include "mma_sync_decode/config.cuh"

namespace flashsmith {

// Plans up to four launches: append, the states of parts for sequences with many rows and for
// others, and their merge. Throws std::invalid_argument.
Plan plan_decode(const FlashDecodeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                 const DeviceSpec& device, const Semantics& semantics);

// Sets the costs of numbers of runs (the fields of RunCosts) for all plans from now on. If `count`
// is not the number of fields, returns false and sets nothing.
extern "C" bool flashsmith_set_plan_costs(const double* values, size_t count);

}  // namespace flashsmith
