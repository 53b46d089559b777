// The contents of a library, for the host code. It is defined in generated code. Nothing here
// depends on the family or on the operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "host/plan.h"

namespace flashsmith {

struct LibraryConfig {
    std::vector<int64_t> numbers;      // the config's fields, in Python's order
    std::vector<const void*> kernels;  // in the order of their roles, the main kernel first
    // Plans one call. Throws std::invalid_argument if the kernels cannot compute the problem, or if
    // the device cannot hold them.
    std::function<Plan(NumberReader& numbers, Tensors tensors, const DeviceSpec& device)> plan;
};

struct KernelLibrary {
    std::vector<LibraryConfig> configs;
    std::vector<int64_t> semantics;  // the same for all kernels, in the order of Python's fields
    size_t n_tensors;                // of the operation
    size_t n_required;               // the number of leading tensors that every call has
};

const KernelLibrary& kernel_library();

}  // namespace flashsmith
