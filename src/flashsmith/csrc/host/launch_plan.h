// The one host path: a problem and a config become a launch plan; the launcher runs the plan on a
// GPU and the emulator runs the same plan on the CPU. Plain C++20 without CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <variant>
#include <vector>

#include "host/forward_problem.h"
#include "host/tensor_maps.h"
#include "mma_sync/flash_attention.cuh"
#include "wgmma/config.cuh"

namespace flashsmith {

// What a plan may depend on; the caller says it, nothing here asks a device.
struct DeviceSpec {
    int arch;  // 80 for sm_80
    int sm_count;
    int max_smem_per_block;  // bytes a CTA may opt in to
    int max_smem_per_sm;     // bytes
};

// A kernel of either family. A library holds kernels of one.
using KernelConfig = std::variant<FlashForwardKernelConfig, HopperForwardKernelConfig>;
using KernelMap = std::map<KernelConfig, const void*>;

struct LaunchPlan {
    KernelConfig config;
    const void* kernel;
    std::array<uint32_t, 3> grid, cluster, block;
    int smem_bytes;          // dynamic shared memory of one CTA
    size_t workspace_bytes;  // device memory that the launch needs beside its tensors
    bool workspace_zeroed;   // whether it must be zero when the kernel starts; it is when it ends
    std::vector<uint8_t> argument_bytes;
    size_t problem_offset;                   // in the arguments: of the ForwardKernelArgs
    size_t workspace_offset;                 // of the workspace's address, if there is a workspace
    std::vector<TensorMapSpec> tensor_maps;  // empty for kernels without TMA
};

// The configs of this library, their kernels and what they all compute: generated code says it.
const KernelMap& kernel_map();
Semantics kernel_semantics();

// A family's map of kernels, as the host path takes it.
template <class Config, class Kernel>
KernelMap to_kernel_map(const std::map<Config, Kernel>& kernels) {
    KernelMap map;
    for (const auto& [config, kernel] : kernels)
        map.emplace(config, reinterpret_cast<const void*>(kernel));
    return map;
}

// Plans one forward pass. A problem without rows has an empty grid and nothing to launch. Throws
// std::invalid_argument when the config is not in this library, the library's semantics are not the
// problem's, or the device cannot hold the kernel.
LaunchPlan plan_forward(const KernelConfig& config, const ForwardProblem& problem,
                        const DeviceSpec& device);

// A family's part of it: everything but the kernel.
LaunchPlan plan_launch(const FlashForwardKernelConfig& config, const ForwardProblem& problem,
                       const DeviceSpec& device, const Semantics& semantics);
LaunchPlan plan_launch(const HopperForwardKernelConfig& config, const ForwardProblem& problem,
                       const DeviceSpec& device, const Semantics& semantics);

}  // namespace flashsmith
