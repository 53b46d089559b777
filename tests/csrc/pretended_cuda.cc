// A CUDA runtime and driver that are not there: the host code of kernel libraries linked against it
// runs without a GPU. Memory is the host's, launches are only noted, and whatever is asked for is
// counted. Streams are numbers; each becomes known by its first use.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr size_t kArgumentBytes = 4096;

struct Launch {
    uint64_t kernel, stream, device;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t smem_bytes;
    uint64_t memory_bytes;  // what is allocated then
    uint8_t arguments[kArgumentBytes];
};

// A graph's kernels, or those of an executable made of it.
struct Node {
    const void* kernel;
    dim3 grid, block;
    size_t smem_bytes;
    std::vector<uint8_t> arguments;
};
struct Graph {
    std::vector<Node> nodes;
};

struct Capture {
    cudaGraph_t graph;
    unsigned long long id;
    bool is_invalid;
};

struct Memory {
    size_t bytes;
    bool in_order;  // of a stream
    cudaStream_t stream;
};

struct UserObject {
    void* data;
    cudaHostFn_t destroy;
    int references;
};

struct Machine {
    std::recursive_mutex mutex;
    int devices = 1;
    std::map<int, unsigned long long> contexts;  // ids, by device
    std::map<std::string, int> counts;
    std::map<std::string, int> failures;  // what the next call returns
    std::map<std::string, int> delays;    // how long each call takes; ms
    std::map<cudaStream_t, Capture> capturing;
    unsigned long long captures = 0;                       // the last one's id
    std::map<cudaGraph_t, std::vector<UserObject*>> kept;  // by graphs and their executables
    std::map<std::pair<cudaStream_t, unsigned long long>, unsigned long long> stream_ids;
    bool destroys_later = false;
    std::vector<UserObject*> to_destroy;
    std::map<void*, Memory> memory;
    std::map<uint64_t, int> smem_limits;  // bytes, by kernel
    std::vector<Launch> launches;
    std::map<void*, Graph> graphs;  // made by the host code, and their executables
    uintptr_t next_graph = 0xA000;
};

Machine& machine() {
    static auto& the_machine = *new Machine;
    return the_machine;
}
thread_local int current_device = 0;
thread_local bool has_context = true;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

using Lock = std::lock_guard<std::recursive_mutex>;

// Counts the call; what it is to return.
template <typename Status = cudaError_t>
Status called(const char* name) {
    Machine& m = machine();
    ++m.counts[name];
    const auto failure = m.failures.find(name);
    if (failure == m.failures.end()) return Status{};
    const int status = failure->second;
    m.failures.erase(failure);
    return static_cast<Status>(status);
}

// While other threads may call.
void delay(const char* name) {
    int ms = 0;
    {
        const Lock lock(machine().mutex);
        const auto found = machine().delays.find(name);
        if (found != machine().delays.end()) ms = found->second;
    }
    if (ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

#define FLASHSMITH_CALLED             \
    delay(__func__);                  \
    const Lock lock(machine().mutex); \
    if (const cudaError_t status = called(__func__); status != cudaSuccess) return status

unsigned long long context() {
    return machine().contexts.try_emplace(current_device, 100 + current_device).first->second;
}

bool anything_is_captured() {
    return !machine().capturing.empty() && capture_mode != cudaStreamCaptureModeRelaxed;
}

void destroy(UserObject* object) {
    object->destroy(object->data);
    delete object;
}

void release(UserObject* object) {
    if (--object->references > 0) return;
    if (machine().destroys_later)
        machine().to_destroy.push_back(object);
    else
        destroy(object);
}

uint64_t memory_bytes() {
    uint64_t bytes = 0;
    for (const auto& [address, memory] : machine().memory) bytes += memory.bytes;
    return bytes;
}

void note_launch(const void* kernel, dim3 grid, dim3 block, dim3 cluster, void** parameters,
                 size_t smem_bytes, cudaStream_t stream) {
    Launch launch{};
    launch.kernel = reinterpret_cast<uint64_t>(kernel);
    launch.stream = reinterpret_cast<uint64_t>(stream);
    launch.device = current_device;
    const dim3 extents[] = {grid, block, cluster};
    uint32_t* to[] = {launch.grid, launch.block, launch.cluster};
    for (int i = 0; i < 3; ++i) {
        to[i][0] = extents[i].x;
        to[i][1] = extents[i].y;
        to[i][2] = extents[i].z;
    }
    launch.smem_bytes = static_cast<uint32_t>(smem_bytes);
    launch.memory_bytes = memory_bytes();
    std::memcpy(launch.arguments, parameters[0], kArgumentBytes);
    machine().launches.push_back(launch);
}

// The arguments are copied, kArgumentBytes of them, as the real ones are.
Node node_of(const cudaKernelNodeParams& p) {
    const auto* const bytes = static_cast<const uint8_t*>(p.kernelParams[0]);
    return {p.func, p.gridDim, p.blockDim, p.sharedMemBytes, {bytes, bytes + kArgumentBytes}};
}

// A node is its graph's handle and its own number.
constexpr uintptr_t kMostNodes = 16;
cudaGraphNode_t node_handle(cudaGraph_t graph, size_t index) {
    return reinterpret_cast<cudaGraphNode_t>(reinterpret_cast<uintptr_t>(graph) * kMostNodes +
                                             index);
}

// ---- the driver ----

// What the driver's manual allows, and the map in a form that a test can read back.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill) {
    const Lock lock(machine().mutex);
    if (const auto status = called<CUresult>("cuTensorMapEncodeTiled")) return status;
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    const auto at = reinterpret_cast<uint64_t>(address);
    constexpr uint32_t kSwizzleBytes[] = {0, 32, 64, 128};
    bool ok = reinterpret_cast<uint64_t>(map) % 64 == 0 && at % 16 == 0 &&
              (rank == 4 || rank == 5) && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
              swizzle <= 3 && box[0] * 2 <= kSwizzleBytes[swizzle] &&
              fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    for (cuuint32_t i = 0; i < rank && ok; ++i)
        ok = sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 &&
             element_strides[i] == 1;
    for (cuuint32_t i = 0; i + 1 < rank && ok; ++i)
        ok = strides[i] > 0 && strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    auto* words = reinterpret_cast<uint64_t*>(map);
    std::memset(map, 0, sizeof *map);
    words[0] = at;
    words[1] = type | uint64_t{kSwizzleBytes[swizzle]} << 16 | uint64_t(promotion) << 32 |
               uint64_t(rank) << 48;
    uint64_t* next = words + 2;
    next = std::copy_n(sizes, rank, next);
    next = std::copy_n(strides, rank - 1, next);
    std::copy_n(box, rank, next);
    return CUDA_SUCCESS;
}

CUresult error_name(CUresult status, const char** name) {
    if (status != CUDA_ERROR_INVALID_VALUE) return CUDA_ERROR_INVALID_VALUE;
    *name = "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
    *context = has_context ? reinterpret_cast<CUcontext>(uintptr_t{1}) : nullptr;
    return CUDA_SUCCESS;
}

CUresult context_id(CUcontext, unsigned long long* id) {
    const Lock lock(machine().mutex);
    *id = context();
    return CUDA_SUCCESS;
}

}  // namespace

// ---- the runtime, as far as the host code calls it ----

extern "C" {

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t status) {
    return status == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t) {
    return "as it was told to";
}

cudaError_t cudaGetDeviceCount(int* count) {
    FLASHSMITH_CALLED;
    *count = machine().devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    FLASHSMITH_CALLED;
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    FLASHSMITH_CALLED;
    if (device < 0 || device >= machine().devices) return cudaErrorInvalidDevice;
    current_device = device;
    has_context = true;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    FLASHSMITH_CALLED;
    *value = 9;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
    FLASHSMITH_CALLED;
    machine().smem_limits[reinterpret_cast<uint64_t>(kernel)] = value;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t*) {
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
    *ms = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    FLASHSMITH_CALLED;
    if (const auto status = called((std::string("finding ") + name).c_str())) return status;
    const std::map<std::string, void*> functions = {
        {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode)},
        {"cuGetErrorName", reinterpret_cast<void*>(&error_name)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(&current_context)},
        {"cuCtxGetId", reinterpret_cast<void*>(&context_id)},
    };
    *found = functions.at(name);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    FLASHSMITH_CALLED;
    if (anything_is_captured()) return cudaErrorStreamCaptureUnsupported;
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*memory, 0xAA, bytes);
    machine().memory[*memory] = {bytes, false, nullptr};
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    FLASHSMITH_CALLED;
    machine().memory.erase(memory);
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream) {
    FLASHSMITH_CALLED;
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*memory, 0xAA, bytes);
    machine().memory[*memory] = {bytes, true, stream};
    return cudaSuccess;
}
// In another stream's order it would be free too early.
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
    FLASHSMITH_CALLED;
    const auto found = machine().memory.find(memory);
    if (found == machine().memory.end() || !found->second.in_order ||
        found->second.stream != stream)
        return cudaErrorInvalidValue;
    machine().memory.erase(found);
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    FLASHSMITH_CALLED;
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
    FLASHSMITH_CALLED;
    *stream = reinterpret_cast<cudaStream_t>(uintptr_t{0xABC0});
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    FLASHSMITH_CALLED;
    return anything_is_captured() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}
// Of a stream that is captured it ends the capture, as on an H200 with driver 580, even in relaxed
// mode. The documentation does not say so.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
    FLASHSMITH_CALLED;
    auto& capturing = machine().capturing;
    if (const auto found = capturing.find(stream); found != capturing.end()) {
        const unsigned long long ended = found->second.id;
        for (auto& [branch, capture] : capturing) capture.is_invalid |= capture.id == ended;
        return cudaErrorStreamCaptureUnsupported;
    }
    auto& ids = machine().stream_ids;
    *id = ids.try_emplace({stream, context()}, ids.size() + 1).first->second;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    FLASHSMITH_CALLED;
    const auto found = machine().capturing.find(stream);
    *status = cudaStreamCaptureStatusNone;
    if (found == machine().capturing.end()) return cudaSuccess;
    const Capture& capture = found->second;
    *status = cudaStreamCaptureStatusInvalidated;
    if (capture.is_invalid) return cudaSuccess;
    *status = cudaStreamCaptureStatusActive;
    *graph = capture.graph;
    if (id != nullptr) *id = capture.id;
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned int references, unsigned int) {
    FLASHSMITH_CALLED;
    *object = reinterpret_cast<cudaUserObject_t>(
        new UserObject{data, destroy, static_cast<int>(references)});
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int) {
    FLASHSMITH_CALLED;
    release(reinterpret_cast<UserObject*>(object));
    return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int,
                                      unsigned int) {
    FLASHSMITH_CALLED;
    machine().kept[graph].push_back(reinterpret_cast<UserObject*>(object));
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    FLASHSMITH_CALLED;
    const bool active = machine().capturing.contains(stream);
    *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned int) {
    FLASHSMITH_CALLED;
    *graph = reinterpret_cast<cudaGraph_t>(++machine().next_graph);
    machine().graphs[*graph] = {};
    return cudaSuccess;
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* after, size_t n_after,
                                   const cudaKernelNodeParams* parameters) {
    FLASHSMITH_CALLED;
    auto& nodes = machine().graphs.at(graph).nodes;
    const bool follows = nodes.empty()
                             ? n_after == 0
                             : n_after == 1 && *after == node_handle(graph, nodes.size() - 1);
    if (!follows) return cudaErrorInvalidValue;  // as if side by side
    *node = node_handle(graph, nodes.size());
    nodes.push_back(node_of(*parameters));
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
    FLASHSMITH_CALLED;
    if (anything_is_captured()) return cudaErrorStreamCaptureUnsupported;
    *executable = reinterpret_cast<cudaGraphExec_t>(++machine().next_graph);
    machine().graphs[*executable] = machine().graphs.at(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    FLASHSMITH_CALLED;
    return cudaSuccess;
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t executable, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* parameters) {
    FLASHSMITH_CALLED;
    const size_t index = reinterpret_cast<uintptr_t>(node) % kMostNodes;
    machine().graphs.at(executable).nodes.at(index) = node_of(*parameters);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    FLASHSMITH_CALLED;
    if (machine().capturing.contains(stream)) return cudaErrorStreamCaptureUnsupported;
    for (Node& node : machine().graphs.at(executable).nodes) {
        void* parameters[] = {node.arguments.data()};
        note_launch(node.kernel, node.grid, node.block, {1, 1, 1}, parameters, node.smem_bytes,
                    stream);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    FLASHSMITH_CALLED;
    return machine().graphs.erase(executable) == 1 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    FLASHSMITH_CALLED;
    return machine().graphs.erase(graph) == 1 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** parameters,
                             size_t smem_bytes, cudaStream_t stream) {
    FLASHSMITH_CALLED;
    note_launch(kernel, grid, block, {1, 1, 1}, parameters, smem_bytes, stream);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** parameters) {
    FLASHSMITH_CALLED;
    dim3 cluster{1, 1, 1};
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            const auto& dim = config->attrs[i].val.clusterDim;
            cluster = {dim.x, dim.y, dim.z};
        }
    note_launch(kernel, config->gridDim, config->blockDim, cluster, parameters,
                config->dynamicSmemBytes, config->stream);
    return cudaSuccess;
}

// ---- what a test says and asks ----

// Everything anew, but for what the host code keeps: contexts that nobody has met, no stream ids.
void pretended_reset(int devices) {
    Machine& m = machine();
    const Lock lock(m.mutex);
    static unsigned long long generation = 0;
    m.devices = devices;
    generation += 1000;
    for (int device = 0; device < devices; ++device) m.contexts[device] = generation + device;
    m.counts.clear();
    m.failures.clear();
    m.delays.clear();
    m.capturing.clear();
    m.destroys_later = false;
    m.launches.clear();
    m.memory.clear();
    m.graphs.clear();
    m.smem_limits.clear();
    current_device = 0;
    has_context = true;
}
// This thread, as if it had not called CUDA yet.
void pretended_leave_context() {
    has_context = false;
}
void pretended_lose_context(int device) {
    machine().contexts[device] += 100;
}
// As if it were destroyed, and its handle went to a new one.
void pretended_forget_stream(uint64_t stream) {
    auto& ids = machine().stream_ids;
    const unsigned long long fresh = ids.size() + 1'000'000;
    ids[{reinterpret_cast<cudaStream_t>(stream), context()}] = fresh;
}
void pretended_fail(const char* name, int status) {
    machine().failures[name] = status;
}
void pretended_delay(const char* name, int ms) {
    const Lock lock(machine().mutex);
    machine().delays[name] = ms;
}
int pretended_count(const char* name) {
    const Lock lock(machine().mutex);
    return machine().counts[name];
}
int pretended_current_device() {
    return current_device;
}
// Graphs and executables that were made and not destroyed.
int pretended_graphs() {
    const Lock lock(machine().mutex);
    return static_cast<int>(machine().graphs.size());
}
long long pretended_memory_bytes() {
    const Lock lock(machine().mutex);
    return static_cast<long long>(memory_bytes());
}

void pretended_capture(uint64_t stream, uint64_t graph) {
    const Lock lock(machine().mutex);
    machine().capturing[reinterpret_cast<cudaStream_t>(stream)] = {
        reinterpret_cast<cudaGraph_t>(graph), ++machine().captures, false};
}
// How many captures were begun since the process did, which is the last one's id.
int pretended_captures() {
    const Lock lock(machine().mutex);
    return static_cast<int>(machine().captures);
}
void pretended_set_captures(int captures) {
    const Lock lock(machine().mutex);
    machine().captures = static_cast<unsigned long long>(captures);
}
// A stream becomes a branch of what another one captures.
void pretended_join(uint64_t stream, uint64_t origin) {
    const Lock lock(machine().mutex);
    machine().capturing[reinterpret_cast<cudaStream_t>(stream)] =
        machine().capturing.at(reinterpret_cast<cudaStream_t>(origin));
}
void pretended_end_capture(uint64_t stream) {
    const Lock lock(machine().mutex);
    machine().capturing.erase(reinterpret_cast<cudaStream_t>(stream));
}
// An executable, or a clone, keeps what its graph does.
void pretended_instantiate(uint64_t graph, uint64_t executable) {
    const Lock lock(machine().mutex);
    auto& kept = machine().kept;
    auto& objects = kept[reinterpret_cast<cudaGraph_t>(executable)];
    for (UserObject* object : kept[reinterpret_cast<cudaGraph_t>(graph)]) {
        ++object->references;
        objects.push_back(object);
    }
}
void pretended_destroy(uint64_t graph) {
    const Lock lock(machine().mutex);
    auto& kept = machine().kept;
    const auto objects = kept[reinterpret_cast<cudaGraph_t>(graph)];
    kept.erase(reinterpret_cast<cudaGraph_t>(graph));
    for (UserObject* object : objects) release(object);
}

// Whether user objects are destroyed when a thread of the driver's gets to it, rather than at once.
void pretended_destroy_later(int later) {
    const Lock lock(machine().mutex);
    machine().destroys_later = later != 0;
    for (UserObject* object : std::exchange(machine().to_destroy, {})) destroy(object);
}

int pretended_smem_limit(uint64_t kernel) {
    return machine().smem_limits[kernel];
}
int pretended_launches() {
    const Lock lock(machine().mutex);
    return static_cast<int>(machine().launches.size());
}
const Launch* pretended_launch(int index) {
    const Lock lock(machine().mutex);
    return &machine().launches.at(index);
}
}
