// Attention over a latent cache (sm_90a): a row of the cache is a key, and its first columns are
// the value. All query heads share it: a CTA multiplies 64 rows (heads of tokens) by each block of
// keys, and reads the block from global memory once for scores and output.
#pragma once

#include "mla/append_kernel.cuh"
#include "mla/merge_kernel.cuh"
#include "wgmma_mla/consumer.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_kernel(const __grid_constant__ MlaKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    // CTAs of the same sequence and part are neighbours: they read the same keys.
    const uint32_t tiles = args.batch * args.tiles;
    const MlaTile<Kernel> tile(args, block_index() % tiles);
    const PartRange parts = parts_of_run(tile, static_cast<int>(block_index() / tiles));
    // Every CTA waits: the next launch waits only for this one, not for the launch that appends.
    wait_for_launch_before();
    allow_next_launch();
    if (!tile.exists() || parts.begin >= tile.parts) return;
    if (thread_index() == 0) {
        section_barriers<Kernel>(smem).init(kMlaStages * Kernel::arrivals, kWarpsPerWarpgroup);
        mbarrier_init_fence();
    }
    __syncthreads();

    // The shuffle lets the compiler know that the value is the same in all lanes of a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == kMlaConsumers) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        if (thread_index() / kWarpSize == kMlaConsumers * kWarpsPerWarpgroup)
            MlaProducer<Kernel>(tile, smem).run(blocks_of(tile, parts));
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        if (warpgroup == 0)
            MlaConsumer<Kernel, 0>(tile, smem).run(parts);
        else
            MlaConsumer<Kernel, 1>(tile, smem).run(parts);
    }
}

}  // namespace flashsmith
