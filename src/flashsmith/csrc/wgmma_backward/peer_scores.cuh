// How the two CTAs of a pair exchange S or dP, of which each has multiplied half of the columns.
#pragma once

#include "common/opaque.cuh"
#include "sm90/pipeline.cuh"
#include "wgmma_backward/static_kernel_configuration.cuh"

namespace flashsmith {

// A warpgroup and the warpgroup with the same role in the other CTA send each other their sums,
// lane by lane. Both add them in fp32. The order of two summands does not matter, so both get the
// same bits, and P and dS are the same in both CTAs.
//
// Each role has room for one message. A barrier of the receiver counts its bytes (full). At a
// barrier in the sender's shared memory, the receiver reports that it has read them (empty).
template <class Kernel>
struct PeerScores {
    static constexpr int kTiles = Kernel::B_r / 8;
    static constexpr uint32_t kWarpBytes = kTiles * kWarpSize * 16;
    static_assert(kWarpsPerWarpgroup * kWarpBytes == Kernel::peer_tile_bytes ||
                  !Kernel::CFG.cta_pair);

    const uint32_t smem;
    const int role;
    const uint32_t phase;  // parity of the steps before this one

    FS_DEVICE static PipelineBarriers barriers(uint32_t smem) {
        return {smem + Kernel::peer_barriers};
    }
    FS_DEVICE static void init(uint32_t smem) {
        for (int role = 0; role < 2; ++role) {
            mbarrier_init(barriers(smem).full(role), kWarpsPerWarpgroup);
            mbarrier_init(barriers(smem).empty(role), kWarpsPerWarpgroup);
        }
    }

    FS_DEVICE void exchange(typename Kernel::Scores& scores, int warp, int lane) const {
        const uint32_t peer = cluster_rank() ^ 1;
        const uint32_t place = opaque(smem) + Kernel::peer_offset + role * Kernel::peer_tile_bytes +
                               warp * kWarpBytes + lane * 16;
        const uint32_t full = barriers(smem).full(role), empty = barriers(smem).empty(role);
        if (lane == 0) mbarrier_arrive_expect(full, kWarpBytes);
        mbarrier_wait(empty, phase ^ 1);
        const uint32_t there = cluster_address(place, peer);
        const uint32_t full_there = cluster_address(full, peer);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float (&x)[4] = scores[0][n];
            store_remote_16B(there + n * kWarpSize * 16, full_there,
                             {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                              __float_as_uint(x[3])});
        }
        mbarrier_wait(full, phase);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const uint4 x = load_shared_16B(place + n * kWarpSize * 16);
            scores[0][n][0] += __uint_as_float(x.x);
            scores[0][n][1] += __uint_as_float(x.y);
            scores[0][n][2] += __uint_as_float(x.z);
            scores[0][n][3] += __uint_as_float(x.w);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive_remote(cluster_address(empty, peer));
    }
};

}  // namespace flashsmith
