#include "mma_sync_mla/plan.h"

#include <utility>

#include "mla/problem.h"

namespace flashsmith {
namespace {

constexpr int kFirstProgrammaticArch = 90;
// The fixed cost of a CTA (start, end, and merging its rows), in keys that take as long.
constexpr int64_t kKeysPerCta = 96;

int64_t ctas_at_once(const MmaSyncMlaKernelConfig& config, const DeviceSpec& device) {
    return int64_t{device.sm_count} *
           ctas_that_fit(config.smem_bytes(), kMmaSyncMlaThreads, device.max_smem_per_sm, 0);
}

}  // namespace

Plan plan_mma_sync_mla(const MmaSyncMlaKernelConfig& config, NumberReader& numbers, Tensors tensors,
                       const DeviceSpec& device, const Semantics& semantics) {
    const MlaProblem p = read_mla_problem(numbers, tensors);
    check_smem(config.smem_bytes(), device);
    check_mla(p, config.d_head, config.d_v, kMmaSyncMlaRows, semantics);
    MlaKernelArgs args = mla_arguments(p);
    const int64_t tiles = set_tiles(args, p, kMmaSyncMlaRows,
                                    {config.B_c, config.min_keys, config.most_parts,
                                     ctas_at_once(config, device), kKeysPerCta});
    Launch main = mla_launch(kMlaMain, tiles * args.most_parts, kMmaSyncMlaThreads, args);
    main.smem_bytes = static_cast<int>(config.smem_bytes());
    return mla_plan(std::move(main), args, tiles, kMmaSyncMlaRows, config.d_v, tensors,
                    semantics.packed, device.arch >= kFirstProgrammaticArch);
}

}  // namespace flashsmith
