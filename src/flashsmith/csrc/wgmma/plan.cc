#include "wgmma/plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/canonical_sizes.cuh"
#include "host/forward_problem.h"
#include "host/program_arguments.h"
#include "sm90/copied_tensor.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;
// The offset of a program's arguments, in bytes.
constexpr size_t kProgramOffset = sizeof(HopperForwardKernelArgs);
static_assert(sizeof(HopperProgramArgs) ==
              (kProgramOffset + sizeof(ProgramArgs) + alignof(TensorMap) - 1) / alignof(TensorMap) *
                  alignof(TensorMap));

// The stride from batch to batch in rows, when the tensor is viewed as one sequence of rows.
// Strides allow this view, for example, if k and v are views of one tensor.
int64_t rows_of_batches(const char* name, const Strides& strides, const ForwardProblem& p) {
    if (p.packed || p.batch <= 1) return 0;
    if (p.seq_k <= 1) return 1;
    require(strides.seq > 0 && strides.batch % strides.seq == 0,
            std::string(name) + ": its batch stride is " + std::to_string(strides.batch) +
                " elements, no multiple of its row stride, " + std::to_string(strides.seq) +
                "; make it contiguous, or take a config of the mma.sync family");
    return strides.batch / strides.seq;
}

// Describes k or v as one sequence: the rows of all batches, one batch after another. It is used if
// a call may read only some of a sequence's keys (`k_begin`, `seqused_k`).
CopiedTensor as_one_sequence(CopiedTensor tensor, const ForwardProblem& p) {
    const int64_t step = rows_of_batches(tensor.name, tensor.strides, p);
    if (p.seq_k <= 1) tensor.strides.seq = tensor.strides.batch;
    tensor.total = (p.batch - 1) * step + p.seq_k;
    require(tensor.total <= INT_MAX,
            std::string(tensor.name) + ": rows of all batches must stay within 2^31 - 1");
    return tensor;
}

std::vector<TensorMapSpec> tensor_maps(const WgmmaForwardKernelConfig& config,
                                       const ForwardProblem& p, const Semantics& semantics) {
    using Args = HopperForwardKernelArgs;
    using Order = ForwardTensor;
    const int kv_rows = config.B_c / config.cluster_size;  // rows of a tile that one CTA loads
    const auto group = static_cast<int>(config.pack_gqa ? p.heads_q / p.heads_k : 0);
    const CopiedTensor tensors[] = {
        {"q", Order::q, offsetof(Args, q), p.q, p.seq_q, p.heads_q, p.total_q, kWarpgroupRows,
         group},
        {"k", Order::k, offsetof(Args, k), p.k, p.seq_k, p.heads_k, p.total_k, kv_rows},
        {"v", Order::v, offsetof(Args, v), p.v, p.seq_k, p.heads_k, p.total_k, kv_rows, 0, false,
         p.d_v},
        {"o", Order::o, offsetof(Args, o), p.o, p.seq_q, p.heads_q, p.total_q, kWarpRows,
         std::min(group, kWarpRows), false, p.d_v},
    };
    std::vector<TensorMapSpec> maps;
    for (const CopiedTensor& tensor : tensors) {
        if (semantics.partial && tensor.index == Order::o) continue;
        const bool is_keys = tensor.index == Order::k || tensor.index == Order::v;
        const bool packs = is_keys ? packs_keys(semantics) : semantics.packed;
        CopiedTensor copied = tensor;
        if (tensor.is_empty(p, semantics.packed))
            copied = single_row(tensor, Order::q);
        else if (packs && !semantics.packed)
            copied = as_one_sequence(tensor, p);
        maps.push_back(tensor_map(config.d_head, config.dtype, p, packs, copied));
    }
    return maps;
}

// Exact for dividends below 2^31 (Granlund and Montgomery's round-up form). A divisor of 0, in an
// empty problem, is never used and is replaced by 1.
Reciprocal divide_by(int64_t divisor) {
    divisor = std::max<int64_t>(1, divisor);
    uint32_t shift = 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    const uint64_t rest = (uint64_t{1} << shift) - divisor;
    const auto multiplier = static_cast<uint32_t>((rest << 32) / divisor + 1);
    return {static_cast<uint32_t>(divisor), multiplier, shift};
}

// Query heads per group: as many as use at most section_mib of K and V. Groups are as even as
// possible: if the last group had few heads, most SMs would be idle during its longest tiles.
int64_t heads_per_group(const WgmmaForwardKernelConfig& config, const ForwardProblem& p) {
    const int64_t columns = config.d_head + config.d_head_v();
    const int64_t bytes = std::max<int64_t>(1, p.seq_k) * columns * kElementBytes;
    const int64_t most = std::max<int64_t>(1, (int64_t{config.section_mib} << 20) / bytes);
    const int64_t kv_heads = std::max<int64_t>(1, p.batch * p.heads_k);
    const int64_t groups = (kv_heads + most - 1) / most;
    return (kv_heads + groups - 1) / groups * (p.heads_q / p.heads_k);
}

// Checks that a warpgroup's rows are whole tokens.
void check_group(const ForwardProblem& p) {
    const int64_t group = p.heads_q / p.heads_k;
    require(kWarpgroupRows % group == 0,
            "pack_gqa: heads_q / heads_k is " + std::to_string(group) +
                "; a warpgroup's 64 rows take groups of 1, 2, 4, 8, 16, 32 or 64 heads; take a "
                "config without pack_gqa, or one of the mma.sync family");
}

// The number of a head's tiles that have fewer rows than the others: see tile_rows().
int64_t short_tiles(const WgmmaForwardKernelConfig& config, int64_t seq_q) {
    const int64_t rest = (seq_q + kWarpgroupRows - 1) / kWarpgroupRows % config.n_warpgroups;
    if (rest == 0) return 0;
    return rest == config.n_warpgroups - 1 ? 1 : 2;
}

// Chooses the last heads, whose short tiles come at the end: a third as many heads as tiles run at
// once.
void set_last_heads(HopperForwardKernelArgs& args, const WgmmaForwardKernelConfig& config,
                    const ForwardProblem& p, const Semantics& semantics, int64_t at_once) {
    const int64_t of_head = args.tiles_per_head.divisor, all_heads = p.batch * p.heads_q;
    const int64_t shorts = short_tiles(config, p.seq_q), longs = of_head - shorts;
    const bool keeps_back = keeps_short_tiles_back(config, semantics) && shorts > 0 && longs > 0;
    const int64_t heads = keeps_back ? std::min(all_heads, at_once / 3) : 0;
    args.long_tiles = static_cast<int32_t>(longs);
    args.first_of_last_heads = static_cast<int32_t>((all_heads - heads) * of_head);
    args.first_short_tile = static_cast<int32_t>(args.first_of_last_heads + heads * longs);
}

// Sets the tiles, each of which one cluster computes. `at_once` tiles run at the same time. Returns
// the number of tiles that are computed in parts of their keys.
int64_t set_tiles(HopperForwardKernelArgs& args, const WgmmaForwardKernelConfig& config,
                  const ForwardProblem& problem, const Semantics& semantics, int64_t at_once) {
    const ForwardProblem p = in_rows(problem, config.pack_gqa);
    args.problem.n_Q_blocks = tiles_of(p.seq_q, config.B_r);
    const int64_t of_head =
        (args.problem.n_Q_blocks + config.cluster_size - 1) / config.cluster_size;
    const int64_t heads = heads_per_group(config, p);
    const int64_t tiles = p.batch * p.heads_q * of_head;
    int64_t parts =
        std::min<int64_t>(config.n_warpgroups, (p.seq_q + kWarpgroupRows - 1) / kWarpgroupRows);
    int64_t split = splits_last_tiles(config, semantics) ? tiles % at_once : 0;
    if (parts == 1 || split * parts > at_once) split = 0;
    if (config.split_keys > 0) {
        parts = config.split_keys;
        const int tokens = tokens_of(config.B_r, problem, config.pack_gqa);
        split = tiles_to_split(problem, semantics, parts, tokens, config.B_c, tiles, at_once);
        set_parts(args.problem, split, config.split_keys, config.B_r);
    }
    args.n_whole_tiles = static_cast<int32_t>(tiles - split);
    args.parts_per_tile = divide_by(parts);
    args.n_tiles = static_cast<int32_t>(tiles - split + split * parts);
    args.tiles_per_head = divide_by(of_head);
    set_last_heads(args, config, p, semantics, at_once);
    args.heads_q = divide_by(p.heads_q);
    args.heads_per_kv_head = divide_by(problem.heads_q / problem.heads_k);
    args.heads_per_group = divide_by(heads);
    args.tiles_per_group = divide_by(heads * of_head);
    return config.split_keys > 0 ? split : 0;
}

}  // namespace

Plan plan_forward(const WgmmaForwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                  const DeviceSpec& device, const Semantics& semantics) {
    const ForwardProblem p = read_forward_problem(numbers, tensors);
    require(device.arch == kArch, "wgmma kernels run on compute capability 9.0 only");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, config.B_r, config.d_v);
    if (config.pack_gqa) check_group(p);
    require(config.canonical == 0 ||
                canonical_tile(static_cast<int>(p.d), kArch, static_cast<int>(p.d_v)) == config.B_c,
            "canonical: this d needs different tiles; use a config with a matching d_head");
    if (!semantics.uneven)
        require(p.d == config.d_head && p.d_v == config.d_head_v() && p.seq_k % config.B_c == 0 &&
                    p.seq_k > 0,
                "uneven: this library's kernels want whole K/V tiles and d = d_head");

    HopperProgramArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    const size_t argument_bytes = semantics.has_program() ? sizeof args : kProgramOffset;
    args.problem = forward_arguments(p, config.B_r, config.B_c);
    args.problem.d = static_cast<int32_t>(p.d_v);
    if (semantics.partial) {
        // Replaces the strides, which no kernel of this family reads.
        args.problem.k_batch_stride = rows_of_batches("k", p.k, p);
        args.problem.v_batch_stride = rows_of_batches("v", p.v, p);
    }
    if (semantics.has_program()) {
        args.program = read_program(numbers);
        scale_for_program(args.problem, args.program, semantics,
                          p.softcap > 0 ? p.softcap : p.scale);
    }
    const int64_t at_once = int64_t{device.sm_count} * config.ctas_per_sm / config.cluster_size;
    const int64_t split_tiles = set_tiles(args, config, p, semantics, at_once);

    using Args = HopperForwardKernelArgs;
    const int64_t clusters = config.schedule == Schedule::one_tile
                                 ? args.n_tiles
                                 : std::min<int64_t>(args.n_tiles, at_once);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = 0,
        .grid = {static_cast<uint32_t>(clusters * config.cluster_size), 1, 1},
        .cluster = {static_cast<uint32_t>(config.cluster_size), 1, 1},
        .block = {static_cast<uint32_t>(config.n_threads()), 1, 1},
        .smem_bytes = static_cast<int>(config.smem_bytes()),
        .argument_bytes = {bytes, bytes + argument_bytes},
        .addresses = forward_addresses(semantics, offsetof(Args, problem)),
        .tensor_maps = {},
    };
    if (semantics.has_program())
        add_program_addresses(launch.addresses, ForwardTensor::first_read, kProgramOffset);
    std::vector<Workspace> workspaces;
    if (config.schedule == Schedule::dynamic) {
        workspaces.push_back({"tile_counter", sizeof(uint32_t), Contents::kept_zero});
        launch.addresses.push_back({offsetof(Args, tile_counter), in_workspace(0)});
    }
    // A single chunk needs no workspace: its state covers all keys.
    if (config.canonical > 0 && p.seq_k > kCanonicalChunk) {
        launch.addresses.push_back({offsetof(Args, problem) + offsetof(ForwardKernelArgs, parts),
                                    in_workspace(workspaces.size())});
        workspaces.push_back(
            {"running_states",
             static_cast<size_t>(clusters * config.cluster_size * config.consumers() *
                                 config.running_state_bytes()),
             Contents::undefined});
    }
    if (args.n_tiles > 0) launch.tensor_maps = tensor_maps(config, p, semantics);
    Plan plan{{std::move(launch)}, std::move(workspaces), forward_presence(semantics)};
    add_merge(plan, offsetof(Args, problem), split_tiles, config.split_keys, config.B_r,
              config.d_head_v());
    if (semantics.program_masks)
        add_lists(plan, 1,
                  number_of_lists(semantics, p.batch, p.heads_q, args.tiles_per_head.divisor),
                  args.problem.n_KV_blocks, kProgramOffset);
    return plan;
}

}  // namespace flashsmith
