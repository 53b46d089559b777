// Pipelines of shared-memory buffers between the producer, which fills them by TMA, and the
// consumer warpgroups. Each stage has two mbarriers: full and empty.
#pragma once

#include "common/barrier.cuh"

namespace flashsmith {

// The next of kStages stages, and the phase in which it becomes full. The producer waits for the
// other phase at the empty barrier, so the first round does not block.
template <int kStages>
class PipelineState {
  public:
    FS_DEVICE int stage() const { return kCounts ? steps_ % kStages : steps_; }
    FS_DEVICE uint32_t phase() const { return kCounts ? steps_ / kStages % 2 : phase_; }
    FS_DEVICE void advance() {
        ++steps_;
        if constexpr (!kCounts)
            if (steps_ == kStages) {
                steps_ = 0;
                phase_ ^= 1;
            }
    }

  private:
    // For powers of two one counter is enough, which saves a register in the main loop.
    static constexpr bool kCounts = (kStages & (kStages - 1)) == 0;
    uint32_t steps_ = 0, phase_ = 0;
};

// The barriers of a pipeline: a pair per stage, in shared memory from `first` on.
struct PipelineBarriers {
    uint32_t first;

    FS_DEVICE uint32_t full(int stage) const { return first + 16 * stage; }
    FS_DEVICE uint32_t empty(int stage) const { return first + 16 * stage + 8; }

    // `consumers` arrive at empty; the producers arrive at full, and TMA's bytes complete it.
    FS_DEVICE void init(int stages, int consumers, int producers = 1) const {
        for (int stage = 0; stage < stages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
};

// A pipeline of tiles of `kTileBytes` each, starting at `tiles`, in the producer or a consumer.
// With kCtas = 2, two CTAs fill it together: both hold the same tiles at the same time, and a tile
// is free when it is free in both.
template <int kStages, int kTileBytes, int kCtas = 1>
struct TilePipeline {
    uint32_t tiles;
    PipelineBarriers barriers;
    PipelineState<kStages> state;
    uint32_t peer_barriers = 0;  // address in the other CTA

    FS_DEVICE TilePipeline(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers{barriers} {
        if constexpr (kCtas == 2) peer_barriers = cluster_address(barriers, cluster_rank() ^ 1);
    }
    // Arrivals per round at an empty barrier; see consumer_release().
    FS_DEVICE static constexpr int arrivals_at_empty(int warpgroups) {
        return warpgroups * (kWarpsPerWarpgroup + kCtas - 1);
    }

    FS_DEVICE uint32_t tile() const { return tiles + state.stage() * kTileBytes; }
    FS_DEVICE uint32_t full() const { return barriers.full(state.stage()); }

    // Producer side: waits until the tile is free, then makes full() wait for the bytes of its
    // copies.
    FS_DEVICE void producer_acquire() const {
        producer_wait();
        producer_expect();
    }
    FS_DEVICE void producer_wait() const {
        mbarrier_wait(barriers.empty(state.stage()), state.phase() ^ 1);
    }
    FS_DEVICE void producer_expect() const { mbarrier_arrive_expect(full(), kTileBytes); }

    // Consumer side. One lane of each warp releases the tile when the whole warp is done with it.
    // In the other CTA one warp arrives for its whole warpgroup. That suffices because a wgmma is
    // executed by the whole warpgroup, and a warpgroup that issued none has not read the tile.
    FS_DEVICE void consumer_wait() const { mbarrier_wait(full(), state.phase()); }
    FS_DEVICE void consumer_release(int warp, int lane) {
        if (lane == 0) mbarrier_arrive(barriers.empty(state.stage()));
        if constexpr (kCtas == 2)
            if (warp == kWarpsPerWarpgroup - 1 && lane == 1)
                mbarrier_arrive_remote(PipelineBarriers{peer_barriers}.empty(state.stage()));
        state.advance();
    }
};

}  // namespace flashsmith
