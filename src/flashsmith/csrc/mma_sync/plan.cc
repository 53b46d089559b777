#include "mma_sync/plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/canonical_sizes.cuh"
#include "host/forward_problem.h"
#include "host/program_arguments.h"

namespace flashsmith {
namespace {

// Query heads per group: as many as use at most l2_group_mib of K and V, but at least the heads of
// one K/V head. 1 if the config does not group heads.
int32_t heads_per_group(const FlashForwardKernelConfig& config, const ForwardProblem& p) {
    if (config.l2_group_mib == 0) return 1;
    const int64_t head_bytes = std::max<int64_t>(1, p.seq_k * (p.d + p.d_v) * kElementBytes);
    const int64_t kv_heads =
        std::max<int64_t>(1, (int64_t{config.l2_group_mib} << 20) / head_bytes);
    return static_cast<int32_t>(std::min(kv_heads * (p.heads_q / p.heads_k), p.batch * p.heads_q));
}

// CTAs on an SM, estimated without the kernel's register count. A thread may have 255 registers,
// and an SM has enough for eight such warps.
int64_t ctas_per_sm(const FlashForwardKernelConfig& config, const DeviceSpec& device) {
    const int by_registers = std::max({1, 8 / config.n_warps, config.min_ctas_per_sm});
    return std::clamp(config.num_ctas_per_sm(device.max_smem_per_sm), 1, by_registers);
}

}  // namespace

Plan plan_forward(const FlashForwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                  const DeviceSpec& device, const Semantics& semantics) {
    const ForwardProblem p = read_forward_problem(numbers, tensors);
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, config.B_r, config.d_v);
    require(config.canonical == 0 || canonical_tile(static_cast<int>(p.d), device.arch,
                                                    static_cast<int>(p.d_v)) == config.B_c,
            "canonical: this d needs different tiles; use a config with a matching d_head");
    const ForwardProblem rows = in_rows(p, config.pack_gqa);
    if (!semantics.uneven)
        require(p.d == config.d_head && p.d_v == config.d_head_v() &&
                    rows.seq_q % config.B_r == 0 && p.seq_k % config.B_c == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    ForwardProgramArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    static_cast<ForwardKernelArgs&>(args) = forward_arguments(p, config.B_r, config.B_c);
    if (config.d_v > 0) args.widths = {static_cast<int16_t>(p.d), static_cast<int16_t>(p.d_v)};
    constexpr size_t kProgramOffset = sizeof(ForwardKernelArgs);
    static_assert(sizeof args == kProgramOffset + sizeof(ProgramArgs));
    if (semantics.has_program()) {
        args.program = read_program(numbers);
        scale_for_program(args, args.program, semantics, p.softcap > 0 ? p.softcap : p.scale);
    }
    if (config.pack_gqa) args.n_Q_blocks = tiles_of(rows.seq_q, config.B_r);
    args.heads_per_group = heads_per_group(config, rows);
    int64_t blocks = p.batch * rows.heads_q * args.n_Q_blocks, split = 0;
    if (config.split_keys > 0) {
        const int64_t at_once = int64_t{device.sm_count} * ctas_per_sm(config, device);
        split =
            tiles_to_split(p, semantics, config.split_keys,
                           tokens_of(config.B_r, p, config.pack_gqa), config.B_c, blocks, at_once);
        set_parts(args, split, config.split_keys, config.B_r);
        args.n_whole_tiles = static_cast<int32_t>(blocks - split);
        blocks += split * (config.split_keys - 1);
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = 0,
        .grid = {static_cast<uint32_t>(blocks), 1, 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(config.n_threads()), 1, 1},
        .smem_bytes = config.smem_bytes(),
        .argument_bytes = {bytes, bytes + (semantics.has_program() ? sizeof args : kProgramOffset)},
        .addresses = forward_addresses(semantics),
        .tensor_maps = {},
    };
    if (semantics.has_program())
        add_program_addresses(launch.addresses, ForwardTensor::first_read, kProgramOffset);
    Plan plan{{std::move(launch)}, {}, forward_presence(semantics)};
    add_merge(plan, 0, split, config.split_keys, config.B_r, config.d_head_v());
    if (semantics.program_masks)
        add_lists(plan, 1, number_of_lists(semantics, p.batch, p.heads_q, args.n_Q_blocks),
                  args.n_KV_blocks, kProgramOffset);
    return plan;
}

}  // namespace flashsmith
