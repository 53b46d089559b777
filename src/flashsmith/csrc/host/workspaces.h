// Device memory that every launch leaves zero for the next, without waiting for any other.
#pragma once

#include <cstddef>

#include "host/plan.h"

namespace flashsmith {

// Memory for one launch on the current device. It is made before the launch and destroyed after it.
//
// It is zero when a kernel on `stream` starts, provided that every kernel leaves it zero. Launches
// on one stream run one after another and share a slot. There are slots of two sizes:
//
// - up to 64 bytes: streams beyond the first 1,024 of a context use stream-ordered memory. A
//   captured launch has its own slot. The first 16,384 of a context keep it for good, later ones as
//   long as the graph, or an executable made from it, exists.
// - up to 1 MiB: streams beyond the first 64 use stream-ordered memory. Launches captured on one
//   stream in one capture share a slot, because a model captures one launch per layer. Branches
//   on other streams have other slots. The first 64 such branches of a context keep theirs for
//   good, later ones as long as the graph, or an executable made from it, exists.
//
// Replays of one executable run one after another. Two executables of the same graph must not run
// at once. Nor may launches of one branch with more than 64 bytes. These can only overlap after
// cudaStreamUpdateCaptureDependencies(), or if a stream is destroyed during a capture and another
// one with its handle joins the capture from an earlier point.
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
