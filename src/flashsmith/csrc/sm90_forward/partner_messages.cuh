// The messages of a consumer warpgroup to its partner, which multiplies the same P by other columns
// of V.
#pragma once

#include "common/opaque.cuh"
#include "sm90/pipeline.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

// Both warpgroups have an object of this class. A thread sends to the thread of the same index in
// the partner, whose fragments and rows are the same. There is room for one message: the receiver
// copies it to registers before its GEMM, so that the sender waits only if it is a whole block
// ahead.
template <class Kernel>
class PartnerMessages {
  public:
    FS_DEVICE explicit PartnerMessages(uint32_t smem)
        : smem_(smem), barriers_{smem + Kernel::message_barriers} {}

    // Sends a block's P, and the factors by which O of the preceding blocks is multiplied first.
    FS_DEVICE void send(const typename Kernel::P_t& P, bool rescales, const float (&factors)[2]) {
        wait_for_room();
        const uint32_t fragments = own_fragments();
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            store_shared_16B(fragments + step * kStepBytes,
                             {P[step][0], P[step][1], P[step][2], P[step][3]});
        store_floats(rescales ? factors[0] : 1.0f, rescales ? factors[1] : 1.0f);
        arrive(barriers_.full(0));
    }
    FS_DEVICE void receive(typename Kernel::P_t& P, float (&factors)[2]) {
        mbarrier_wait(barriers_.full(0), state_.phase());
        const uint32_t fragments = own_fragments();
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step) {
            const uint4 fragment = load_shared_16B(fragments + step * kStepBytes);
            P[step][0] = fragment.x, P[step][1] = fragment.y;
            P[step][2] = fragment.z, P[step][3] = fragment.w;
        }
        load_floats(factors);
        arrive(barriers_.empty(0));
    }

    // Sends the final factors of a tile's rows.
    FS_DEVICE void send(const float (&weights)[2]) {
        wait_for_room();
        store_floats(weights[0], weights[1]);
        arrive(barriers_.full(0));
    }
    FS_DEVICE void receive(float (&weights)[2]) {
        mbarrier_wait(barriers_.full(0), state_.phase());
        load_floats(weights);
        arrive(barriers_.empty(0));
    }

  private:
    static constexpr int kStepBytes = kWarpgroupThreads * 16;
    static constexpr int kFragmentBytes = Kernel::PV_steps * kStepBytes;

    const uint32_t smem_;
    const PipelineBarriers barriers_;
    PipelineState<1> state_;

    // This thread's addresses, computed each time, so that the main loop keeps no register for
    // them.
    FS_DEVICE uint32_t own_fragments() const {
        return smem_ + Kernel::message_offset + index() * 16;
    }
    FS_DEVICE uint32_t own_floats() const {
        return smem_ + Kernel::message_offset + kFragmentBytes + index() * 8;
    }
    FS_DEVICE static uint32_t index() { return opaque(thread_index()) % kWarpgroupThreads; }

    FS_DEVICE void wait_for_room() const { mbarrier_wait(barriers_.empty(0), state_.phase() ^ 1); }
    FS_DEVICE void store_floats(float first, float second) const {
        store_shared_8B(own_floats(), {__float_as_uint(first), __float_as_uint(second)});
    }
    FS_DEVICE void load_floats(float (&floats)[2]) const {
        const float2 both = load_shared_float2(own_floats());
        floats[0] = both.x, floats[1] = both.y;
    }
    // One lane arrives for its warp.
    FS_DEVICE void arrive(uint32_t barrier) {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(barrier);
        state_.advance();
    }
};

// The replacement for a warpgroup without a partner.
struct NoMessages {
    FS_DEVICE explicit NoMessages(uint32_t) {}
};

}  // namespace flashsmith
