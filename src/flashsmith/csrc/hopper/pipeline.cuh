// Rings of buffers in shared memory between the warp that fills them by TMA and the warpgroups that
// use them. Each buffer has two mbarriers: full, and empty.
#pragma once

#include "barrier.cuh"

namespace flashsmith {

// A place in a ring of kStages buffers. The parity is that of the phase in which the buffer becomes
// full; whoever fills waits for the other parity at the empty barrier, which lets the first round
// through.
template <int kStages>
struct RingPlace {
    int stage = 0;
    uint32_t parity = 0;

    FS_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
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

// A ring of tiles, `kTileBytes` each from `tiles` on, as seen by one side of it.
template <int kStages, int kTileBytes>
struct TileRing {
    uint32_t tiles;
    RingBarriers barriers;
    RingPlace<kStages> place;

    FS_DEVICE TileRing(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers{barriers} {}

    FS_DEVICE uint32_t tile() const { return tiles + place.stage * kTileBytes; }
    FS_DEVICE uint32_t full() const { return barriers.full(place.stage); }

    // The filling side: the tile is free; its copies are to be counted at full().
    FS_DEVICE void begin_fill() const {
        mbarrier_wait(barriers.empty(place.stage), place.parity ^ 1);
        mbarrier_arrive_expect(full(), kTileBytes);
    }
    // The using side. One lane of each warp arrives, when the whole warp is done with the tile.
    FS_DEVICE void wait_full() const { mbarrier_wait(full(), place.parity); }
    FS_DEVICE void release(int lane) {
        if (lane == 0) mbarrier_arrive(barriers.empty(place.stage));
        place.advance();
    }
};

}  // namespace flashsmith
