#include "wgmma_backward/plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>

#include "backward/problem.h"
#include "wgmma_dq/tensor_maps.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;
constexpr uint32_t kRowsThreads = 256;

// The offset of a program's arguments. offsetof() is not defined for a derived struct.
constexpr size_t kProgramOffset = sizeof(HopperBackwardKernelArgs);
static_assert(sizeof(HopperBackwardProgramArgs) ==
              (kProgramOffset + sizeof(ProgramArgs) + alignof(TensorMap) - 1) / alignof(TensorMap) *
                  alignof(TensorMap));

// The kernels of a config, in the order of the family's templates. There is no finish kernel with
// without_dq; with separate_dq, the kernel that computes dq takes its place.
enum Kernel : size_t {
    main_kernel,
    finish,
    dq_kernel = finish,
    prepare,
    gaps,
    sinks_kernel,
    list_blocks,
    compact_lists,
    rank_blocks,  // with ordered_dq
};

// Adds the launches that write the lists of blocks of queries.
void add_lists(Plan& plan, const WgmmaBackwardKernelConfig& config, const ForwardProblem& p,
               const BackwardKernelArgs& args, const ProgramArgs& program,
               const Semantics& semantics) {
    const int64_t rows = blocks_of(p.seq_q, config.B_r);
    const int64_t sets = number_of_lists(semantics, p.batch, p.heads_q, 1);
    const int64_t lists = sets * blocks_of(p.seq_k, config.B_c);
    const int64_t ints = lists * (kBlockListHeader + rows);
    const auto index = [&](Kernel kernel) { return kernel - config.without_dq; };
    if (config.ordered_dq)
        flashsmith::add_lists(plan, args, program,
                              {{index(list_blocks), lists * rows},
                               {index(rank_blocks), blocks_of(sets * rows, kWarpSize)},
                               {index(compact_lists), lists}},
                              ints + (lists + sets) * rows,  // see BlockRanks
                              kProgramOffset);
    else
        flashsmith::add_lists(plan, args, program,
                              {{index(list_blocks), lists * rows}, {index(compact_lists), lists}},
                              ints, kProgramOffset);
}

}  // namespace

Plan plan_backward(const WgmmaBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics) {
    auto [p, args, program] = read_backward_problem(numbers, tensors, semantics);
    require(device.arch == kArch, "wgmma kernels run on compute capability 9.0 only");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, kStatisticsRows, config.d_v);
    if (config.d_v > 0) args.widths = {static_cast<int16_t>(p.d), static_cast<int16_t>(p.d_v)};
    if (!semantics.uneven)
        require(p.d == config.d_head && p.d_v == config.d_head_v() && p.seq_q % config.B_r == 0 &&
                    p.seq_k % config.cluster_keys() == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    const bool wants_sinks = tensors[dsinks] != 0;
    require(!wants_sinks || tensors[sinks] != 0, "dsinks: requested without sinks; pass sinks");
    const bool has_dq = !config.without_dq, sums_dq = has_dq && !config.separate_dq;
    const WgmmaDqKernelConfig of_dq = config.of_dq_kernel();
    if (config.separate_dq) {
        check_smem(config.dq_smem_bytes(), device);
        if (!semantics.uneven)
            require(p.seq_q % of_dq.B_r == 0 && p.seq_k % of_dq.B_c == 0,
                    "uneven: the kernel of dq in this library wants whole tiles");
    }
    require(has_dq || tensors[dq] == 0, "dq: this kernel computes dk and dv; take another config");

    const Statistics statistics = place_statistics(p, args);
    const size_t bytes = static_cast<size_t>(statistics.rows) * sizeof(float);
    Plan plan;
    plan.workspaces = {{"lse_log2", bytes, Contents::undefined}, {"D", bytes, Contents::undefined}};
    if (sums_dq) {
        const size_t blocks = bytes / static_cast<size_t>(config.B_r);
        plan.workspaces.push_back({"dq_sums",
                                   blocks * static_cast<size_t>(config.dq_block_floats()),
                                   Contents::undefined});
    }

    const auto add = [&](Kernel kernel, int64_t blocks, uint32_t threads) {
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        const auto* argument = reinterpret_cast<const uint8_t*>(&args);
        plan.launches.push_back({
            .kernel = kernel - (!has_dq && kernel > finish),
            .grid = {static_cast<uint32_t>(blocks), 1, 1},
            .cluster = {1, 1, 1},
            .block = {threads, 1, 1},
            .smem_bytes = 0,
            .argument_bytes = {argument, argument + sizeof args},
            .addresses = backward_addresses(sums_dq),
            .tensor_maps = {},
        });
    };
    const int64_t heads_q = p.batch * p.heads_q, heads_k = p.batch * p.heads_k;
    add(prepare, heads_q * blocks_of(p.seq_q, kStatisticsRows), kRowsThreads);
    pass_program_to_prepare(plan.launches.back(), program, semantics);
    if (p.packed)
        add(gaps, blocks_of(p.total_q + p.total_k, kRowsThreads / kWarpSize), kRowsThreads);
    const bool has_keys = p.packed ? p.total_k > 0 : p.seq_k > 0;
    const bool wants_sums = sums_dq && tensors[dq] != 0;
    if (has_keys && (wants_sums || tensors[dk] != 0 || tensors[dv] != 0)) {
        using Args = HopperBackwardKernelArgs;
        HopperBackwardProgramArgs main_args;
        std::memset(&main_args, 0, sizeof main_args);  // including padding: equal plans have equal
                                                       // bytes
        main_args.program = program;
        main_args.problem = args;
        const int64_t blocks = heads_k * blocks_of(p.seq_k, config.cluster_keys());
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        main_args.n_key_blocks = static_cast<uint32_t>(blocks);
        add(main_kernel,
            config.persistent ? std::min<int64_t>(blocks, device.sm_count)
                              : blocks * config.cluster_size(),
            static_cast<uint32_t>(config.n_threads()));
        Launch& launch = plan.launches.back();
        launch.cluster[0] = static_cast<uint32_t>(config.cluster_size());
        launch.smem_bytes = static_cast<int>(config.smem_bytes());
        const auto* argument = reinterpret_cast<const uint8_t*>(&main_args);
        launch.argument_bytes = {
            argument, argument + (semantics.has_program() ? sizeof main_args : sizeof(Args))};
        for (AddressPatch& patch : launch.addresses)
            patch.argument_offset += offsetof(Args, problem);
        if (semantics.has_program())
            add_program_addresses(launch.addresses, first_read, kProgramOffset);
        if (config.persistent) {
            launch.addresses.push_back(
                {offsetof(Args, key_block_counter), in_workspace(plan.workspaces.size())});
            plan.workspaces.push_back({"key_block_counter", sizeof(uint32_t), Contents::kept_zero});
        }
        launch.tensor_maps = gradient_tensor_maps<Args>(config, p, args, k);
        if (semantics.program_masks) add_lists(plan, config, p, args, program, semantics);
    }
    if (wants_sums)
        add(finish, heads_q * blocks_of(p.seq_q, config.B_r),
            static_cast<uint32_t>(config.dq_parts() * kWarpgroupThreads));
    if (config.separate_dq && tensors[dq] != 0) {
        add(dq_kernel, heads_q * blocks_of(p.seq_q, of_dq.B_r),
            static_cast<uint32_t>(of_dq.n_threads()));
        HopperDqKernelArgs dq_args;
        std::memset(&dq_args, 0, sizeof dq_args);  // including padding
        dq_args.problem = args;
        Launch& launch = plan.launches.back();
        launch.smem_bytes = static_cast<int>(of_dq.smem_bytes());
        const auto* argument = reinterpret_cast<const uint8_t*>(&dq_args);
        launch.argument_bytes = {argument, argument + sizeof dq_args};
        for (AddressPatch& patch : launch.addresses)
            patch.argument_offset += offsetof(HopperDqKernelArgs, problem);
        launch.tensor_maps = gradient_tensor_maps<HopperDqKernelArgs>(of_dq, p, args, q);
    }
    if (wants_sinks) add(sinks_kernel, p.heads_q, kRowsThreads);
    plan.presence = backward_presence(tensors, semantics);
    return plan;
}

}  // namespace flashsmith
