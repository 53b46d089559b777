// The FlashAttention forward pass on wgmma and TMA (sm_90a): a producer and consumer warpgroups.
#pragma once

#include "sm90_forward/init_barriers.cuh"
#include "sm90_forward/partner.cuh"
#include "wgmma/list_kernels.cuh"
#include "wgmma/merge_kernel.cuh"
#include "wgmma/producer.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::CFG.n_threads(), Kernel::CFG.ctas_per_sm)
    hopper_forward_kernel(const __grid_constant__ typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    if (thread_index() == 0) init_barriers<Kernel>(smem);
    if constexpr (Kernel::clusters)
        cluster_barrier();  // no CTA may use another's barriers before they are initialised
    else
        __syncthreads();

    // The shuffle lets the compiler know that the value is the same in all lanes of a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == 0) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        if (thread_index() == 0) Producer<Kernel>(args, smem).run();
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        if (Kernel::halves_O && warpgroup == 2) {
            if constexpr (Kernel::halves_O) Partner<Kernel>(args, smem, 0).run();
        } else {
            Consumer<Kernel>(args, smem, warpgroup - 1).run();
        }
    }
    if constexpr (Kernel::clusters) {
        __syncwarp();
        cluster_barrier();  // the barriers must exist until the other CTA's last arrivals
    }
}

}  // namespace flashsmith
