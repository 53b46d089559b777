// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "slot_write/config.cuh"

namespace flashsmith {

// Plans one launch, with an empty grid if there are no rows. Throws std::invalid_argument for a
// problem that the kernel cannot compute.
Plan plan_slot_write(const SlotWriteKernelConfig& config, NumberReader& numbers, Tensors tensors,
                     const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
