// The warpgroup order barrier (ping-pong): one consumer warpgroup after the other goes through a
// stage of the main loop, in a ring. While one issues its GEMMs, the others have exponentials.
#pragma once

#include "common/barrier.cuh"

namespace flashsmith {

// Each warpgroup has a hardware barrier that admits it to the ordered stage, from `kFirstBarrier`
// on; 0 is that of __syncthreads.
template <int kWarpgroups, bool kOrdered, int kFirstBarrier = 1>
struct WarpgroupOrder {
    int warpgroup;

    // The last warpgroup admits the first one for the first time.
    FS_DEVICE void init() const {
        if constexpr (kOrdered)
            if (warpgroup == kWarpgroups - 1)
                named_barrier_arrive(kFirstBarrier, 2 * kWarpgroupThreads);
    }
    // Until this warpgroup is admitted.
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
