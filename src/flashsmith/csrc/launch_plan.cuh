// The one host path: a problem and a config become a launch plan; the launcher runs the plan on a
// GPU and the emulator runs the same plan on the CPU. Plain C++20 without CUDA headers.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "flash_attention.cuh"

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

// Where the tensors of one call are; null for what is not given or not wanted.
struct Addresses {
    const void *q, *k, *v;
    void* o;
    float *lse, *row_max;  // (batch, heads_q, seq_q), packed (heads_q, total_q)
    const float* sinks;    // (heads_q)
    const int32_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1); null unless packed
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

// How a tensor map is to be encoded, and where in the arguments it belongs. The launcher encodes it
// with the driver, the emulator reads it as it stands.
struct TensorMapSpec {
    size_t argument_offset;  // bytes from the start of the kernel's arguments
    void* data;
    int element_type;  // a DType
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> strides_bytes;  // of dimensions 1 and up
    std::vector<uint32_t> box;
    int swizzle_bytes;
};

struct LaunchPlan {
    FlashForwardKernelConfig config;
    forward_kernel_fn kernel;
    std::array<uint32_t, 3> grid, cluster, block;
    int smem_bytes;          // dynamic shared memory of one CTA
    size_t workspace_bytes;  // device memory that the launch needs beside its tensors
    bool workspace_zeroed;   // whether it must be zero when the kernel starts
    std::vector<uint8_t> argument_bytes;
    std::vector<TensorMapSpec> tensor_maps;  // empty for kernels without TMA
};

// The configs of this library, their kernels and what they all compute: generated code says it.
const std::map<FlashForwardKernelConfig, forward_kernel_fn>& kernel_map();
Semantics kernel_semantics();

// Plans one forward pass. A problem without rows has an empty grid and nothing to launch. Throws
// std::invalid_argument when the config is not in this library, the library's semantics are not the
// problem's, or the device cannot hold the kernel.
LaunchPlan plan_forward(const FlashForwardKernelConfig& config, const ForwardProblem& problem,
                        const DeviceSpec& device);

// A plan for one GPU, launched as often as asked for, on the tensors of one call after another that
// differ in nothing but their addresses. Threads may share it. Launches make the GPU current for
// their duration and throw std::runtime_error with CUDA's words when they are refused.
class PreparedLaunch {
  public:
    PreparedLaunch(LaunchPlan plan, int device) : plan_(std::move(plan)), device_(device) {}

    // Throws std::invalid_argument too when offsets are missing, or given to kernels without.
    void launch(const Addresses& at, void* stream) const;
    // The same between two events, waiting for both; milliseconds.
    float launch_timed(const Addresses& at, void* stream) const;

  private:
    ForwardKernelArgs arguments_at(const Addresses& at) const;
    void launch_on_current_device(ForwardKernelArgs args, void* stream) const;

    LaunchPlan plan_;
    int device_;
    mutable std::atomic<bool> smem_limit_raised_{false};
};

int device_count();
DeviceSpec query_device(int device);

}  // namespace flashsmith
