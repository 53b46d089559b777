// Whose turn it is: one warpgroup after the other goes through a stretch of code, in a ring.
#pragma once

#include "wgmma/barrier.cuh"
#include "wgmma/static_kernel_configuration.cuh"

namespace flashsmith {

// Hardware barriers: 0 is __syncthreads', then one a warpgroup for its turn and one for its own
// threads.
template <class Kernel>
struct Turns {
    static constexpr int kWarpgroups = Kernel::n_warpgroups;
    static constexpr PingPong kOrdered = Kernel::CFG.pingpong;
    int warpgroup;

    // The first warpgroup's first turn is the last one's to give.
    FS_DEVICE void open() const {
        if constexpr (kOrdered != PingPong::none)
            if (warpgroup == kWarpgroups - 1) named_barrier_arrive(1, 2 * kWarpgroupThreads);
    }
    // A turn for `stretch`; nothing unless it is what the config orders.
    template <PingPong stretch>
    FS_DEVICE void wait() const {
        if constexpr (kOrdered != PingPong::none && kOrdered == stretch)
            named_barrier_wait(1 + warpgroup, 2 * kWarpgroupThreads);
    }
    template <PingPong stretch>
    FS_DEVICE void pass_on() const {
        if constexpr (kOrdered != PingPong::none && kOrdered == stretch)
            named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 2 * kWarpgroupThreads);
    }
    // A turn that this warpgroup has no use for.
    FS_DEVICE void skip() const {
        if constexpr (kOrdered != PingPong::none) {
            wait<kOrdered>();
            pass_on<kOrdered>();
        }
    }
    // All warps of this warpgroup are here.
    FS_DEVICE void gather_warpgroup() const {
        named_barrier_wait(1 + kWarpgroups + warpgroup, kWarpgroupThreads);
    }
};

}  // namespace flashsmith
