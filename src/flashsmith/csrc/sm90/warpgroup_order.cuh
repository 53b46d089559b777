// The warpgroup order barrier (ping-pong): makes consumer warpgroups go through a stage of the main
// loop one after the other, in a ring. While one of them issues its GEMMs, the others compute
// exponentials.
#pragma once

#include "common/barrier.cuh"

namespace flashsmith {

// Each warpgroup has a hardware barrier that lets it enter the ordered stage; the ids begin with
// `kFirstBarrier`. Id 0 belongs to __syncthreads.
template <int kWarpgroups, bool kOrdered, int kFirstBarrier = 1>
struct WarpgroupOrder {
    int warpgroup;

    // At the beginning, the last warpgroup lets the first one enter.
    FS_DEVICE void init() const {
        if constexpr (kOrdered)
            if (warpgroup == kWarpgroups - 1)
                named_barrier_arrive(kFirstBarrier, 2 * kWarpgroupThreads);
    }
    // Waits until this warpgroup may enter.
    FS_DEVICE void wait() const {
        if constexpr (kOrdered)
            named_barrier_wait(kFirstBarrier + warpgroup, 2 * kWarpgroupThreads);
    }
    // Lets the next warpgroup enter.
    FS_DEVICE void arrive() const {
        if constexpr (kOrdered)
            named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups,
                                 2 * kWarpgroupThreads);
    }
};

}  // namespace flashsmith
