// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "row_merge/config.cuh"

namespace flashsmith {

// One launch, of an empty grid where there are no rows. Throws std::invalid_argument for what the
// kernel cannot compute.
Plan plan_row_merge(const RowMergeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                    const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
