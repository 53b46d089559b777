// Initialises the barriers of a CTA's pipelines.
#pragma once

#include "sm90/pipeline.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

// `kv_producers`: how many arrivals the full barriers of K and V expect, besides the bytes of
// copies by TMA.
template <class Kernel>
FS_DEVICE void init_barriers(uint32_t smem, int kv_producers = 1) {
    // Each Q slot belongs to one warpgroup, each K and V stage to all of them. Partners read no K.
    using Stages =
        TilePipeline<Kernel::CFG.kv_stages, Kernel::K_tile_bytes, Kernel::CFG.cluster_size>;
    PipelineBarriers{smem + Kernel::Q_barriers}.init(
        Kernel::Q_slots, kWarpsPerWarpgroup * Kernel::consumers / Kernel::n_warpgroups);
    PipelineBarriers{smem + Kernel::K_barriers}.init(
        Kernel::CFG.kv_stages, Stages::arrivals_at_empty(Kernel::n_warpgroups), kv_producers);
    PipelineBarriers{smem + Kernel::V_barriers}.init(
        Kernel::CFG.kv_stages, Stages::arrivals_at_empty(Kernel::consumers), kv_producers);
    if constexpr (Kernel::halves_O)
        PipelineBarriers{smem + Kernel::message_barriers}.init(1, kWarpsPerWarpgroup,
                                                               kWarpsPerWarpgroup);
    if constexpr (Kernel::clusters) PipelineBarriers{smem + Kernel::broadcast_barriers}.init(1, 1);
    mbarrier_init_fence();
}

}  // namespace flashsmith
