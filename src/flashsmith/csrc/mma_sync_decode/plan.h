// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "mma_sync_decode/config.cuh"

namespace flashsmith {

// Up to four launches: to append, to compute states of parts, of sequences with many rows and of
// others, and to merge them. Throws std::invalid_argument.
Plan plan_decode(const FlashDecodeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                 const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
