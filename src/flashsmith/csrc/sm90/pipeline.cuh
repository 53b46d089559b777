// Pipelines: buffers in shared memory that the producer fills by TMA and the consumer warpgroups
// read. Each stage has two mbarriers, full and empty.
#pragma once

#include "common/barrier.cuh"

namespace flashsmith {

// The next of kStages stages, and the phase in which it becomes full. At the empty barrier, the
// producer waits for the opposite phase, so that it does not wait in the first round.
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
    // If kStages is a power of two, one counter is enough, which saves a register in the main loop.
    static constexpr bool kCounts = (kStages & (kStages - 1)) == 0;
    uint32_t steps_ = 0, phase_ = 0;
};

// The barriers of a pipeline: one pair for each stage, in shared memory from `first` on.
struct PipelineBarriers {
    uint32_t first;

    FS_DEVICE uint32_t full(int stage) const { return first + 16 * stage; }
    FS_DEVICE uint32_t empty(int stage) const { return first + 16 * stage + 8; }

    // `consumers` threads arrive at the empty barrier. The producers arrive at the full one, and
    // the bytes of TMA complete it.
    FS_DEVICE void init(int stages, int consumers, int producers = 1) const {
        for (int stage = 0; stage < stages; ++stage) {
            mbarrier_init(full(stage), producers);
            mbarrier_init(empty(stage), consumers);
        }
    }
};

// A pipeline of tiles with `kTileBytes` bytes each, which begin at `tiles`; the producer and each
// consumer have one. With kCtas = 2, two CTAs fill it together. Both have the same tiles at the
// same time, and a tile is free when both have released it.
template <int kStages, int kTileBytes, int kCtas = 1>
struct TilePipeline {
    static constexpr int kBytes = kTileBytes;

    uint32_t tiles;
    PipelineBarriers barriers;
    PipelineState<kStages> state;
    uint32_t peer_barriers = 0;  // address of the other CTA's barriers

    FS_DEVICE TilePipeline(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers{barriers} {
        if constexpr (kCtas == 2) peer_barriers = cluster_address(barriers, cluster_rank() ^ 1);
    }
    // The arrivals that an empty barrier gets per round; see consumer_release().
    FS_DEVICE static constexpr int arrivals_at_empty(int warpgroups) {
        return warpgroups * (kWarpsPerWarpgroup + kCtas - 1);
    }

    FS_DEVICE uint32_t tile() const { return tiles + state.stage() * kTileBytes; }
    FS_DEVICE uint32_t full() const { return barriers.full(state.stage()); }

    // For the producer: waits until the tile is free, and makes full() wait for the bytes of its
    // copies.
    FS_DEVICE void producer_acquire() const {
        producer_wait();
        producer_expect();
    }
    FS_DEVICE void producer_wait() const {
        mbarrier_wait(barriers.empty(state.stage()), state.phase() ^ 1);
    }
    FS_DEVICE void producer_expect() const { mbarrier_arrive_expect(full(), kTileBytes); }

    // Consumer side. When a whole warp has finished with the tile, one lane releases it. In the
    // other CTA, one warp arrives for its whole warpgroup. That is enough, because a whole
    // warpgroup executes a wgmma, and a warpgroup that has issued none has not read the tile.
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
