#include "host/launcher.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "host/cuda_check.h"
#include "host/driver_functions.h"
#include "host/workspaces.h"

namespace flashsmith {
namespace {

// Makes a device current, and at its destruction the previous one. If a thread has not called CUDA
// yet, it gets the context of the device, because encoding a tensor map needs one.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        changed_ = previous_ != device;
        if (changed_ || !has_context()) check(cudaSetDevice(device), "cudaSetDevice");
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

// Memory that is allocated in stream order. During a capture, it belongs to the graph.
class StreamMemory {
  public:
    StreamMemory(size_t bytes, void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
        check(cudaMallocAsync(&address_, bytes, stream_), "cudaMallocAsync");
    }
    ~StreamMemory() { cudaFreeAsync(address_, stream_); }
    StreamMemory(const StreamMemory&) = delete;
    StreamMemory& operator=(const StreamMemory&) = delete;
    void* address() const { return address_; }

  private:
    void* address_ = nullptr;
    cudaStream_t stream_;
};

uintptr_t address(const void* memory) {
    return reinterpret_cast<uintptr_t>(memory);
}

std::deque<Step> steps_of(std::vector<Launch>& launches, const std::vector<const void*>& kernels) {
    std::deque<Step> steps;
    for (Launch& launch : launches)
        if (!launch.is_empty()) steps.emplace_back(std::move(launch), kernels[launch.kernel]);
    return steps;
}

// For each device, the shared memory that kernels may have at a launch. A kernel has one limit for
// all plans, so a plan that needs little must not lower the limit while others are still being
// launched.
class SmemLimits {
  public:
    void raise(int device, const void* kernel, int bytes) {
        const std::lock_guard lock(mutex_);
        int& most = most_[{device, kernel}];
        most = std::max(most, bytes);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
              "raising the kernel's shared-memory limit");
    }

  private:
    std::mutex mutex_;
    std::map<std::pair<int, const void*>, int> most_;
};

// This is never destroyed, because a thread may launch while the process ends.
SmemLimits& smem_limits() {
    static auto& limits = *new SmemLimits;
    return limits;
}

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

}  // namespace

PreparedPlan::PreparedPlan(Plan plan, const std::vector<const void*>& kernels, int device)
    : plan_(std::move(plan)),
      layout_(layout_of(plan_.workspaces)),
      steps_(steps_of(plan_.launches, kernels)),
      graph_(steps_),
      needs_block_(layout_.block_bytes > 0 && !steps_.empty()),
      device_(device) {
    plan_.launches.clear();
}

void PreparedPlan::raise_smem_limits() const {
    if (smem_limits_raised_.load(std::memory_order_relaxed)) return;
    std::map<const void*, int> limits;  // launches of one kernel may have several sizes
    for (const Step& step : steps_)
        limits[step.kernel] = std::max(limits[step.kernel], step.launch.smem_bytes);
    for (const auto& [kernel, bytes] : limits) smem_limits().raise(device_, kernel, bytes);
    smem_limits_raised_.store(true, std::memory_order_relaxed);
}

void PreparedPlan::launch_step(const Step& step, const Buffers& buffers, void* stream) const {
    const Launch& launch = step.launch;
    alignas(64) uint8_t arguments[kMostArgumentBytes];
    step.write_arguments(buffers, arguments);
    void* parameters[] = {arguments};
    const auto dim = [](const std::array<uint32_t, 3>& x) { return dim3(x[0], x[1], x[2]); };
    if (!launch.has_clusters() && !launch.programmatic) {
        check(cudaLaunchKernel(step.kernel, dim(launch.grid), dim(launch.block), parameters,
                               launch.smem_bytes, static_cast<cudaStream_t>(stream)),
              "cudaLaunchKernel");
        return;
    }
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    if (launch.has_clusters()) {
        cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
    }
    if (launch.programmatic) {
        cudaLaunchAttribute& programmatic = attributes[config.numAttrs++];
        programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        programmatic.val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = dim(launch.grid);
    config.blockDim = dim(launch.block);
    config.dynamicSmemBytes = launch.smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    check(cudaLaunchKernelExC(&config, step.kernel, parameters), "cudaLaunchKernelExC");
}

void PreparedPlan::run_on_current_device(Tensors tensors, uintptr_t block, void* stream,
                                         bool by_graph) const {
    if (steps_.empty()) return;
    std::array<uintptr_t, kMostWorkspaces> workspaces;
    std::optional<KeptWorkspace> kept;  // must outlive the launches, like `allocated`
    std::optional<StreamMemory> allocated;
    if (!plan_.workspaces.empty()) {
        uintptr_t zeros = 0;
        if (layout_.kept_bytes > 0)
            zeros = address(kept.emplace(layout_.kept_bytes, stream).address());
        if (needs_block_ && block == 0)
            block = address(allocated.emplace(layout_.block_bytes, stream).address());
        if (layout_.zeroed_bytes > 0)
            check(cudaMemsetAsync(reinterpret_cast<void*>(block), 0, layout_.zeroed_bytes,
                                  static_cast<cudaStream_t>(stream)),
                  "zeroing the workspaces");
        for (size_t i = 0; i < plan_.workspaces.size(); ++i) {
            const bool is_kept = plan_.workspaces[i].contents == Contents::kept_zero;
            workspaces[i] = (is_kept ? zeros : block) + layout_.offsets[i];
        }
    }
    raise_smem_limits();
    const Buffers buffers{tensors, {workspaces.data(), plan_.workspaces.size()}};
    if (by_graph && graph_.launch(buffers, stream)) return;
    for (const Step& step : steps_) launch_step(step, buffers, stream);
}

void PreparedPlan::launch(Tensors tensors, uintptr_t block, void* stream) const {
    plan_.check_presence(tensors);
    const CurrentDevice current(device_);
    run_on_current_device(tensors, block, stream, true);
}

float PreparedPlan::launch_timed(Tensors tensors, uintptr_t block, void* stream) const {
    plan_.check_presence(tensors);
    const CurrentDevice current(device_);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Event start, stop;
    check(cudaEventRecord(start.get(), cuda_stream), "cudaEventRecord");
    run_on_current_device(tensors, block, stream, false);
    check(cudaEventRecord(stop.get(), cuda_stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop.get()), "the kernel");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()), "cudaEventElapsedTime");
    return milliseconds;
}

}  // namespace flashsmith
