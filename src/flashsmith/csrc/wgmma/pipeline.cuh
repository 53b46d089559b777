// Rings of buffers in shared memory between the warp that fills them by TMA and the warpgroups that
// use them. Each buffer has two mbarriers: full, and empty.
#pragma once

#include "wgmma/barrier.cuh"
#include "wgmma/static_kernel_configuration.cuh"

namespace flashsmith {

// A place in a ring of kStages buffers. The parity is that of the phase in which the buffer becomes
// full; whoever fills waits for the other parity at the empty barrier, which lets the first round
// through.
template <int kStages>
class RingPlace {
  public:
    FS_DEVICE int stage() const { return kCounts ? steps_ % kStages : steps_; }
    FS_DEVICE uint32_t parity() const { return kCounts ? steps_ / kStages % 2 : rounds_; }
    FS_DEVICE void advance() {
        ++steps_;
        if constexpr (!kCounts)
            if (steps_ == kStages) {
                steps_ = 0;
                rounds_ ^= 1;
            }
    }

  private:
    // Powers of two need but a count, a register less in the main loop.
    static constexpr bool kCounts = (kStages & (kStages - 1)) == 0;
    uint32_t steps_ = 0, rounds_ = 0;
};

// The pairs of barriers of a ring, as they stand in shared memory from `first` on.
struct RingBarriers {
    uint32_t first;

    FS_DEVICE uint32_t full(int stage) const { return first + 16 * stage; }
    FS_DEVICE uint32_t empty(int stage) const { return first + 16 * stage + 8; }

    // `users` arrive at empty; the filling thread arrives at full, and TMA's bytes complete it.
    FS_DEVICE void init(int stages, int users) const {
        for (int stage = 0; stage < stages; ++stage) {
            mbarrier_init(full(stage), 1);
            mbarrier_init(empty(stage), users);
        }
    }
};

// A ring of tiles, `kTileBytes` each from `tiles` on, as seen by one side of it. Where two CTAs
// fill it together (kCtas), both have the same tiles at the same time, and a tile is free when it
// is in both.
template <int kStages, int kTileBytes, int kCtas = 1>
struct TileRing {
    uint32_t tiles;
    RingBarriers barriers;
    RingPlace<kStages> place;
    uint32_t peers_barriers = 0;  // in the other CTA

    FS_DEVICE TileRing(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers{barriers} {
        if constexpr (kCtas == 2) peers_barriers = cluster_address(barriers, cluster_rank() ^ 1);
    }

    FS_DEVICE uint32_t tile() const { return tiles + place.stage() * kTileBytes; }
    FS_DEVICE uint32_t full() const { return barriers.full(place.stage()); }

    // The filling side: the tile is free; its copies are to be counted at full().
    FS_DEVICE void begin_fill() const {
        mbarrier_wait(barriers.empty(place.stage()), place.parity() ^ 1);
        mbarrier_arrive_expect(full(), kTileBytes);
    }
    // Arrivals at an empty barrier in a round: see release().
    FS_DEVICE static constexpr int users(int warpgroups) {
        return warpgroups * (kWarpsPerWarpgroup + kCtas - 1);
    }

    // The using side. One lane of each warp arrives, when the whole warp is done with the tile. At
    // the other CTA one warp does for its warpgroup: products are the whole warpgroup's, and those
    // who did not multiply have not read the tile.
    FS_DEVICE void wait_full() const { mbarrier_wait(full(), place.parity()); }
    FS_DEVICE void release(int warp, int lane) {
        if (lane == 0) mbarrier_arrive(barriers.empty(place.stage()));
        if constexpr (kCtas == 2)
            if (warp == kWarpsPerWarpgroup - 1 && lane == 1)
                mbarrier_arrive_remote(RingBarriers{peers_barriers}.empty(place.stage()));
        place.advance();
    }
};

}  // namespace flashsmith
