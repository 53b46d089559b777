// Device memory that each launch leaves zero for the next one; no launch waits for it.
#pragma once

#include <cstddef>

#include "host/plan.h"

namespace flashsmith {

// The memory of one launch on the current device. An object is made before the launch and destroyed
// after it.
//
// When a kernel on `stream` starts, the memory is zero if every kernel leaves it zero. Launches on
// one stream run one after the other, so they use the same slot. There are slots of two sizes:
//
// - up to 64 bytes: if a context has more than 1,024 streams, the others use memory that is
//   allocated in stream order. A captured launch has a slot of its own. The first 16,384 in a
//   context keep it for good. Later ones keep it as long as the graph, or an executable made from
//   it, exists.
// - up to 1 MiB: streams after the first 64 use memory that is allocated in stream order. Launches
//   that one capture records on one stream use the same slot, because a model captures a launch for
//   each layer. Launches on other streams of the capture (branches) have other slots. The first 64
// such branches in a context keep their slots for good. Later ones keep it as long as the graph, or
// an executable made from it, exists.
//
// Replays of one executable run one after the other. Two executables of the same graph must not run
// at the same time. Nor may two launches of one branch that need more than 64 bytes. These can
// overlap only after cudaStreamUpdateCaptureDependencies(), or if a stream is destroyed during a
// capture and another one with the same handle joins the capture at an earlier point.
class KeptWorkspace {
  public:
    static constexpr size_t kMostBytes = kMostKeptBytes;

    // Throws std::runtime_error with CUDA's message.
    KeptWorkspace(size_t bytes, void* stream);
    ~KeptWorkspace();
    KeptWorkspace(const KeptWorkspace&) = delete;
    KeptWorkspace& operator=(const KeptWorkspace&) = delete;

    void* address() const { return address_; }

  private:
    void* address_ = nullptr;
    void* stream_;
    bool is_temporary_ = false;
};

}  // namespace flashsmith
