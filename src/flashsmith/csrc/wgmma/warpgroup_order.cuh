// The warpgroup order barrier (ping-pong): one consumer warpgroup after the other goes through a
// stage of the main loop, in a ring.
#pragma once

#include "common/barrier.cuh"
#include "wgmma/static_kernel_configuration.cuh"

namespace flashsmith {

// Hardware barriers: 0 is __syncthreads', then each warpgroup has one that admits it to the ordered
// stage, and one for its own threads.
template <class Kernel>
struct WarpgroupOrder {
    static constexpr int kWarpgroups = Kernel::n_warpgroups;
    static constexpr PingPong kOrdered = Kernel::CFG.pingpong;
    int warpgroup;

    // The last warpgroup admits the first one for the first time.
    FS_DEVICE void init() const {
        if constexpr (kOrdered != PingPong::none)
            if (warpgroup == kWarpgroups - 1) named_barrier_arrive(1, 2 * kWarpgroupThreads);
    }
    // Until this warpgroup is admitted to `stage`; nothing unless the config orders that stage.
    template <PingPong stage>
    FS_DEVICE void wait() const {
        if constexpr (kOrdered != PingPong::none && kOrdered == stage)
            named_barrier_wait(1 + warpgroup, 2 * kWarpgroupThreads);
    }
    // Admits the next warpgroup.
    template <PingPong stage>
    FS_DEVICE void arrive() const {
        if constexpr (kOrdered != PingPong::none && kOrdered == stage)
            named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 2 * kWarpgroupThreads);
    }
    // For a block that this warpgroup skips.
    FS_DEVICE void wait_and_arrive() const {
        if constexpr (kOrdered != PingPong::none) {
            wait<kOrdered>();
            arrive<kOrdered>();
        }
    }
    // Until all warps of this warpgroup are here.
    FS_DEVICE void sync_warpgroup() const {
        named_barrier_wait(1 + kWarpgroups + warpgroup, kWarpgroupThreads);
    }
};

}  // namespace flashsmith
