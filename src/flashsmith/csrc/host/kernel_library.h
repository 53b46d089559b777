// What a library holds, as the host path sees it; generated code says it. Nothing of it depends on
// the family or the operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "host/plan.h"

namespace flashsmith {

struct LibraryConfig {
    std::vector<int64_t> numbers;      // the config's, in the order of Python's fields
    std::vector<const void*> kernels;  // by their role, the main one first
    // Plans one call. Throws std::invalid_argument when the kernels are for other problems, or the
    // device cannot hold them.
    std::function<Plan(NumberReader& numbers, Tensors tensors, const DeviceSpec& device)> plan;
};

struct KernelLibrary {
    std::vector<LibraryConfig> configs;
    std::vector<int64_t> semantics;  // what all kernels compute, in the order of Python's fields
    size_t n_tensors;                // of the operation
    size_t n_required;               // the first of them, which every call has
};

const KernelLibrary& kernel_library();

}  // namespace flashsmith
