// All launches of a plan as one CUDA graph. Plain C++20 without CUDA headers.
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

    // Writes the arguments of the kernel for these buffers; they have at most kMostArgumentBytes.
    void write_arguments(const Buffers& buffers, uint8_t* arguments) const;

    Launch launch;
    const void* kernel;
    mutable EncodedTensorMaps maps;
};

// Launches several steps at once, for calls that follow each other on one stream. On an H200, a
// graph of three kernels takes 1.3 us of host time, or 3.1 us with new arguments. Three separate
// launches take 9.8 us. Threads may share an instance.
//
// The graph is made in the third call in a row on a stream. Before each launch it waits until its
// last launch has finished, so it is not useful for calls that alternate between streams. New
// arguments, or the destruction of this object, do not affect earlier launches.
class LaunchGraph {
  public:
    // The steps must live longer than the graph. There is no graph for a single step, for clusters,
    // for programmatic launches, or with CUDA_LAUNCH_BLOCKING, with which errors must appear where
    // a kernel is launched.
    explicit LaunchGraph(const std::deque<Step>& steps);
    ~LaunchGraph();
    LaunchGraph(const LaunchGraph&) = delete;
    LaunchGraph& operator=(const LaunchGraph&) = delete;

    // Returns whether the steps were launched, on a stream of the current device. If not, nothing
    // was launched. The reasons are: too few calls so far, a capture of the stream, another thread
    // in this function, 256 graphs, or an error of CUDA. In the last case, launching the steps will
    // show the error.
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
    std::vector<uintptr_t> addresses_;  // in the arguments: of tensors, then of workspaces
    int device_ = 0, process_ = 0;      // device and process in which the graph was made
    unsigned long long context_ = 0;
};

}  // namespace flashsmith
