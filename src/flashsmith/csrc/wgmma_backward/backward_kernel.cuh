// The FlashAttention backward pass on wgmma and TMA (sm_90a): the kernels of a pass, in launch
// order.
//
//     prepare        statistics of the rows
//     gaps           packed: zeros outside of sequences
//     lists          with the mask of a program: which blocks of queries each block of keys visits
//     main           dk and dv, and what each block of keys adds to dq
//     finish         dq, rounded from its sums
//     dq             with separate_dq, in place of these sums: the kernel of the wgmma_dq family
//     sinks          dsinks
#pragma once

#include "backward/list_kernels.cuh"
#include "backward/rows_kernels.cuh"
#include "wgmma_backward/consumer.cuh"
#include "wgmma_backward/finish_kernel.cuh"
#include "wgmma_backward/producer.cuh"
#include "wgmma_backward/split_consumer.cuh"
#include "wgmma_dq/dq_kernel.cuh"

namespace flashsmith {

template <class Kernel>
FS_DEVICE void init_backward_barriers(uint32_t smem) {
    constexpr int kWarps = Kernel::n_warpgroups * kWarpsPerWarpgroup;
    // The threads that keep the order of dq also read the number of a block of keys.
    PipelineBarriers{smem + Kernel::K_barriers}.init(1, kWarps + Kernel::order_keepers);
    PipelineBarriers{smem + Kernel::V_barriers}.init(1, kWarps);
    PipelineBarriers{smem + Kernel::Q_barriers}.init(
        Kernel::CFG.q_stages, Kernel::QPipeline::arrivals_at_empty(Kernel::n_warpgroups));
    PipelineBarriers{smem + Kernel::do_barriers}.init(
        Kernel::CFG.do_stages, Kernel::DoPipeline::arrivals_at_empty(Kernel::n_warpgroups));
    dSStages<Kernel>::init(smem);
    dQOrder<Kernel>{smem}.init();
    if constexpr (Kernel::CFG.split_roles) SplitBackwardConsumer<Kernel>::init(smem);
    mbarrier_init_fence();
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::CFG.n_threads(), 1)
    hopper_backward_kernel(const __grid_constant__ typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    // A CTA whose block of keys does not exist ends here. The CTAs of a pair run without steps
    // instead: with this branch, ptxas would keep the numbers of KeyBlock in registers until the
    // end, and spill others.
    if constexpr (!Kernel::CFG.persistent && Kernel::cluster_size == 1)
        if (!KeyBlock<Kernel>(args.problem, key_block_of_cta<Kernel>()).exists()) return;
    if (thread_index() == 0) init_backward_barriers<Kernel>(smem);
    if constexpr (Kernel::cluster_size > 1)
        cluster_barrier();  // the other CTA may use these barriers only once they are initialised
    else
        __syncthreads();

    // Because of this shuffle, the compiler knows that the value is the same in all lanes of a
    // warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == 0) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        if (thread_index() == 0) BackwardProducer<Kernel>(args, smem).run();
        if constexpr (Kernel::CFG.ordered_dq) {
            const int part = __shfl_sync(0xffffffffu, thread_index() / kWarpSize, 0) - 1;
            if (part >= 0 && part < Kernel::order_keepers && lane_index() == 0)
                dQTurns<Kernel>(args, smem, part).run();
        }
        if constexpr (Kernel::CFG.shared_dq)
            if (thread_index() == (1 + Kernel::order_keepers) * kWarpSize)
                dSSender<Kernel>{args.problem, smem}.run();
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        using Consumer = std::conditional_t<Kernel::CFG.split_roles, SplitBackwardConsumer<Kernel>,
                                            BackwardConsumer<Kernel>>;
        Consumer(args, smem, warpgroup - 1).run();
    }
    if constexpr (Kernel::cluster_size > 1) {
        __syncwarp();
        cluster_barrier();  // shared memory must exist until the other CTA's last message
    }
}

}  // namespace flashsmith
