// Slots of device memory, which are given to streams and to captured launches.
#include "host/workspaces.h"

#include <cuda.h>

#include <atomic>
#include <compare>
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

// The slots of one size: how they are allocated, and how many slots each kind of owner may have.
struct SlotKind {
    size_t bytes;
    size_t per_chunk;
    // The number of streams that may have a slot. There is a limit because a process that makes a
    // stream for every task must not fill the memory.
    size_t most_streams;
    // The number of captured launches, or branches, that may keep a slot for good. If a user object
    // returned the slot instead, replaying a graph would take 2 us longer, which is too long for
    // the attention of a model that decodes.
    size_t most_kept;
};
// 64 KiB are allocated at a time. This is enough for more streams than a process has at the same
// time, and 1 MiB for captured launches.
constexpr SlotKind kSmall{64, 1024, 1024, 16384};
// 2 MiB are allocated at a time, which is one page of the GPU's memory. Streams may have 64 MiB,
// and captured launches may keep 64 MiB for good.
constexpr SlotKind kLarge{kMostKeptBytes, 2, 64, 64};

// The launches that one capture records on one stream. The id of a capture is unique in a process.
// A stream is identified by its handle, because a query of the id of a stream that is being
// captured would invalidate the capture.
struct Branch {
    unsigned long long capture = 0;
    cudaStream_t stream = nullptr;
    unsigned long long thread = 0;  // the owner, for cudaStreamPerThread; otherwise 0
    auto operator<=>(const Branch&) const = default;
};

// The memory of one CUDA context, as consecutive slots that are zero.
class Slots {
  public:
    explicit Slots(const SlotKind& kind) : kind_(kind), used_(kind.per_chunk) {}

    void* take() {
        if (void* slot = take_free()) return slot;
        const std::lock_guard lock(mutex_);
        if (used_ == kind_.per_chunk) allocate();
        return chunk_ + kind_.bytes * used_++;
    }

    // The slot of the stream with this id. Unlike a handle, an id is never used again for a later
    // stream. Null if too many streams have slots.
    void* of_stream(unsigned long long id) {
        {
            const std::lock_guard lock(owners_mutex_);
            const auto found = of_stream_.find(id);
            if (found != of_stream_.end()) return found->second;
            if (of_stream_.size() >= kind_.most_streams) return nullptr;
        }
        void* slot = take();
        const std::lock_guard lock(owners_mutex_);
        const auto [entry, is_new] = of_stream_.emplace(id, slot);
        if (!is_new) {  // another thread has inserted a slot first
            give_back(slot);
        } else if (of_stream_.size() > kind_.most_streams) {  // other threads have reached the
                                                              // limit
            of_stream_.erase(entry);
            give_back(slot);
            return nullptr;
        }
        return entry->second;
    }

    // The slot of a branch. If it has none yet, calls `take_one`.
    template <class TakeOne>
    void* of_branch(const Branch& branch, TakeOne take_one) {
        // Several threads may launch on one stream. CUDA is called while this lock is held, so
        // give_back() and forget() must not take it.
        const std::lock_guard one_at_a_time(branches_mutex_);
        {
            const std::lock_guard lock(owners_mutex_);
            const auto found = of_branch_.find(branch);
            if (found != of_branch_.end()) return found->second;
        }
        std::map<Branch, void*> made{{branch, nullptr}};  // once a slot exists, nothing may fail
        void* const slot = made.begin()->second = take_one();
        const std::lock_guard lock(owners_mutex_);
        of_branch_.merge(made);
        return slot;
    }

    // A slot that is never given back. Null if there are too many.
    void* keep() {
        if (kept_.fetch_add(1) >= kind_.most_kept) {
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

    // A thread of the driver may call give_back() and forget() while it holds locks. So no code may
    // call CUDA while it holds a lock that they take.
    void give_back(void* slot) {
        const std::lock_guard lock(free_mutex_);
        free_.push_back(slot);
    }

    // Removes the slot of the branch, unless the branch has another slot by now. A capture
    // continues even if a user object could not be attached to it.
    void forget(const Branch& branch, void* slot) {
        const std::lock_guard lock(owners_mutex_);
        const auto found = of_branch_.find(branch);
        if (found != of_branch_.end() && found->second == slot) of_branch_.erase(found);
    }

  private:
    void* take_free() {
        const std::lock_guard lock(free_mutex_);
        if (free_.empty()) return nullptr;
        void* slot = free_.back();
        free_.pop_back();
        return slot;
    }

    // Sets the memory to zero on a separate stream, because the default stream must not be used
    // during a capture.
    void allocate() {
        const RelaxedCapture relaxed;
        {
            const std::lock_guard lock(free_mutex_);
            free_.reserve(n_slots_ + kind_.per_chunk);  // give_back() must not run out of memory
        }
        const size_t bytes = kind_.per_chunk * kind_.bytes;
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
        n_slots_ += kind_.per_chunk;
    }

    const SlotKind kind_;
    std::mutex mutex_, free_mutex_, owners_mutex_, branches_mutex_;
    char* chunk_ = nullptr;
    size_t used_, n_slots_ = 0;
    std::vector<void*> free_;
    std::map<unsigned long long, void*> of_stream_;
    std::map<Branch, void*> of_branch_;
    std::atomic<size_t> kept_ = 0;
};

struct ContextSlots {
    Slots small{kSmall}, large{kLarge};
};

// This is never destroyed, because the driver may give slots back while the process ends.
ContextSlots& slots_of_current_context() {
    using Key = std::pair<int, unsigned long long>;
    static auto& mutex = *new std::mutex;
    static auto& slots = *new std::map<Key, ContextSlots>;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const Key key{device, context_id()};
    const std::lock_guard lock(mutex);
    return slots[key];
}

struct CapturedSlot {
    Slots& slots;
    void* slot;
    Branch branch;  // empty if the slot belongs to a single launch
};

void CUDART_CB give_back(void* captured) {
    const std::unique_ptr<CapturedSlot> held(static_cast<CapturedSlot*>(captured));
    held->slots.forget(held->branch, held->slot);
    held->slots.give_back(held->slot);
}

// The slot of a captured launch or of a branch. It is either kept for good, or given back when the
// graph and everything made from it no longer exist.
void* slot_of_graph(Slots& slots, cudaGraph_t graph, const Branch& branch = {}) {
    if (void* const kept = slots.keep()) return kept;
    auto held = std::make_unique<CapturedSlot>(CapturedSlot{slots, slots.take(), branch});
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

// The capture to which launches on a stream belong. If there is no graph, there is no capture
// either, and launches run immediately.
struct Capture {
    unsigned long long id = 0;
    cudaGraph_t graph = nullptr;
};

Capture capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    Capture capture;
#if CUDART_VERSION >= 13000
    check(cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph, nullptr, nullptr,
                                   nullptr),
          "cudaStreamGetCaptureInfo");
#else
    check(
        cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph, nullptr, nullptr),
        "cudaStreamGetCaptureInfo");
#endif
    if (status == cudaStreamCaptureStatusInvalidated)
        throw std::runtime_error("the stream's capture is invalid already");
    return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

Branch branch_of(unsigned long long capture, cudaStream_t stream) {
    static std::atomic<unsigned long long> threads = 0;
    thread_local const unsigned long long own = ++threads;
    return {capture, stream, stream == cudaStreamPerThread ? own : 0};
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
    const Capture capture = capture_of(stream);
    ContextSlots& context = slots_of_current_context();
    const bool is_large = bytes > kSmall.bytes;
    Slots& slots = is_large ? context.large : context.small;
    if (capture.graph == nullptr) {
        unsigned long long id = 0;
        check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
        address_ = slots.of_stream(id);
        is_temporary_ = address_ == nullptr;
        if (is_temporary_) address_ = temporary(bytes, stream);
    } else if (is_large) {
        const Branch branch = branch_of(capture.id, stream);
        address_ =
            slots.of_branch(branch, [&] { return slot_of_graph(slots, capture.graph, branch); });
    } else {
        address_ = slot_of_graph(slots, capture.graph);
    }
}

KeptWorkspace::~KeptWorkspace() {
    if (is_temporary_) cudaFreeAsync(address_, static_cast<cudaStream_t>(stream_));
}

}  // namespace flashsmith
