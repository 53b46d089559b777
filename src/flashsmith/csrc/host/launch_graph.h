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

// What launches several steps at once, for calls that follow one another on one stream: on an H200
// a graph of three kernels takes the host 1.3 us, with new arguments 3.1, three launches take 9.8.
// Threads may share it.
//
// It is made at the third call in a row on a stream. A graph has to wait for its own last launch,
// so that calls on alternating streams are not for it. What it launched is not disturbed by later
// arguments, nor by its end.
class LaunchGraph {
  public:
    // Of steps that outlive it. One step alone, clusters and programmatic launches get no graph,
    // and none is made while CUDA_LAUNCH_BLOCKING wants errors where their kernels are launched.
    explicit LaunchGraph(const std::deque<Step>& steps);
    ~LaunchGraph();
    LaunchGraph(const LaunchGraph&) = delete;
    LaunchGraph& operator=(const LaunchGraph&) = delete;

    // Whether it has launched the steps on a stream of the current device. Otherwise nothing was:
    // it is too early, the stream is captured, another thread is here, there are 256 graphs, or
    // CUDA refused, whose reason a launch of the steps will give.
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
    std::vector<uintptr_t> addresses_;  // in its arguments: of tensors, then of workspaces
    int device_ = 0, process_ = 0;      // where it was made
    unsigned long long context_ = 0;
};

}  // namespace flashsmith
