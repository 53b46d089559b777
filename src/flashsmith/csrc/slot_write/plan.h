// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "slot_write/config.cuh"

namespace flashsmith {

// Plans one launch; if there are no rows, its grid is empty. Throws std::invalid_argument if the
// kernel cannot compute the problem.
Plan plan_slot_write(const SlotWriteKernelConfig& config, NumberReader& numbers, Tensors tensors,
                     const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
