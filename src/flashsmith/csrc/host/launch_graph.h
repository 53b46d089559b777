// The launches of a plan as one CUDA graph. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "host/plan.h"
#include "host/tensor_maps.h"

namespace flashsmith {

// One launch of a plan, with its kernel.
struct Step {
    Step(Launch planned, const void* its_kernel)
        : launch(std::move(planned)), kernel(its_kernel), maps(launch.tensor_maps) {}

    // The kernel's arguments for these buffers, at most kMostArgumentBytes.
    void write_arguments(const Buffers& buffers, uint8_t* arguments) const;

    Launch launch;
    const void* kernel;
    mutable EncodedTensorMaps maps;
};

// Launches several steps at once, for calls that follow one another on one stream. On an H200 a
// graph of three kernels takes the host 1.3 us, or 3.1 us with new arguments. Three launches take
// 9.8 us. Threads may share an instance.
//
// The graph is made at the third consecutive call on a stream. It has to wait for its own last
// launch, so it does not suit calls on alternating streams. Later arguments, or destruction, do not
// disturb what it has launched.
class LaunchGraph {
  public:
    // The steps must outlive the graph. A single step, clusters and programmatic launches get no
    // graph. None is made under CUDA_LAUNCH_BLOCKING either, which requires that errors appear
    // where the kernels are launched.
    explicit LaunchGraph(const std::deque<Step>& steps);
    ~LaunchGraph();
    LaunchGraph(const LaunchGraph&) = delete;
    LaunchGraph& operator=(const LaunchGraph&) = delete;

    // Returns whether the steps were launched on a stream of the current device. If not, nothing
    // was launched: it is too early, the stream is being captured, another thread is here, there
    // are 256 graphs, or CUDA refused. In the last case a launch of the steps will show the reason.
    bool launch(const Buffers& buffers, void* stream);

  private:
    bool is_due(void* stream);
    bool make(const Buffers& buffers, void* stream);
    bool set_arguments(const Buffers& buffers);
    void discard();
    void forget();

    const std::deque<Step>& steps_;
    const bool is_suitable_;
    std::mutex mutex_;
    bool is_refused_ = false;
    void* stream_ = nullptr;
    int calls_in_a_row_ = 0;
    void* graph_ = nullptr;             // a cudaGraph_t
    void* executable_ = nullptr;        // a cudaGraphExec_t
    std::vector<void*> nodes_;          // cudaGraphNode_t
    std::vector<uintptr_t> addresses_;  // in its arguments: tensors first, then workspaces
    int device_ = 0, process_ = 0;      // where it was made
    unsigned long long context_ = 0;
};

}  // namespace flashsmith
