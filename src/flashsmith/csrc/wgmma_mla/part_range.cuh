// The parts that a CTA computes one after another.
#pragma once

#include "mla/tile.cuh"
#include "wgmma_mla/static_kernel_configuration.cuh"

namespace flashsmith {

struct PartRange {
    int begin, end;
};

// The parts of a tile's run of this number; a run that the tile does not have begins after its last
// part. Every part is computed and stored for itself, so its bits do not depend on the run.
template <class Kernel>
FS_DEVICE PartRange parts_of_run(const MlaTile<Kernel>& tile, int run) {
    constexpr int kKeys = Kernel::CFG.run_keys;
    if constexpr (kKeys == 0) return {run, run + 1};
    const int keys = max(tile.blocks.end - tile.blocks.begin, 0) * Kernel::B_c;
    // As in runs_at_most() of plan.cc; the number never falls as keys are added.
    const int runs = min(max((keys + kKeys - 1) / kKeys, tile.args.least_runs), tile.parts);
    if (run >= runs) return {tile.parts, tile.parts};
    return {tile.parts * run / runs, tile.parts * (run + 1) / runs};
}

template <class Kernel>
FS_DEVICE BlockRange blocks_of(const MlaTile<Kernel>& tile, const PartRange& parts) {
    BlockRange blocks = tile.of_part(parts.begin);
    if constexpr (Kernel::CFG.run_keys > 0) blocks.end = tile.of_part(parts.end - 1).end;
    return blocks;
}

}  // namespace flashsmith
