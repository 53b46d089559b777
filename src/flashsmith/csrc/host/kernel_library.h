// The contents of a library, for the host path. Generated code provides them. Nothing here depends
// on the family or the operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "host/plan.h"

namespace flashsmith {

struct LibraryConfig {
    std::vector<int64_t> numbers;      // the config's fields, in Python's order
    std::vector<const void*> kernels;  // by their role, the main one first
    // Plans one call. Throws std::invalid_argument if the kernels do not suit the problem or the
    // device cannot hold them.
    std::function<Plan(NumberReader& numbers, Tensors tensors, const DeviceSpec& device)> plan;
};

struct KernelLibrary {
    std::vector<LibraryConfig> configs;
    std::vector<int64_t> semantics;  // of all kernels, in the order of Python's fields
    size_t n_tensors;                // of the operation
    size_t n_required;               // the number of leading tensors that every call has
};

const KernelLibrary& kernel_library();

}  // namespace flashsmith
