// The family's part of planning. Plain C++20 without CUDA headers.
#pragma once

#include "host/plan.h"
#include "wgmma_mla/config.cuh"

namespace flashsmith {

// Plans one call: appending, if rows are given; the main launch; and merging, if a tile's keys may
// be split. Throws std::invalid_argument if the call and the kernels do not
// match, or if the device cannot hold the kernel.
Plan plan_mla(const WgmmaMlaKernelConfig& config, NumberReader& numbers, Tensors tensors,
              const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
