// The mma.sync family's part of planning: the grid and the arguments.
#include <algorithm>
#include <string>

#include "host/launch_plan.h"
#include "mma_sync/flash_attention.cuh"

namespace flashsmith {
namespace {

constexpr int kWarp = 32;
constexpr int kElementBytes = 2;

// Query heads whose K and V together take l2_group_mib, at least those of one K/V head; 1 where the
// config does not ask.
int32_t heads_per_group(const FlashForwardKernelConfig& config, const ForwardProblem& p) {
    if (config.l2_group_mib == 0) return 1;
    const int64_t head_bytes = std::max<int64_t>(1, 2 * p.seq_k * p.d * kElementBytes);
    const int64_t kv_heads =
        std::max<int64_t>(1, (int64_t{config.l2_group_mib} << 20) / head_bytes);
    return static_cast<int32_t>(std::min(kv_heads * (p.heads_q / p.heads_k), p.batch * p.heads_q));
}

}  // namespace

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

}  // namespace flashsmith
