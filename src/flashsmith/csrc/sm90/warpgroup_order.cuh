// The warpgroup order barrier (ping-pong): consumer warpgroups pass through a stage of the main
// loop one after another, in a ring. While one issues its GEMMs, the others compute exponentials.
#pragma once

#include "common/barrier.cuh"

namespace flashsmith {

// Each warpgroup has a hardware barrier that admits it to the ordered stage, with ids from
// `kFirstBarrier` on. Id 0 belongs to __syncthreads.
template <int kWarpgroups, bool kOrdered, int kFirstBarrier = 1>
struct WarpgroupOrder {
    int warpgroup;

    // The last warpgroup admits the first one initially.
    FS_DEVICE void init() const {
        if constexpr (kOrdered)
            if (warpgroup == kWarpgroups - 1)
                named_barrier_arrive(kFirstBarrier, 2 * kWarpgroupThreads);
    }
    // Waits until this warpgroup is admitted.
    FS_DEVICE void wait() const {
        if constexpr (kOrdered)
            named_barrier_wait(kFirstBarrier + warpgroup, 2 * kWarpgroupThreads);
    }
    // Admits the next warpgroup.
    FS_DEVICE void arrive() const {
        if constexpr (kOrdered)
            named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % kWarpgroups,
                                 2 * kWarpgroupThreads);
    }
};

}  // namespace flashsmith
