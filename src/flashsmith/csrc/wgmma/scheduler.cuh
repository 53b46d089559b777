// Which tile comes next, and what the producer tells the warpgroups about it.
#pragma once

#include "common/visible_keys.cuh"
#include "wgmma/pipeline.cuh"

namespace flashsmith {

FS_DEVICE uint32_t quotient(uint32_t n, const Divisor& by) {
    return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// Up to B_r rows of one head's queries and the K/V blocks they see.
struct WorkTile {
    int first_row, row_end;  // in its sequence
    int head, batch;
    int block_begin, block_end;
    int q_first, q_count;  // rows of the sequence: its first in the tensor, and how many
    int k_count;
    int k_first, head_k;  // the producer's own

    FS_DEVICE static WorkTile none() { return {0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0}; }
    FS_DEVICE bool exists() const { return batch >= 0; }
    FS_DEVICE int n_blocks() const { return block_end - block_begin; }

    // As one warpgroup is told: first_row is that of its own rows, at row_end or later where it has
    // none.
    template <class Kernel>
    FS_DEVICE WorkTile of_warpgroup(int warpgroup) const {
        int place = warpgroup;
        if constexpr (Kernel::last_rows_first) {
            const int all = (row_end - first_row + kWarpgroupRows - 1) / kWarpgroupRows;
            const int last = min(all, Kernel::n_warpgroups) - 1;
            if (warpgroup <= last) place = last - warpgroup;
        }
        WorkTile told = *this;
        told.first_row += place * kWarpgroupRows;
        return told;
    }

    // What warpgroups are told; of q_count only where sequences differ (kCounts).
    template <bool kCounts>
    FS_DEVICE void store(uint32_t smem) const {
        store_shared_16B(
            smem, {unsigned(first_row), unsigned(head), unsigned(batch), unsigned(block_begin)});
        store_shared_16B(smem + 16, {unsigned(block_end), unsigned(q_first), unsigned(row_end),
                                     unsigned(k_count)});
        if constexpr (kCounts) store_shared_16B(smem + 32, {unsigned(q_count), 0, 0, 0});
    }
    // The same in every lane, and the compiler is told so.
    template <bool kCounts>
    FS_DEVICE static WorkTile load(uint32_t smem, int q_count) {
        const uint4 a = load_shared_16B(smem), b = load_shared_16B(smem + 16);
        const auto uniform = [](uint32_t x) { return int(__shfl_sync(0xffffffffu, x, 0)); };
        if constexpr (kCounts) q_count = uniform(load_shared_16B(smem + 32).x);
        return {
            .first_row = uniform(a.x),
            .row_end = uniform(b.z),
            .head = uniform(a.y),
            .batch = uniform(a.z),
            .block_begin = uniform(a.w),
            .block_end = uniform(b.x),
            .q_first = uniform(b.y),
            .q_count = q_count,
            .k_count = uniform(b.w),
            .k_first = 0,
            .head_k = 0,
        };
    }
};

// Hands out the tiles of one CTA, one after the other. The CTAs of a cluster have neighbouring
// tiles of one head, a group, and go through the same K/V blocks: those that any of them sees. The
// first of them asks for the next group, and tells the other. Tiles that would keep a few SMs busy
// for one more round come in parts, see splits_last_tiles().
template <class Kernel>
struct TileScheduler {
    static constexpr HopperForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    static constexpr int kCtas = CFG.cluster_size;
    static constexpr bool kTold = CFG.schedule == Schedule::dynamic && kCtas > 1;
    static constexpr bool kSplits = splits_last_tiles(CFG, SEMANTICS);
    static constexpr bool kKeepsShortTilesBack = keeps_short_tiles_back(CFG, SEMANTICS);

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
            if (!SEMANTICS.packed || work.first_row - int(rank) * Kernel::B_r < work.row_end)
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
        int part = -1;
        if (kSplits && tile >= args.n_whole_tiles) {
            const uint32_t of_tiles = tile - args.n_whole_tiles;
            const uint32_t split = quotient(of_tiles, args.tile_parts);
            part = of_tiles - split * args.tile_parts.divisor;
            tile = args.n_whole_tiles + split;
        }
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
        } else if (kKeepsShortTilesBack && tile >= args.first_of_last_heads) {
            const uint32_t longs = args.long_tiles;
            const bool is_short = tile >= args.first_short_tile;
            const uint32_t of_head = is_short ? args.head_tiles.divisor - longs : longs;
            const uint32_t place =
                tile - (is_short ? args.first_short_tile : args.first_of_last_heads);
            sequence = place / of_head;
            group = place - sequence * of_head + (is_short ? longs : 0);
            sequence += quotient(args.first_of_last_heads, args.head_tiles);
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
        const auto [first_row, row_end] = rows_of(group, part, q.count);
        const int rows = kCtas > 1 ? kRows : row_end - first_row;
        const BlockRange blocks =
            VisibleKeys<SEMANTICS>(p, q.count, k.count).blocks(first_row, rows, Kernel::B_c);
        return {
            .first_row = first_row + int(rank) * Kernel::B_r,
            .row_end = row_end,
            .head = head,
            .batch = batch,
            .block_begin = blocks.begin,
            // Not every tile has rows for all its parts.
            .block_end =
                !kSplits || first_row < row_end ? max(blocks.begin, blocks.end) : blocks.begin,
            .q_first = int(q.first),
            .q_count = q.count,
            .k_count = k.count,
            .k_first = int(k.first),
            .head_k = int(quotient(head, args.group)),
        };
    }

    // Of a head's tile number `group`, or of one part of it, in a sequence of `count` rows. Under a
    // mask the first tile is the short one: its rows see the fewest keys. Without one the last two
    // tiles share their rows: one warpgroup by itself would take hardly less time than two beside
    // each other.
    struct Rows {
        int first, end;
    };
    FS_DEVICE static Rows rows_of(int group, int part, int count) {
        if constexpr (kCtas > 1) return {group * kCtas * Kernel::B_r, count};
        constexpr int kWarpgroups = Kernel::n_warpgroups;
        int first = group * kWarpgroups, end = first + kWarpgroups;  // in warpgroups' rows
        const int all = (count + kWarpgroupRows - 1) / kWarpgroupRows;
        const int last = (all + kWarpgroups - 1) / kWarpgroups - 1;  // tile
        if constexpr (SEMANTICS.mask != MaskKind::none) {
            const int missing = (last + 1) * kWarpgroups - all;
            if (group <= last) {
                first = max(first - missing, 0);
                end -= missing;
            }
        } else if constexpr (kWarpgroups > 2) {
            const int before = (last - 1) * kWarpgroups;
            const int middle = before + (all - before + 1) / 2;
            if (last > 0 && group == last - 1) end = middle;
            if (last > 0 && group == last) first = middle;
        }
        if (part >= 0) {
            first += part;
            end = min(end, first + 1);
        }
        return {first * kWarpgroupRows, min(end * kWarpgroupRows, count)};
    }
};

}  // namespace flashsmith
