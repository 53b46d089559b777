#include "mma_sync_mla/plan.h"

#include <cstddef>
#include <cstring>
#include <utility>

#include "host/program_arguments.h"
#include "mla/problem.h"

namespace flashsmith {
namespace {

constexpr int kFirstProgrammaticArch = 90;
// The fixed cost of a CTA (start, end, and merging its rows), as the number of keys that take the
// same time.
constexpr int64_t kKeysPerCta = 96;

int64_t ctas_at_once(const MmaSyncMlaKernelConfig& config, const DeviceSpec& device) {
    return int64_t{device.sm_count} *
           ctas_that_fit(config.smem_bytes(), kMmaSyncMlaThreads, device.max_smem_per_sm, 0);
}

static_assert(sizeof(MlaScaledArgs) >= sizeof(MlaKernelArgs) + sizeof(RowScale));

// Adds the scale to the arguments of a launch.
void add_scale(Launch& launch, float value) {
    const size_t offset = sizeof(MlaKernelArgs);
    launch.argument_bytes.resize(sizeof(MlaScaledArgs));
    std::memcpy(launch.argument_bytes.data() + offset + offsetof(RowScale, value), &value,
                sizeof value);
    launch.addresses.push_back({offset + offsetof(RowScale, on_device), in_tensor(k_scale)});
}

// A base class that itself has a base has no padding at its end, so a program follows the scale
// directly.
static_assert(sizeof(MlaProgramArgs) >= sizeof(MlaKernelArgs) + sizeof(ProgramArgs));
static_assert(sizeof(MlaScaledProgramArgs) >=
              sizeof(MlaKernelArgs) + sizeof(RowScale) + sizeof(ProgramArgs));

// Adds the program to the arguments of a launch.
void add_program(Launch& launch, const ProgramArgs& program, bool has_scale) {
    const size_t offset = sizeof(MlaKernelArgs) + (has_scale ? sizeof(RowScale) : 0);
    launch.argument_bytes.resize(has_scale ? sizeof(MlaScaledProgramArgs) : sizeof(MlaProgramArgs));
    std::memcpy(launch.argument_bytes.data() + offset, &program, sizeof program);
    add_program_addresses(launch.addresses, first_read, offset);
}

}  // namespace

Plan plan_mma_sync_mla(const MmaSyncMlaKernelConfig& config, NumberReader& numbers, Tensors tensors,
                       const DeviceSpec& device, const Semantics& semantics) {
    const MlaProblem p = read_mla_problem(numbers, tensors);
    ProgramArgs program;
    if (semantics.has_program()) program = read_program(numbers);
    numbers.end();
    check_smem(config.smem_bytes(), device);
    check_mla(p, config.d_head, config.d_v, kMmaSyncMlaRows, semantics);
    MlaKernelArgs args = mla_arguments(p);
    if (semantics.program_scores) {
        program.scale = p.scale;
        args.scale_log2 = kLog2E;
    }
    if (!config.has_scale())
        check_no_scale(p, tensors);
    else if (tensors[k_scale] == 0)
        (semantics.program_scores ? program.scale : args.scale_log2) *= p.row_scale;
    const int64_t tiles = set_tiles(args, p, kMmaSyncMlaRows,
                                    {config.B_c, config.min_keys, config.most_parts,
                                     ctas_at_once(config, device), kKeysPerCta});
    Launch main = mla_launch(kMlaMain, tiles * args.most_parts, kMmaSyncMlaThreads, args);
    main.smem_bytes = static_cast<int>(config.smem_bytes());
    Plan plan = mla_plan(std::move(main), args, tiles, kMmaSyncMlaRows, config.d_v, tensors,
                         semantics.packed, device.arch >= kFirstProgrammaticArch);
    for (Launch& launch : plan.launches) {
        if (config.has_scale()) add_scale(launch, p.row_scale);
        if (semantics.has_program()) add_program(launch, program, config.has_scale());
    }
    return plan;
}

}  // namespace flashsmith
