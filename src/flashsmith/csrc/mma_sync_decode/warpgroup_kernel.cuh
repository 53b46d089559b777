// The kernel for sequences with many rows on sm_90, such as chunks of a prompt: the consumer
// warpgroups of the forward pass, and a producer that copies K and V from the cache. No tile's keys
// are split, so a sequence's bits depend on its own queries and keys alone.
#pragma once

#include "mma_sync_decode/warpgroup_producer.cuh"
#include "sm90_forward/consumer.cuh"
#include "sm90_forward/init_barriers.cuh"

namespace flashsmith {

template <class Decode>
using WarpgroupKernel =
    StaticHopperKernelConfig<warpgroup_config(Decode::CFG), of_any_length(Decode::SEMANTICS)>;

template <class Decode>
__global__ void __launch_bounds__(WarpgroupKernel<Decode>::CFG.n_threads(), 1)
    decode_warpgroup_kernel(const __grid_constant__ WarpgroupKernelArgs args) {
    using Kernel = WarpgroupKernel<Decode>;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    if (thread_index() == 0) init_barriers<Kernel>(smem, args.gathers != 0 ? kProducersOfTile : 1);
    __syncthreads();
    wait_for_launch_before();
    allow_next_launch();

    // The shuffle lets the compiler know that the value is the same in all lanes of a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == 0) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        const bool of_K =
            __shfl_sync(0xffffffffu, thread_index() / kWarpSize, 0) < kProducersOfTile;
        if (args.gathers != 0) {
            if (of_K)
                CacheProducer<Kernel, true, true>(args, smem).run();
            else
                CacheProducer<Kernel, false, true>(args, smem).run();
        } else {
            if (of_K)
                CacheProducer<Kernel, true, false>(args, smem).run();
            else
                CacheProducer<Kernel, false, false>(args, smem).run();
        }
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        Consumer<Kernel>(args.forward, smem, warpgroup - 1).run();
    }
}

}  // namespace flashsmith
