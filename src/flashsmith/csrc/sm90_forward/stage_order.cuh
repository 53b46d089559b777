// The stage of the main loop that the warpgroups pass through in order, as the config selects.
#pragma once

#include "sm90/warpgroup_order.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

// Each warpgroup has a hardware barrier for its own threads. The ids of these barriers come after
// the ids of the order's barriers.
template <class Kernel>
struct StageOrder : WarpgroupOrder<Kernel::n_warpgroups, Kernel::CFG.pingpong != PingPong::none> {
    static constexpr PingPong kOrdered = Kernel::CFG.pingpong;
    using Order = WarpgroupOrder<Kernel::n_warpgroups, kOrdered != PingPong::none>;

    // These do nothing unless the config orders that stage.
    template <PingPong stage>
    FS_DEVICE void wait() const {
        if constexpr (kOrdered == stage) Order::wait();
    }
    template <PingPong stage>
    FS_DEVICE void arrive() const {
        if constexpr (kOrdered == stage) Order::arrive();
    }
    // For a block whose stage comes outside the loop, regardless of which stage is ordered.
    FS_DEVICE void begin_turn() const { Order::wait(); }
    FS_DEVICE void end_turn() const { Order::arrive(); }
    // For a block that this warpgroup skips.
    FS_DEVICE void wait_and_arrive() const {
        Order::wait();
        Order::arrive();
    }
    // Waits until all warps of this warpgroup have arrived.
    FS_DEVICE void sync_warpgroup() const {
        named_barrier_wait(1 + Kernel::n_warpgroups + this->warpgroup, kWarpgroupThreads);
    }
};

}  // namespace flashsmith
