// The second launch of kernels that split keys: merges the parts of the tiles that were split.
#pragma once

#include "wgmma/scheduler.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kPartMergeThreads)
    hopper_merge_kernel(const __grid_constant__ typename Kernel::Args args) {
    const ForwardKernelArgs& problem = args.problem;
    const MergeThread<Kernel> thread;
    const uint32_t tile = args.n_whole_tiles + thread.tile * Kernel::CFG.split_keys;
    if (tile >= args.n_tiles || thread.column >= problem.d) return;
    const WorkTilePart info = TileScheduler<Kernel>(args, 0).info_of(tile);
    const int row = info.first_row + thread.tile_row;
    if (row >= info.row_end) return;
    merge_parts<Kernel>(problem,
                        {.part_row = info.part_row + thread.tile_row,
                         .batch = info.batch,
                         .head = head_of<Kernel>(args, info.head, row),
                         .row = token_of<Kernel>(args, row),
                         .q_first = info.q_first},
                        thread.column);
}

}  // namespace flashsmith
