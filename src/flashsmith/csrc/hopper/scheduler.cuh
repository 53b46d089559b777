// Which tile comes next, and what the producer tells the warpgroups about it.
#pragma once

#include "../visible_keys.cuh"
#include "pipeline.cuh"

namespace flashsmith {

FS_DEVICE uint32_t quotient(uint32_t n, const Divisor& by) {
    return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// B_r rows of one head's queries and the K/V blocks they see.
struct WorkTile {
    int first_row;  // in its sequence
    int head, batch;
    int block_begin, block_end;
    int q_first, q_count;  // rows of the sequence: its first in the tensor, and how many
    int k_count;
    int k_first, head_k;  // the producer's own

    FS_DEVICE static WorkTile none() { return {0, 0, -1, 0, 0, 0, 0, 0, 0, 0}; }
    FS_DEVICE bool exists() const { return batch >= 0; }
    FS_DEVICE int n_blocks() const { return block_end - block_begin; }

    FS_DEVICE void store(uint32_t smem) const {
        store_shared_16B(
            smem, {unsigned(first_row), unsigned(head), unsigned(batch), unsigned(block_begin)});
        store_shared_16B(smem + 16, {unsigned(block_end), unsigned(q_first), unsigned(q_count),
                                     unsigned(k_count)});
    }
    // The same in every lane, and the compiler is told so.
    FS_DEVICE static WorkTile load(uint32_t smem) {
        const uint4 a = load_shared_16B(smem), b = load_shared_16B(smem + 16);
        const auto uniform = [](uint32_t x) { return int(__shfl_sync(0xffffffffu, x, 0)); };
        return {uniform(a.x),
                uniform(a.y),
                uniform(a.z),
                uniform(a.w),
                uniform(b.x),
                uniform(b.y),
                uniform(b.z),
                uniform(b.w),
                0,
                0};
    }
};

// Hands out the tiles of one CTA, one after the other. The CTAs of a cluster have neighbouring
// tiles of one head, a group, and go through the same K/V blocks: those that any of them sees. The
// first of them asks for the next group, and tells the other.
template <class Kernel>
struct TileScheduler {
    static constexpr HopperForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    static constexpr int kCtas = CFG.cluster_size;
    static constexpr bool kTold = CFG.schedule == Schedule::dynamic && kCtas > 1;

    const HopperForwardKernelArgs& args;
    const uint32_t smem;
    const uint32_t rank = kCtas > 1 ? cluster_rank() : 0;
    uint32_t tile = blockIdx.x / kCtas;  // of a cluster: its group
    uint32_t asked = 0;                  // dynamic: the answer to ask(), on its way
    RingPlace<1> answer;

    FS_DEVICE TileScheduler(const HopperForwardKernelArgs& args, uint32_t smem)
        : args(args), smem(smem) {}

    // The first tile with rows in it, from here on; WorkTile::none() where there is none.
    FS_DEVICE WorkTile find() {
        for (; tile < args.n_tiles; take()) {
            const WorkTile work = work_of(tile);
            // A packed batch has as many tiles per sequence as its longest one needs.
            if (!SEMANTICS.packed || work.first_row - int(rank) * Kernel::B_r < work.q_count)
                return work;
            ask();
        }
        return WorkTile::none();
    }
    // Asks for the tile after this one. The answer takes its time.
    FS_DEVICE void ask() {
        if constexpr (CFG.schedule == Schedule::dynamic)
            if (rank == 0) asked = atomicAdd(args.tile_counter, 1);
    }
    // Moves on to the tile that was asked for.
    FS_DEVICE void take() {
        if constexpr (CFG.schedule == Schedule::one_tile) tile = args.n_tiles;
        if constexpr (CFG.schedule == Schedule::static_persistent) tile += gridDim.x / kCtas;
        if constexpr (CFG.schedule == Schedule::dynamic) {
            // Every CTA asks until it is refused once, so n_tiles are asked for in all; whoever
            // asks last leaves the counter as it was found.
            if (rank == 0 && asked == args.n_tiles - 1) atomicExch(args.tile_counter, 0);
            if constexpr (kTold) pass_answer_on();
            tile = gridDim.x / kCtas + asked;
        }
    }

  private:
    // The full barrier is the told CTA's, the empty one the telling CTA's.
    FS_DEVICE void pass_answer_on() {
        const RingBarriers barriers{smem + Kernel::answer_barriers};
        const uint32_t place = smem + Kernel::answer;
        if (rank == 0) {
            mbarrier_wait(barriers.empty(0), answer.parity() ^ 1);
            store_remote_16B(cluster_address(place, 1), cluster_address(barriers.full(0), 1),
                             {asked, 0, 0, 0});
        } else {
            mbarrier_arrive_expect(barriers.full(0), sizeof(uint4));
            mbarrier_wait(barriers.full(0), answer.parity());
            asked = load_shared_16B(place).x;
            mbarrier_arrive_remote(cluster_address(barriers.empty(0), 0));
        }
        answer.advance();
    }

    FS_DEVICE WorkTile work_of(uint32_t tile) const {
        const ForwardKernelArgs& p = args.problem;
        uint32_t sequence, group;
        if constexpr (CFG.tile_order == TileOrder::longest_first) {
            const uint32_t section = quotient(tile, args.section_tiles);
            const uint32_t place = tile - section * args.section_tiles.divisor;
            const uint32_t first_head = section * args.section_heads.divisor;
            const uint32_t heads =
                min(args.section_heads.divisor, p.batch * p.heads_q - first_head);
            // The last section may have fewer.
            const uint32_t row = heads == args.section_heads.divisor
                                     ? quotient(place, args.section_heads)
                                     : place / heads;
            sequence = first_head + place - row * heads;
            group = args.head_tiles.divisor - 1 - row;
        } else {
            sequence = quotient(tile, args.head_tiles);
            group = tile - sequence * args.head_tiles.divisor;
        }
        const int batch = quotient(sequence, args.heads_q);
        const int head = sequence - batch * p.heads_q;
        const SequenceRows q =
            sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, batch, p.seq_q, p.total_q);
        const SequenceRows k =
            sequence_rows<SEMANTICS.packed>(p.cu_seqlens_k, batch, p.seq_k, p.total_k);
        constexpr int kRows = kCtas * Kernel::B_r;
        const int first_row = group * kRows;
        const BlockRange blocks =
            VisibleKeys<SEMANTICS>(p, q.count, k.count).blocks(first_row, kRows, Kernel::B_c);
        return {
            .first_row = first_row + int(rank) * Kernel::B_r,
            .head = head,
            .batch = batch,
            .block_begin = blocks.begin,
            .block_end = max(blocks.begin, blocks.end),
            .q_first = int(q.first),
            .q_count = q.count,
            .k_count = k.count,
            .k_first = int(k.first),
            .head_k = int(quotient(head, args.group)),
        };
    }
};

}  // namespace flashsmith
