// Initialises the barriers of a CTA's pipelines.
#pragma once

#include "sm90/pipeline.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

template <class Kernel>
FS_DEVICE void init_barriers(uint32_t smem) {
    // Each Q slot belongs to one warpgroup, each K and V stage to all of them.
    constexpr int kArrivals =
        TilePipeline<Kernel::CFG.kv_stages, Kernel::KV_tile_bytes,
                     Kernel::CFG.cluster_size>::arrivals_at_empty(Kernel::n_warpgroups);
    PipelineBarriers{smem + Kernel::Q_barriers}.init(Kernel::Q_slots, kWarpsPerWarpgroup);
    PipelineBarriers{smem + Kernel::K_barriers}.init(Kernel::CFG.kv_stages, kArrivals);
    PipelineBarriers{smem + Kernel::V_barriers}.init(Kernel::CFG.kv_stages, kArrivals);
    if constexpr (Kernel::clusters) PipelineBarriers{smem + Kernel::broadcast_barriers}.init(1, 1);
    mbarrier_init_fence();
}

}  // namespace flashsmith
