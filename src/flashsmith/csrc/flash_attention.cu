// Look up, plan, launch. Nothing here depends on the configs of a library, so it is compiled once.
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "config_rules.cuh"
#include "driver_functions.h"
#include "launch_plan.cuh"
#include "workspaces.h"

namespace flashsmith {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int kWarp = 32;
constexpr int kElementBytes = 2;
constexpr size_t kMostArgumentBytes = 4096;
constexpr int kRowUnit = 8;  // elements of 16 bytes: rows begin and end at such
// Positions and window limits stay below it, so that sums of two fit an int.
constexpr int64_t kMaxLength = int64_t{1} << 30;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a refused launch must not surface in somebody else's next call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
}

// Makes a device current and, at the end, the one that was. A thread that has not called CUDA yet
// gets the device's context: encoding a tensor map needs one.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        changed_ = previous_ != device;
        if (changed_ || !has_context()) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~CurrentDevice() {
        if (changed_) cudaSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int previous_ = 0;
    bool changed_ = false;
};

class Event {
  public:
    Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

int32_t blocks_of(int64_t rows, int tile) {
    return static_cast<int32_t>((rows + tile - 1) / tile);
}

// Query heads whose K and V together take l2_group_mib, at least those of one K/V head; 1 where the
// config does not ask.
int32_t heads_per_group(const FlashForwardKernelConfig& config, const ForwardProblem& p) {
    if (config.l2_group_mib == 0) return 1;
    const int64_t head_bytes = std::max<int64_t>(1, 2 * p.seq_k * p.d * kElementBytes);
    const int64_t kv_heads =
        std::max<int64_t>(1, (int64_t{config.l2_group_mib} << 20) / head_bytes);
    return static_cast<int32_t>(std::min(kv_heads * (p.heads_q / p.heads_k), p.batch * p.heads_q));
}

void point_at(ForwardKernelArgs& args, const Addresses& at) {
    args.q = at.q;
    args.k = at.k;
    args.v = at.v;
    args.o = at.o;
    args.lse = at.lse;
    args.row_max = at.row_max;
    args.sinks = at.sinks;
    args.cu_seqlens_q = at.cu_seqlens_q;
    args.cu_seqlens_k = at.cu_seqlens_k;
}

bool is_packed(const Addresses& at) {
    return at.cu_seqlens_q != nullptr && at.cu_seqlens_k != nullptr;
}

void check_kind(const Addresses& at, const Semantics& semantics) {
    require(is_packed(at) == semantics.packed,
            "packed: this library's kernels are for the other kind");
}

}  // namespace

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

ForwardKernelArgs forward_arguments(const ForwardProblem& p, int B_r, int B_c) {
    ForwardKernelArgs args;
    std::memset(&args, 0, sizeof args);  // padding too: equal plans have equal bytes
    point_at(args, p.at);
    args.q_batch_stride = p.q.batch;
    args.q_seq_stride = p.q.seq;
    args.q_head_stride = p.q.head;
    args.k_batch_stride = p.k.batch;
    args.k_seq_stride = p.k.seq;
    args.k_head_stride = p.k.head;
    args.v_batch_stride = p.v.batch;
    args.v_seq_stride = p.v.seq;
    args.v_head_stride = p.v.head;
    args.o_batch_stride = p.o.batch;
    args.o_seq_stride = p.o.seq;
    args.o_head_stride = p.o.head;
    const bool packed = is_packed(p.at);
    args.lse_batch_stride = packed ? 0 : p.heads_q * p.seq_q;
    args.lse_head_stride = packed ? p.total_q : p.seq_q;
    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.seq_k = static_cast<int32_t>(p.seq_k);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.total_k = static_cast<int32_t>(p.total_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.d = static_cast<int32_t>(p.d);
    args.n_Q_blocks = blocks_of(p.seq_q, B_r);
    args.n_KV_blocks = blocks_of(p.seq_k, B_c);
    args.window_left = static_cast<int32_t>(std::min(p.window_left, kMaxLength));
    args.window_right = static_cast<int32_t>(std::min(p.window_right, kMaxLength));
    args.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
    args.softcap_scale_2log2e = p.softcap > 0 ? 2 * kLog2E * (p.scale / p.softcap) : 0.0f;
    return args;
}

void check_problem(const ForwardProblem& p, const Semantics& semantics, int d_head, int B_r) {
    const auto length = [](int64_t x) { return x >= 0 && x < kMaxLength; };
    const auto count = [](int64_t x) { return x > 0 && x <= INT_MAX; };
    require(length(p.seq_q) && length(p.seq_k), "lengths must be between 0 and 2^30 - 1");
    require(p.batch >= 0 && p.batch <= INT_MAX && p.total_q >= 0 && p.total_q <= INT_MAX &&
                p.total_k >= 0 && p.total_k <= INT_MAX,
            "batch and total lengths must be between 0 and 2^31 - 1");
    require(count(p.heads_q) && count(p.heads_k) && p.heads_q % p.heads_k == 0,
            "heads_q must be a multiple of heads_k");
    require(p.d > 0 && p.d <= d_head && p.d % kRowUnit == 0,
            "d is " + std::to_string(p.d) + "; the config serves multiples of 8 up to " +
                std::to_string(d_head));

    check_kind(p.at, semantics);
    require((p.softcap > 0) == semantics.softcap,
            "softcap: this library's kernels lack or need one");
    require(p.window_left >= 0 && p.window_right >= 0, "window limits must not be negative");
    const bool left = p.window_left < kUnlimited, right = p.window_right < kUnlimited;
    switch (semantics.mask) {
        case MaskKind::none:
            require(!left && !right, "mask: this library's kernels have none");
            break;
        case MaskKind::causal:
            require(!left && p.window_right == 0, "mask: this library's kernels are causal");
            break;
        case MaskKind::window:
            break;
    }
    // Two steps, so that no product can overflow.
    const int64_t sequences = p.batch * p.heads_q;
    require(sequences <= INT_MAX && sequences * blocks_of(p.seq_q, B_r) <= INT_MAX,
            "batch x heads x Q blocks must stay within 2^31 - 1");
}

LaunchPlan plan_launch(const FlashForwardKernelConfig& config, const ForwardProblem& p,
                       const DeviceSpec& device, const Semantics& semantics) {
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    require(config.smem_bytes() <= device.max_smem_per_block,
            "the config needs " + std::to_string(config.smem_bytes()) +
                " bytes of shared memory, the device allows " +
                std::to_string(device.max_smem_per_block));
    check_problem(p, semantics, config.d_head, config.B_r);
    if (!semantics.uneven)
        require(p.d == config.d_head && p.seq_q % config.B_r == 0 && p.seq_k % config.B_c == 0 &&
                    p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    ForwardKernelArgs args = forward_arguments(p, config.B_r, config.B_c);
    args.heads_per_group = heads_per_group(config, p);
    LaunchPlan plan{};
    const int64_t blocks = p.batch * p.heads_q * args.n_Q_blocks;
    plan.grid = {static_cast<uint32_t>(blocks), 1, 1};
    plan.cluster = {1, 1, 1};
    plan.block = {static_cast<uint32_t>(config.n_warps * kWarp), 1, 1};
    plan.smem_bytes = config.smem_bytes();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    plan.argument_bytes.assign(bytes, bytes + sizeof args);
    return plan;
}

LaunchPlan plan_forward(const KernelConfig& config, const ForwardProblem& problem,
                        const DeviceSpec& device) {
    const auto found = kernel_map().find(config);
    require(found != kernel_map().end(), "the config is not in this kernel library");
    LaunchPlan plan = std::visit(
        [&](const auto& cfg) { return plan_launch(cfg, problem, device, kernel_semantics()); },
        config);
    plan.config = config;
    plan.kernel = found->second;
    return plan;
}

void PreparedLaunch::raise_smem_limit() const {
    if (smem_limit_raised_.load(std::memory_order_relaxed)) return;
    check(cudaFuncSetAttribute(plan_.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               plan_.smem_bytes),
          "raising the kernel's shared-memory limit");
    smem_limit_raised_.store(true, std::memory_order_relaxed);
}

void PreparedLaunch::launch_on_current_device(const Addresses& at, void* stream) const {
    if (plan_.grid[0] == 0) return;  // no rows: CUDA refuses an empty grid, and nothing is asked
    alignas(64) uint8_t arguments[kMostArgumentBytes];
    std::memcpy(arguments, plan_.argument_bytes.data(), plan_.argument_bytes.size());
    point_at(*reinterpret_cast<ForwardKernelArgs*>(arguments + plan_.problem_offset), at);
    encoded_.write(at, arguments);
    std::optional<Workspace> workspace;  // until after the launch
    if (plan_.workspace_bytes > 0) {
        void* address = workspace.emplace(plan_.workspace_bytes, stream).address();
        std::memcpy(arguments + plan_.workspace_offset, &address, sizeof address);
    }
    raise_smem_limit();
    void* parameters[] = {arguments};
    const auto dim = [](const std::array<uint32_t, 3>& x) { return dim3(x[0], x[1], x[2]); };
    if (plan_.cluster == std::array<uint32_t, 3>{1, 1, 1}) {
        check(cudaLaunchKernel(plan_.kernel, dim(plan_.grid), dim(plan_.block), parameters,
                               plan_.smem_bytes, static_cast<cudaStream_t>(stream)),
              "cudaLaunchKernel");
        return;
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {plan_.cluster[0], plan_.cluster[1], plan_.cluster[2]};
    cudaLaunchConfig_t config{};
    config.gridDim = dim(plan_.grid);
    config.blockDim = dim(plan_.block);
    config.dynamicSmemBytes = plan_.smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    check(cudaLaunchKernelExC(&config, plan_.kernel, parameters), "cudaLaunchKernelExC");
}

void PreparedLaunch::launch(const Addresses& at, void* stream) const {
    check_kind(at, kernel_semantics());
    const CurrentDevice current(device_);
    launch_on_current_device(at, stream);
}

float PreparedLaunch::launch_timed(const Addresses& at, void* stream) const {
    check_kind(at, kernel_semantics());
    const CurrentDevice current(device_);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const Event start, stop;
    check(cudaEventRecord(start.get(), cuda_stream), "cudaEventRecord");
    launch_on_current_device(at, stream);
    check(cudaEventRecord(stop.get(), cuda_stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop.get()), "the kernel");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()), "cudaEventElapsedTime");
    return milliseconds;
}

}  // namespace flashsmith
