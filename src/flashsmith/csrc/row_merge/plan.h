// The function that the family must define to plan calls. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "row_merge/config.cuh"

namespace flashsmith {

// Plans one launch; if there are no rows, its grid is empty. Throws std::invalid_argument if the
// kernel cannot compute the problem.
Plan plan_row_merge(const RowMergeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                    const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
