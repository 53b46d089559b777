// Device memory that every launch leaves zero for the next, without waiting for any other.
#pragma once

#include <cstddef>

#include "host/plan.h"

namespace flashsmith {

// Memory of one launch on the current device: made before the launch, and gone after it.
//
// It is zero when a kernel on `stream` starts, provided that every kernel leaves it so. Launches on
// one stream run one after the other and share theirs. There are slots of two sizes:
//
// - up to 64 bytes: streams beyond the first 1,024 of a context take memory in their own order and
//   give it back. A launch that is captured has its own, the first 16,384 of a context for good,
//   later ones for as long as the graph, or an executable made of it, exists.
// - up to 1 MiB: streams beyond the first 64 do so. Launches that are captured on one stream in one
//   capture share a slot, as a model captures one for every layer; branches on other streams have
//   others. The first 64 such branches of a context have theirs for good, later ones for as long as
//   the graph, or an executable made of it, exists.
//
// Replays of one executable run one after the other; of a graph that is made executable twice the
// two must not run at once. Nor may launches of one branch with more than 64 bytes, which takes
// cudaStreamUpdateCaptureDependencies(), or a stream that is destroyed while a capture goes on and
// another with its handle that joins the capture from an earlier point.
class KeptWorkspace {
  public:
    static constexpr size_t kMostBytes = kMostKeptBytes;

    // Throws std::runtime_error with CUDA's words.
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
