// Attention over a latent cache with mma.sync (sm_80 and later), for few query heads: a CTA
// multiplies 16 rows (heads of tokens) by each block of keys, which it reads from global memory
// once for scores and output.
#pragma once

#include "mla/append_kernel.cuh"
#include "mla/merge_kernel.cuh"
#include "mma_sync_mla/part.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kMmaSyncMlaThreads)
    mma_sync_mla_kernel(const __grid_constant__ typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    // CTAs of the same sequence and part are neighbours: they read the same keys.
    const uint32_t tiles = args.batch * args.tiles;
    const MlaTile<Kernel> tile(args, block_index() % tiles);
    const int part = static_cast<int>(block_index() / tiles);
    // Every CTA waits: the next launch waits only for this one, not for the launch that appends.
    wait_for_launch_before();
    allow_next_launch();
    if (!tile.exists() || part >= tile.parts) return;
    MlaPart<Kernel>(tile, shared_address(shared_memory)).run(part);
}

}  // namespace flashsmith
