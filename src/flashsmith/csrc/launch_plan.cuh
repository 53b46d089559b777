// The one host path: a problem and a config become a launch plan; the launcher runs the plan on a
// GPU and the emulator runs the same plan on the CPU. Plain C++20 without CUDA headers.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "flash_attention.cuh"
#include "hopper/hopper_config.cuh"
#include "tensor_maps.h"

namespace flashsmith {

// What a plan may depend on; the caller says it, nothing here asks a device.
struct DeviceSpec {
    int arch;  // 80 for sm_80
    int sm_count;
    int max_smem_per_block;  // bytes a CTA may opt in to
    int max_smem_per_sm;     // bytes
};

// Of a (batch, seq, heads, d) tensor, or a packed (total, heads, d) one with batch stride 0. They
// count elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, seq, head;
};

// A window or a causal mask without a limit on a side has kUnlimited there.
struct ForwardProblem {
    int64_t batch, seq_q, seq_k;  // packed: how many sequences, and the longest
    int64_t heads_q, heads_k, d;
    int64_t total_q, total_k;  // packed: rows of all sequences together; else 0
    Strides q, k, v, o;
    Addresses at;
    float scale;    // multiplies q k^T
    float softcap;  // 0: none
    int64_t window_left, window_right;
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

// What every family needs: that the problem is one for kernels of these semantics and tiles of
// `B_r` rows, and the problem as kernels take it. Both throw std::invalid_argument.
void require(bool condition, const std::string& message);
void check_problem(const ForwardProblem& problem, const Semantics& semantics, int d_head, int B_r);
ForwardKernelArgs forward_arguments(const ForwardProblem& problem, int B_r, int B_c);

// A plan for one GPU, launched as often as asked for, on the tensors of one call after another that
// differ in nothing but their addresses. Threads may share it. Launches make the GPU current for
// their duration and throw std::runtime_error with CUDA's words when they are refused.
class PreparedLaunch {
  public:
    PreparedLaunch(LaunchPlan plan, int device)
        : plan_(std::move(plan)), device_(device), encoded_(plan_.tensor_maps) {}

    // Throws std::invalid_argument too when offsets are missing, or given to kernels without.
    void launch(const Addresses& at, void* stream) const;
    // The same between two events, waiting for both; milliseconds.
    float launch_timed(const Addresses& at, void* stream) const;

  private:
    void launch_on_current_device(const Addresses& at, void* stream) const;
    void raise_smem_limit() const;

    LaunchPlan plan_;
    int device_;
    mutable std::atomic<bool> smem_limit_raised_{false};
    mutable EncodedTensorMaps encoded_;
};

}  // namespace flashsmith
