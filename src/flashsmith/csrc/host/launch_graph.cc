#include "host/launch_graph.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "host/cuda_check.h"
#include "host/driver_functions.h"

namespace flashsmith {
namespace {

// Launching a single kernel as a graph takes 1.3 us of host time (2.1 us with new arguments)
// instead of 3.2 us, but 0.2 us more on the GPU.
constexpr size_t kLeastSteps = 2;
// Making a graph takes 50 us, which is too long for calls that are made once or twice.
constexpr int kCallsBefore = 2;
// The most graphs of one library, which together take 28 MiB of the GPU's memory. A program whose
// lengths never repeat must not fill that memory.
constexpr int kMostGraphs = 256;
std::atomic<int> n_graphs = 0;

bool launches_block() {
    const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value != nullptr && std::string_view(value) != "0";
}

bool succeeded(cudaError_t status) {
    if (status == cudaSuccess) return true;
    cudaGetLastError();  // clears the error, so that no later call reports it
    return false;
}

bool runs_at_once(void* stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return succeeded(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status)) &&
           status == cudaStreamCaptureStatusNone;
}

// The data with which a graph node launches a step.
struct NodeParameters {
    NodeParameters(const Step& step, const Buffers& buffers) {
        const auto dim = [](const std::array<uint32_t, 3>& x) { return dim3(x[0], x[1], x[2]); };
        step.write_arguments(buffers, arguments);
        parameters.func = const_cast<void*>(step.kernel);
        parameters.gridDim = dim(step.launch.grid);
        parameters.blockDim = dim(step.launch.block);
        parameters.sharedMemBytes = static_cast<unsigned>(step.launch.smem_bytes);
        parameters.kernelParams = pointers;
    }
    NodeParameters(const NodeParameters&) = delete;
    NodeParameters& operator=(const NodeParameters&) = delete;

    alignas(64) uint8_t arguments[kMostArgumentBytes];
    void* pointers[1] = {arguments};
    cudaKernelNodeParams parameters{};
};

cudaGraphExec_t as_executable(void* executable) {
    return static_cast<cudaGraphExec_t>(executable);
}

}  // namespace

void Step::write_arguments(const Buffers& buffers, uint8_t* arguments) const {
    std::memcpy(arguments, launch.argument_bytes.data(), launch.argument_bytes.size());
    launch.write_addresses(buffers, arguments);
    maps.write(buffers, arguments);
}

LaunchGraph::LaunchGraph(const std::deque<Step>& steps)
    : steps_(steps),
      is_suitable_(steps.size() >= kLeastSteps && !launches_block() &&
                   std::ranges::all_of(steps, [](const Step& step) {
                       return !step.launch.has_clusters() && !step.launch.programmatic;
                   })) {}

LaunchGraph::~LaunchGraph() {
    // A forked child must not call CUDA. Another context on the device does not have the graph.
    if (graph_ == nullptr || process_ != getpid()) return;
    int current = 0;
    if (!succeeded(cudaGetDevice(&current)) || !succeeded(cudaSetDevice(device_))) return;
    context_ == context_id() ? discard() : forget();
    succeeded(cudaSetDevice(current));
}

bool LaunchGraph::launch(const Buffers& buffers, void* stream) {
    if (!is_suitable_) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || is_refused_ || !is_due(stream) || !runs_at_once(stream)) return false;
    if (graph_ != nullptr && context_ != context_id()) forget();  // it ended with its context
    if (graph_ == nullptr && n_graphs >= kMostGraphs) return false;
    const bool is_ready = executable_ == nullptr ? make(buffers, stream) : set_arguments(buffers);
    if (is_ready &&
        succeeded(cudaGraphLaunch(as_executable(executable_), static_cast<cudaStream_t>(stream))))
        return true;
    discard();
    is_refused_ = true;
    return false;
}

bool LaunchGraph::is_due(void* stream) {
    if (stream != stream_) {
        stream_ = stream;
        calls_in_a_row_ = 0;
    }
    if (calls_in_a_row_ == kCallsBefore) return true;
    ++calls_in_a_row_;
    return false;
}

bool LaunchGraph::make(const Buffers& buffers, void* stream) {
    // Other threads may be capturing streams, and nothing here belongs to their captures.
    const RelaxedCapture relaxed;
    discard();  // what an exception has left
    cudaGraph_t graph = nullptr;
    if (!succeeded(cudaGetDevice(&device_)) || !succeeded(cudaGraphCreate(&graph, 0))) return false;
    graph_ = graph;
    ++n_graphs;
    context_ = context_id();
    process_ = getpid();
    nodes_.clear();
    for (const Step& step : steps_) {
        const NodeParameters wanted(step, buffers);
        cudaGraphNode_t node = nullptr;
        const auto before = nodes_.empty() ? nullptr : static_cast<cudaGraphNode_t>(nodes_.back());
        if (!succeeded(cudaGraphAddKernelNode(&node, graph, &before, nodes_.empty() ? 0 : 1,
                                              &wanted.parameters)))
            return false;
        nodes_.push_back(node);
    }
    cudaGraphExec_t executable = nullptr;
    if (!succeeded(cudaGraphInstantiate(&executable, graph, 0))) return false;
    executable_ = executable;
    addresses_.assign(buffers.tensors.begin(), buffers.tensors.end());
    addresses_.insert(addresses_.end(), buffers.workspaces.begin(), buffers.workspaces.end());
    return succeeded(cudaGraphUpload(executable, static_cast<cudaStream_t>(stream)));
}

bool LaunchGraph::set_arguments(const Buffers& buffers) {
    const auto [tensors, workspaces] = buffers;
    const auto of_workspaces = addresses_.begin() + static_cast<ptrdiff_t>(tensors.size());
    if (std::equal(tensors.begin(), tensors.end(), addresses_.begin()) &&
        std::equal(workspaces.begin(), workspaces.end(), of_workspaces))
        return true;
    std::ranges::fill(addresses_, 0);  // the addresses are invalid until all nodes are updated
    for (size_t i = 0; i < nodes_.size(); ++i) {
        const NodeParameters wanted(steps_[i], buffers);
        if (!succeeded(cudaGraphExecKernelNodeSetParams(as_executable(executable_),
                                                        static_cast<cudaGraphNode_t>(nodes_[i]),
                                                        &wanted.parameters)))
            return false;
    }
    std::ranges::copy(tensors, addresses_.begin());
    std::ranges::copy(workspaces, of_workspaces);
    return true;
}

void LaunchGraph::discard() {
    if (graph_ == nullptr) return;
    // Launches that are still running continue. CUDA frees the graph when they have finished.
    if (executable_ != nullptr) succeeded(cudaGraphExecDestroy(as_executable(executable_)));
    succeeded(cudaGraphDestroy(static_cast<cudaGraph_t>(graph_)));
    forget();
}

void LaunchGraph::forget() {
    executable_ = graph_ = nullptr;
    --n_graphs;
}

}  // namespace flashsmith
