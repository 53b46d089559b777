#include "mma_sync_backward/plan.h"

#include <algorithm>
#include <climits>

#include "backward/problem.h"

namespace flashsmith {
namespace {

constexpr uint32_t kRowsThreads = 256;

// Where the arguments of a program are. offsetof() is not defined for a derived struct.
constexpr size_t kProgramOffset = sizeof(BackwardKernelArgs);
static_assert(sizeof(BackwardProgramArgs) == kProgramOffset + sizeof(ProgramArgs));

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t { keys, second, prepare, gaps, sinks_kernel };

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
            {"dq_sums", bytes * static_cast<size_t>(config.d_head), Contents::undefined});

    BackwardProgramArgs all;
    std::memset(&all, 0, sizeof all);  // including padding: equal plans have equal bytes
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
    if (p.packed)
        add(gaps, blocks_of(p.total_q + p.total_k, kRowsThreads / kWarpSize), kRowsThreads, 0);
    // The kernel added last computes scores.
    const auto pass_program = [&] {
        if (!semantics.has_program()) return;
        plan.launches.back().argument_bytes = {argument, argument + sizeof all};
        add_program_addresses(plan.launches.back().addresses, first_read, kProgramOffset);
    };
    if (wants_keys || adds_dq) {
        add(keys, heads_k * blocks_of(p.seq_k, config.B_c), threads, config.keys_smem_bytes());
        pass_program();
    }
    if (adds_dq) {
        add(second, heads_q * blocks_of(p.seq_q, config.B_r), threads,
            config.B_r * config.d_head * config.element_bytes());
    } else if (wants_dq) {
        add(second, heads_q * blocks_of(p.seq_q, config.dq_rows()), threads,
            config.queries_smem_bytes());
        pass_program();
    }
    if (wants_sinks) add(sinks_kernel, p.heads_q, kRowsThreads, 0);

    plan.presence = backward_presence(tensors, semantics);
    return plan;
}

}  // namespace flashsmith
