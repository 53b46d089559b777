// Slots of device memory, handed out to streams and captured launches.
#include "host/workspaces.h"

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/cuda_check.h"
#include "host/driver_functions.h"

namespace flashsmith {
namespace {

constexpr size_t kSlotsPerChunk = 1024;
// More streams than a process has at a time; one that makes a stream for every task must not fill
// memory.
constexpr size_t kMostStreams = 1024;
// Captured launches that keep their slots for good, 1 MiB in all. With a user object to return the
// slot a graph's replay takes 2 us longer: too long for a decoding model's attention.
constexpr size_t kMostKept = 16384;

// Memory of one CUDA context, as zeroed slots one after the other.
class Slots {
  public:
    void* take() {
        if (void* slot = take_free()) return slot;
        const std::lock_guard lock(mutex_);
        if (used_ == kSlotsPerChunk) allocate();
        return chunk_ + KeptWorkspace::kMostBytes * used_++;
    }

    // The slot of a stream, by the stream's id: no later stream gets it, unlike its handle. Null
    // for one stream too many.
    void* of_stream(unsigned long long id) {
        {
            const std::lock_guard lock(streams_mutex_);
            const auto found = of_stream_.find(id);
            if (found != of_stream_.end()) return found->second;
            if (of_stream_.size() >= kMostStreams) return nullptr;
        }
        void* slot = take();
        const std::lock_guard lock(streams_mutex_);
        const auto [entry, is_new] = of_stream_.emplace(id, slot);
        if (!is_new) give_back(slot);  // another thread was faster
        return entry->second;
    }

    // A slot that is never given back; null for one too many.
    void* keep() {
        if (kept_.fetch_add(1) >= kMostKept) {
            kept_.fetch_sub(1);
            return nullptr;
        }
        try {
            return take();
        } catch (...) {
            kept_.fetch_sub(1);
            throw;
        }
    }

    // May be called from a thread of the driver's, which may hold locks: no call of CUDA is made
    // while the lock is held that this takes.
    void give_back(void* slot) {
        const std::lock_guard lock(free_mutex_);
        free_.push_back(slot);
    }

  private:
    void* take_free() {
        const std::lock_guard lock(free_mutex_);
        if (free_.empty()) return nullptr;
        void* slot = free_.back();
        free_.pop_back();
        return slot;
    }

    // Zeroed on a stream of its own: the default stream must not be touched during a capture.
    void allocate() {
        const RelaxedCapture relaxed;
        constexpr size_t bytes = kSlotsPerChunk * KeptWorkspace::kMostBytes;
        void* chunk = nullptr;
        check(cudaMalloc(&chunk, bytes), "cudaMalloc");
        cudaStream_t stream = nullptr;
        cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        if (status == cudaSuccess) {
            status = cudaMemsetAsync(chunk, 0, bytes, stream);
            const cudaError_t done = cudaStreamSynchronize(stream);
            if (status == cudaSuccess) status = done;
            cudaStreamDestroy(stream);
        }
        if (status != cudaSuccess) cudaFree(chunk);
        check(status, "zeroing a workspace");
        chunk_ = static_cast<char*>(chunk);
        used_ = 0;
    }

    std::mutex mutex_, free_mutex_, streams_mutex_;
    char* chunk_ = nullptr;
    size_t used_ = kSlotsPerChunk;
    std::vector<void*> free_;
    std::map<unsigned long long, void*> of_stream_;
    std::atomic<size_t> kept_ = 0;
};

// Never destroyed: the driver may give slots back while the process ends.
Slots& slots_of_current_context() {
    using Key = std::pair<int, unsigned long long>;
    static auto& mutex = *new std::mutex;
    static auto& slots = *new std::map<Key, Slots>;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const Key key{device, context_id()};
    const std::lock_guard lock(mutex);
    return slots[key];
}

struct CapturedSlot {
    Slots& slots;
    void* slot;
};

void CUDART_CB give_back(void* captured) {
    const std::unique_ptr<CapturedSlot> held(static_cast<CapturedSlot*>(captured));
    held->slots.give_back(held->slot);
}

// The slot of a captured launch: kept, or returned when the last of the graph and what was made of
// it is gone.
void* slot_of_graph(Slots& slots, cudaGraph_t graph) {
    if (void* const kept = slots.keep()) return kept;
    auto held = std::make_unique<CapturedSlot>(CapturedSlot{slots, slots.take()});
    void* const slot = held->slot;
    cudaUserObject_t object = nullptr;
    const cudaError_t made =
        cudaUserObjectCreate(&object, held.get(), give_back, 1, cudaUserObjectNoDestructorSync);
    if (made != cudaSuccess) slots.give_back(slot);
    check(made, "cudaUserObjectCreate");
    held.release();
    const cudaError_t kept = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (kept != cudaSuccess) cudaUserObjectRelease(object, 1);
    check(kept, "cudaGraphRetainUserObject");
    return slot;
}

// The graph that launches on the stream become part of; null where they run.
cudaGraph_t captured_graph(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
    check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
          "cudaStreamGetCaptureInfo");
#else
    check(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr),
          "cudaStreamGetCaptureInfo");
#endif
    if (status == cudaStreamCaptureStatusInvalidated)
        throw std::runtime_error("the stream's capture is invalid already");
    return status == cudaStreamCaptureStatusActive ? graph : nullptr;
}

void* temporary(size_t bytes, cudaStream_t stream) {
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, stream), "cudaMallocAsync");
    const cudaError_t cleared = cudaMemsetAsync(memory, 0, bytes, stream);
    if (cleared != cudaSuccess) cudaFreeAsync(memory, stream);
    check(cleared, "cudaMemsetAsync");
    return memory;
}

}  // namespace

KeptWorkspace::KeptWorkspace(size_t bytes, void* stream_handle) : stream_(stream_handle) {
    if (bytes > kMostBytes)
        throw std::runtime_error("a workspace of " + std::to_string(bytes) + " bytes; at most " +
                                 std::to_string(kMostBytes));
    const auto stream = static_cast<cudaStream_t>(stream_);
    const cudaGraph_t graph = captured_graph(stream);
    Slots& slots = slots_of_current_context();
    if (graph != nullptr) {
        address_ = slot_of_graph(slots, graph);
        return;
    }
    unsigned long long id = 0;
    check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
    address_ = slots.of_stream(id);
    is_temporary_ = address_ == nullptr;
    if (is_temporary_) address_ = temporary(bytes, stream);
}

KeptWorkspace::~KeptWorkspace() {
    if (is_temporary_) cudaFreeAsync(address_, static_cast<cudaStream_t>(stream_));
}

}  // namespace flashsmith
