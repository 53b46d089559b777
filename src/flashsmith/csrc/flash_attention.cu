// Look up, plan, launch. Nothing here depends on the configs of a library, so it is compiled once.
#include <cuda_runtime.h>

#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

#include "config_rules.cuh"
#include "launch_plan.cuh"

namespace flashsmith {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int kWarp = 32;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a refused launch must not surface in somebody else's next call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

// Makes a device current and, at the end, the one that was.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        changed_ = previous_ != device;
        if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~CurrentDevice() {
        if (changed_) cudaSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int previous_ = 0;
    bool changed_ = false;
};

class Event {
  public:
    Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

ForwardKernelArgs arguments(const FlashForwardKernelConfig& config, const ForwardProblem& p) {
    ForwardKernelArgs args;
    std::memset(&args, 0, sizeof args);  // padding too: equal plans have equal bytes
    args.q = p.q.data;
    args.k = p.k.data;
    args.v = p.v.data;
    args.o = p.o.data;
    args.lse = p.lse;
    args.q_batch_stride = p.q.batch_stride;
    args.q_seq_stride = p.q.seq_stride;
    args.q_head_stride = p.q.head_stride;
    args.k_batch_stride = p.k.batch_stride;
    args.k_seq_stride = p.k.seq_stride;
    args.k_head_stride = p.k.head_stride;
    args.v_batch_stride = p.v.batch_stride;
    args.v_seq_stride = p.v.seq_stride;
    args.v_head_stride = p.v.head_stride;
    args.o_batch_stride = p.o.batch_stride;
    args.o_seq_stride = p.o.seq_stride;
    args.o_head_stride = p.o.head_stride;
    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.seq_k = static_cast<int32_t>(p.seq_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.n_Q_blocks = static_cast<int32_t>(p.seq_q / config.B_r);
    args.n_KV_blocks = static_cast<int32_t>(p.seq_k / config.B_c);
    args.scale_log2 = p.scale * kLog2E;
    return args;
}

void check_problem(const FlashForwardKernelConfig& config, const ForwardProblem& p) {
    const auto positive = [](int64_t x) { return x > 0 && x <= INT_MAX; };
    require(positive(p.batch) && positive(p.seq_q) && positive(p.seq_k) && positive(p.heads_q) &&
                positive(p.heads_k),
            "batch, lengths and head counts must be between 1 and 2^31 - 1");
    require(p.d == config.d_head, "d is " + std::to_string(p.d) + " but the config's d_head is " +
                                      std::to_string(config.d_head));
    require(p.heads_q == p.heads_k, "heads_q and heads_k must be equal");
    require(p.seq_q % config.B_r == 0, "seq_q must be a multiple of B_r");
    require(p.seq_k % config.B_c == 0, "seq_k must be a multiple of B_c");
    // Two steps, so that no product can overflow.
    const int64_t sequences = p.batch * p.heads_q;
    require(sequences <= INT_MAX && sequences * (p.seq_q / config.B_r) <= INT_MAX,
            "batch x heads x Q blocks must stay within 2^31 - 1");
}

}  // namespace

LaunchPlan plan_forward(const FlashForwardKernelConfig& config, const ForwardProblem& problem,
                        const DeviceSpec& device) {
    const auto found = kernel_map().find(config);
    require(found != kernel_map().end(), "the config is not in this kernel library");
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    require(config.smem_bytes() <= device.max_smem_per_block,
            "the config needs " + std::to_string(config.smem_bytes()) +
                " bytes of shared memory, the device allows " +
                std::to_string(device.max_smem_per_block));
    check_problem(config, problem);

    const ForwardKernelArgs args = arguments(config, problem);
    LaunchPlan plan{};
    plan.config = config;
    plan.kernel = found->second;
    const int64_t blocks = problem.batch * problem.heads_q * args.n_Q_blocks;
    plan.grid = {static_cast<uint32_t>(blocks), 1, 1};
    plan.cluster = {1, 1, 1};
    plan.block = {static_cast<uint32_t>(config.n_warps * kWarp), 1, 1};
    plan.smem_bytes = config.smem_bytes();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    plan.argument_bytes.assign(bytes, bytes + sizeof args);
    return plan;
}

namespace {

void launch_on_current_device(const LaunchPlan& plan, cudaStream_t stream) {
    const void* kernel = reinterpret_cast<const void*>(plan.kernel);
    check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes),
        "raising the kernel's shared-memory limit");
    void* parameters[] = {const_cast<uint8_t*>(plan.argument_bytes.data())};
    check(cudaLaunchKernel(kernel, dim3(plan.grid[0], plan.grid[1], plan.grid[2]),
                           dim3(plan.block[0], plan.block[1], plan.block[2]), parameters,
                           plan.smem_bytes, stream),
          "cudaLaunchKernel");
}

}  // namespace

void launch(const LaunchPlan& plan, int device, void* stream) {
    const CurrentDevice current(device);
    launch_on_current_device(plan, static_cast<cudaStream_t>(stream));
}

float launch_timed(const LaunchPlan& plan, int device, void* stream) {
    const CurrentDevice current(device);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Event start, stop;
    check(cudaEventRecord(start.get(), cuda_stream), "cudaEventRecord");
    launch_on_current_device(plan, cuda_stream);
    check(cudaEventRecord(stop.get(), cuda_stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop.get()), "the kernel");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()), "cudaEventElapsedTime");
    return milliseconds;
}

int device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) {
        cudaGetLastError();
        return 0;
    }
    check(status, "cudaGetDeviceCount");
    return count;
}

DeviceSpec query_device(int device) {
    const auto attribute = [device](cudaDeviceAttr which) {
        int value = 0;
        check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
        return value;
    };
    return {
        .arch = attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                attribute(cudaDevAttrComputeCapabilityMinor),
        .sm_count = attribute(cudaDevAttrMultiProcessorCount),
        .max_smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
        .max_smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
    };
}

}  // namespace flashsmith
