#include "host/launcher.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/driver_functions.h"
#include "host/workspaces.h"

namespace flashsmith {
namespace {

constexpr size_t kMostArgumentBytes = 4096;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a refused launch must not surface in somebody else's next call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

// Makes a device current and, at the end, the one that was. A thread that has not called CUDA yet
// gets the device's context: encoding a tensor map needs one.
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

void PreparedLaunch::raise_smem_limit() const {
    if (smem_limit_raised_.load(std::memory_order_relaxed)) return;
    check(cudaFuncSetAttribute(plan_.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               plan_.smem_bytes),
          "raising the kernel's shared-memory limit");
    smem_limit_raised_.store(true, std::memory_order_relaxed);
}

void PreparedLaunch::launch_on_current_device(const Addresses& at, void* stream) const {
    if (plan_.grid[0] == 0) return;  // no rows: CUDA refuses an empty grid, and nothing is asked
    alignas(64) uint8_t arguments[kMostArgumentBytes];
    std::memcpy(arguments, plan_.argument_bytes.data(), plan_.argument_bytes.size());
    point_at(*reinterpret_cast<ForwardKernelArgs*>(arguments + plan_.problem_offset), at);
    encoded_.write(at, arguments);
    std::optional<Workspace> workspace;  // until after the launch
    if (plan_.workspace_bytes > 0) {
        void* address = workspace.emplace(plan_.workspace_bytes, stream).address();
        std::memcpy(arguments + plan_.workspace_offset, &address, sizeof address);
    }
    raise_smem_limit();
    void* parameters[] = {arguments};
    const auto dim = [](const std::array<uint32_t, 3>& x) { return dim3(x[0], x[1], x[2]); };
    if (plan_.cluster == std::array<uint32_t, 3>{1, 1, 1}) {
        check(cudaLaunchKernel(plan_.kernel, dim(plan_.grid), dim(plan_.block), parameters,
                               plan_.smem_bytes, static_cast<cudaStream_t>(stream)),
              "cudaLaunchKernel");
        return;
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {plan_.cluster[0], plan_.cluster[1], plan_.cluster[2]};
    cudaLaunchConfig_t config{};
    config.gridDim = dim(plan_.grid);
    config.blockDim = dim(plan_.block);
    config.dynamicSmemBytes = plan_.smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    check(cudaLaunchKernelExC(&config, plan_.kernel, parameters), "cudaLaunchKernelExC");
}

void PreparedLaunch::launch(const Addresses& at, void* stream) const {
    check_kind(at, kernel_semantics());
    const CurrentDevice current(device_);
    launch_on_current_device(at, stream);
}

float PreparedLaunch::launch_timed(const Addresses& at, void* stream) const {
    check_kind(at, kernel_semantics());
    const CurrentDevice current(device_);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Event start, stop;
    check(cudaEventRecord(start.get(), cuda_stream), "cudaEventRecord");
    launch_on_current_device(at, stream);
    check(cudaEventRecord(stop.get(), cuda_stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop.get()), "the kernel");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()), "cudaEventElapsedTime");
    return milliseconds;
}

}  // namespace flashsmith
