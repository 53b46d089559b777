#include "wgmma_dq/plan.h"

#include <climits>
#include <cstddef>

#include "backward/problem.h"
#include "wgmma_dq/tensor_maps.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;
constexpr uint32_t kRowsThreads = 256;

// The offset of a program's arguments. offsetof() is not defined for a derived struct.
constexpr size_t kProgramOffset = sizeof(HopperDqKernelArgs);
static_assert(sizeof(HopperDqProgramArgs) ==
              (kProgramOffset + sizeof(ProgramArgs) + alignof(TensorMap) - 1) / alignof(TensorMap) *
                  alignof(TensorMap));

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t {
    main_kernel,
    prepare,
    gaps,
    sinks_kernel,
    list_keys,  // with the mask of a program
    compact_keys,
};

}  // namespace

Plan plan_dq(const WgmmaDqKernelConfig& config, NumberReader& numbers, Tensors tensors,
             const DeviceSpec& device, const Semantics& semantics) {
    auto [p, args, program] = read_backward_problem(numbers, tensors, semantics);
    require(device.arch == kArch, "wgmma kernels run on compute capability 9.0 only");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, kStatisticsRows, config.d_v);
    if (config.d_v > 0) args.widths = {static_cast<int16_t>(p.d), static_cast<int16_t>(p.d_v)};
    if (!semantics.uneven)
        require(p.d == config.d_head && p.d_v == config.d_head_v() && p.seq_q % config.B_r == 0 &&
                    p.seq_k % config.B_c == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    require(tensors[dk] == 0 && tensors[dv] == 0,
            "dk, dv: this kernel computes dq alone; take another config");
    const bool wants_sinks = tensors[dsinks] != 0;
    require(!wants_sinks || tensors[sinks] != 0, "dsinks: requested without sinks; pass sinks");

    const Statistics statistics = place_statistics(p, args);
    const size_t bytes = static_cast<size_t>(statistics.rows) * sizeof(float);
    Plan plan;
    plan.workspaces = {{"lse_log2", bytes, Contents::undefined}, {"D", bytes, Contents::undefined}};

    const auto add = [&](Kernel kernel, int64_t blocks, uint32_t threads) {
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        const auto* argument = reinterpret_cast<const uint8_t*>(&args);
        plan.launches.push_back({
            .kernel = kernel,
            .grid = {static_cast<uint32_t>(blocks), 1, 1},
            .cluster = {1, 1, 1},
            .block = {threads, 1, 1},
            .smem_bytes = 0,
            .argument_bytes = {argument, argument + sizeof args},
            .addresses = backward_addresses(false),
            .tensor_maps = {},
        });
    };
    const int64_t heads_q = p.batch * p.heads_q;
    add(prepare, heads_q * blocks_of(p.seq_q, kStatisticsRows), kRowsThreads);
    pass_program_to_prepare(plan.launches.back(), program, semantics);
    if (p.packed)
        add(gaps, blocks_of(p.total_q + p.total_k, kRowsThreads / kWarpSize), kRowsThreads);
    if (tensors[dq] != 0) {
        using Args = HopperDqKernelArgs;
        HopperDqProgramArgs main_args;
        std::memset(&main_args, 0, sizeof main_args);  // including padding: equal plans have equal
                                                       // bytes
        main_args.program = program;
        main_args.problem = args;
        add(main_kernel, heads_q * blocks_of(p.seq_q, config.B_r),
            static_cast<uint32_t>(config.n_threads()));
        Launch& launch = plan.launches.back();
        launch.smem_bytes = static_cast<int>(config.smem_bytes());
        const auto* argument = reinterpret_cast<const uint8_t*>(&main_args);
        launch.argument_bytes = {
            argument, argument + (semantics.has_program() ? sizeof main_args : sizeof(Args))};
        for (AddressPatch& patch : launch.addresses)
            patch.argument_offset += offsetof(Args, problem);
        if (semantics.has_program())
            add_program_addresses(launch.addresses, first_read, kProgramOffset);
        launch.tensor_maps = gradient_tensor_maps<Args>(config, p, args, q);
        if (semantics.program_masks) {
            const int64_t n_blocks = blocks_of(p.seq_k, config.B_c);
            const int64_t lists =
                number_of_lists(semantics, p.batch, p.heads_q, blocks_of(p.seq_q, config.B_r));
            add_lists(plan, args, program, {{list_keys, lists * n_blocks}, {compact_keys, lists}},
                      lists * (kBlockListHeader + n_blocks), kProgramOffset);
        }
    }
    if (wants_sinks) add(sinks_kernel, p.heads_q, kRowsThreads);
    plan.presence = backward_presence(tensors, semantics);
    return plan;
}

}  // namespace flashsmith
