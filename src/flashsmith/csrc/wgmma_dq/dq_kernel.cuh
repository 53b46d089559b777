// Computes only the gradient of q, for frozen k and v, with wgmma and TMA (sm_90a). These are the
// kernels of a pass in launch order:
//
//     prepare        statistics of the rows
//     gaps           packed: zeros outside of sequences
//     lists          with the mask of a program: which blocks of keys each block of queries visits
//     main           dq, of a block of queries over all keys
//     sinks          dsinks
#pragma once

#include "backward/list_kernels.cuh"
#include "backward/rows_kernels.cuh"
#include "wgmma_dq/consumer.cuh"
#include "wgmma_dq/producer.cuh"

namespace flashsmith {

template <class Kernel>
FS_DEVICE void init_dq_barriers(uint32_t smem) {
    constexpr int kWarps = Kernel::n_warpgroups * kWarpsPerWarpgroup;
    mbarrier_init(smem + Kernel::Q_barrier, 1);
    mbarrier_init(smem + Kernel::do_barrier, 1);
    PipelineBarriers{smem + Kernel::K_barriers}.init(Kernel::CFG.k_stages, kWarps);
    PipelineBarriers{smem + Kernel::V_barriers}.init(Kernel::CFG.v_stages, kWarps);
    mbarrier_init_fence();
}

// `Config`: the static config of this family, or of wgmma_backward with separate_dq.
template <class Config>
__global__ void __launch_bounds__(Config::DqKernel::CFG.n_threads(), 1)
    hopper_dq_kernel(const __grid_constant__ typename Config::DqKernel::Args args) {
    using Kernel = typename Config::DqKernel;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    const QueryBlock<Kernel> tile(args, block_index());
    if (!tile.exists()) return;
    if (thread_index() == 0) init_dq_barriers<Kernel>(smem);
    __syncthreads();

    // Because of this shuffle, the compiler knows that the value is the same in all lanes of a
    // warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == 0) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        if (thread_index() == 0) DqProducer<Kernel>(args, smem, tile).run();
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        DqConsumer<Kernel>(args, smem, tile, warpgroup - 1).run();
    }
}

}  // namespace flashsmith
