// Slots of device memory, handed out to streams and captured launches.
#include "workspaces.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace flashsmith {
namespace {

constexpr size_t kSlotsPerChunk = 1024;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

// While it lives, this thread may allocate although some stream is being captured.
class AllocationDuringCapture {
  public:
    AllocationDuringCapture() {
        check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
    }
    ~AllocationDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    AllocationDuringCapture(const AllocationDuringCapture&) = delete;
    AllocationDuringCapture& operator=(const AllocationDuringCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Memory of one device, as zeroed slots one after the other. It is never given back: a graph may
// keep a slot for as long as the process lives.
class Slots {
  public:
    void* take() {
        if (used_ == kSlotsPerChunk) allocate();
        return chunk_ + kLargestWorkspace * used_++;
    }

  private:
    // Zeroed on a stream of its own: the default stream must not be touched during a capture.
    void allocate() {
        const AllocationDuringCapture allowed;
        constexpr size_t bytes = kSlotsPerChunk * kLargestWorkspace;
        void* chunk = nullptr;
        check(cudaMalloc(&chunk, bytes), "cudaMalloc");
        cudaStream_t stream = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        const cudaError_t cleared = cudaMemsetAsync(chunk, 0, bytes, stream);
        const cudaError_t done = cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
        check(cleared, "cudaMemsetAsync");
        check(done, "cudaStreamSynchronize");
        chunk_ = static_cast<char*>(chunk);
        used_ = 0;
    }

    char* chunk_ = nullptr;
    size_t used_ = kSlotsPerChunk;
};

std::mutex mutex;
std::map<int, Slots> slots_of_device;
// By the stream's id, which no later stream gets, unlike its handle.
std::map<std::pair<int, unsigned long long>, void*> slot_of_stream;

}  // namespace

void* zeroed_workspace(size_t bytes, void* stream_handle) {
    if (bytes > kLargestWorkspace)
        throw std::runtime_error("a workspace of " + std::to_string(bytes) + " bytes; at most " +
                                 std::to_string(kLargestWorkspace));
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
    const bool captured = capture != cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (!captured) check(cudaStreamGetId(stream, &id), "cudaStreamGetId");

    const std::lock_guard lock(mutex);
    if (captured) return slots_of_device[device].take();
    void*& slot = slot_of_stream[{device, id}];
    if (slot == nullptr) slot = slots_of_device[device].take();
    return slot;
}

}  // namespace flashsmith
