#include "mma_sync_backward/plan.h"

#include <algorithm>
#include <climits>

#include "backward/problem.h"

namespace flashsmith {
namespace {

constexpr uint32_t kRowsThreads = 256;

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t {
    keys,
    second,
    prepare,
    gaps,
    sinks_kernel,
    list_queries,  // with the mask of a program; each is followed by one that compacts its lists
    compact_queries,
    list_keys,  // unless atomics
    compact_keys,
};

}  // namespace

Plan plan_backward(const FlashBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics) {
    auto [p, args, program] = read_backward_problem(numbers, tensors, semantics);
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, kStatisticsRows, config.d_v);
    if (config.d_v > 0) args.widths = {static_cast<int16_t>(p.d), static_cast<int16_t>(p.d_v)};
    if (!semantics.uneven)
        require(p.d == config.d_head && p.d_v == config.d_head_v() &&
                    p.seq_q % std::max(config.B_r, config.dq_rows()) == 0 &&
                    p.seq_k % std::max(config.B_r, config.B_c) == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    const bool wants_dq = tensors[dq] != 0, wants_keys = tensors[dk] != 0 || tensors[dv] != 0;
    const bool wants_sinks = tensors[dsinks] != 0;
    require(!wants_sinks || tensors[sinks] != 0, "dsinks: requested without sinks; pass sinks");

    const bool adds_dq = config.dq == DqMode::atomics && wants_dq;
    const Statistics statistics = place_statistics(p, args);
    const size_t bytes = static_cast<size_t>(statistics.rows) * sizeof(float);
    Plan plan;
    plan.workspaces = {{"lse_log2", bytes, Contents::undefined}, {"D", bytes, Contents::undefined}};
    if (adds_dq)
        plan.workspaces.push_back(
            {"dq_sums", bytes * static_cast<size_t>(config.dq_sum_columns()), Contents::undefined});

    BackwardProgramArgs all;
    std::memset(&all, 0, sizeof all);  // zeroes padding too: equal plans have equal bytes
    static_cast<BackwardKernelArgs&>(all) = args;
    all.program = program;
    const auto* argument = reinterpret_cast<const uint8_t*>(&all);
    const auto add = [&](Kernel kernel, int64_t blocks, uint32_t threads, int smem_bytes) {
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        plan.launches.push_back({
            .kernel = kernel,
            .grid = {static_cast<uint32_t>(blocks), 1, 1},
            .cluster = {1, 1, 1},
            .block = {threads, 1, 1},
            .smem_bytes = smem_bytes,
            .argument_bytes = {argument, argument + sizeof args},
            .addresses = backward_addresses(adds_dq),
            .tensor_maps = {},
        });
    };
    const int64_t heads_q = p.batch * p.heads_q, heads_k = p.batch * p.heads_k;
    const uint32_t threads = static_cast<uint32_t>(config.n_warps * kWarpSize);
    add(prepare, heads_q * blocks_of(p.seq_q, kStatisticsRows), kRowsThreads, 0);
    pass_program_to_prepare(plan.launches.back(), program, semantics);
    if (p.packed)
        add(gaps, blocks_of(p.total_q + p.total_k, kRowsThreads / kWarpSize), kRowsThreads, 0);
    // Passes the program to the kernel added last, which computes scores.
    const auto pass_program = [&] {
        if (!semantics.has_program()) return;
        plan.launches.back().argument_bytes = {argument, argument + sizeof all};
        add_program_addresses(plan.launches.back().addresses, first_read, kAfterProblem);
    };
    // Adds the lists of the blocks that the kernel added last visits.
    const auto visit_lists = [&](Kernel list, int64_t rows, int64_t tile, int64_t others,
                                 int64_t block) {
        if (!semantics.program_masks) return;
        const int64_t n_blocks = blocks_of(others, block);
        const int64_t lists = number_of_lists(semantics, p.batch, p.heads_q, blocks_of(rows, tile));
        add_lists(plan, args, program, {{list, lists * n_blocks}, {size_t{list} + 1, lists}},
                  lists * (kBlockListHeader + n_blocks), kAfterProblem);
    };
    if (wants_keys || adds_dq) {
        add(keys, heads_k * blocks_of(p.seq_k, config.B_c), threads, config.keys_smem_bytes());
        pass_program();
        visit_lists(list_queries, p.seq_k, config.B_c, p.seq_q, config.B_r);
    }
    if (adds_dq) {
        add(second, heads_q * blocks_of(p.seq_q, config.B_r), threads,
            config.B_r * tile_columns(config.d_head) * config.element_bytes());
    } else if (wants_dq) {
        add(second, heads_q * blocks_of(p.seq_q, config.dq_rows()), threads,
            config.queries_smem_bytes());
        pass_program();
        visit_lists(list_keys, p.seq_q, config.dq_rows(), p.seq_k, config.B_r);
    }
    if (wants_sinks) add(sinks_kernel, p.heads_q, kRowsThreads, 0);

    plan.presence = backward_presence(tensors, semantics);
    return plan;
}

}  // namespace flashsmith
