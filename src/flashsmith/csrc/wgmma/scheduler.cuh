// The tile scheduler: selects the next tile, and computes the info about it that the producer
// passes to the consumer warpgroups.
#pragma once

#include "sm90_forward/work_tile.cuh"

namespace flashsmith {

// The lists of K/V blocks that a call's tiles visit.
template <class Kernel>
FS_DEVICE BlockLists<Kernel::SEMANTICS> block_lists(const typename Kernel::Args& args) {
    return {args.problem, args.program.lists, args.tiles_per_head.divisor,
            args.problem.n_KV_blocks};
}

// Hands out the tiles of one CTA, one after another. The CTAs of a cluster have neighbouring tiles
// of one head, which count as one here. They all go through the K/V blocks that any of them sees.
// The first CTA prefetches the next tile's number and broadcasts it. Tiles that would keep a
// few SMs busy for one more round are split into parts; see splits_last_tiles() and split_keys.
template <class Kernel>
struct TileScheduler {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using TileInfo = TileInfoOf<Kernel>;

    static constexpr int kCtas = CFG.cluster_size;
    static constexpr bool kBroadcasts = CFG.schedule == Schedule::dynamic && kCtas > 1;
    static constexpr bool kSplits = splits_last_tiles(CFG, SEMANTICS);
    static constexpr bool kKeepsShortTilesBack = keeps_short_tiles_back(CFG, SEMANTICS);

    const typename Kernel::Args& args;
    const uint32_t smem;
    const uint32_t rank = kCtas > 1 ? cluster_rank() : 0;
    uint32_t tile = blockIdx.x / kCtas;
    uint32_t prefetched = 0;  // dynamic schedule: the counter's value, perhaps still in flight
    PipelineState<1> broadcast_state;

    FS_DEVICE TileScheduler(const typename Kernel::Args& args, uint32_t smem)
        : args(args), smem(smem) {}

    // The first tile from here on that has rows, or TileInfo::invalid() if there is none.
    FS_DEVICE TileInfo find_tile() {
        for (; tile < args.n_tiles; advance()) {
            const TileInfo info = info_of(tile);
            // In a packed batch, every sequence has as many tiles as the longest one needs.
            if (!SEMANTICS.packed || info.first_row - int(rank) * Kernel::B_r < info.row_end)
                return info;
            prefetch_tile();
        }
        return TileInfo::invalid();
    }
    // Requests the number of the tile after this one, which takes a while to arrive.
    FS_DEVICE void prefetch_tile() {
        if constexpr (CFG.schedule == Schedule::dynamic)
            if (rank == 0) prefetched = atomicAdd(args.tile_counter, 1);
    }
    // Moves on to the next tile, which was prefetched.
    FS_DEVICE void advance() {
        if constexpr (CFG.schedule == Schedule::one_tile) tile = args.n_tiles;
        if constexpr (CFG.schedule == Schedule::static_persistent) tile += gridDim.x / kCtas;
        if constexpr (CFG.schedule == Schedule::dynamic) {
            // Every CTA requests tiles until none is left, so n_tiles requests are made in all.
            // The last request resets the counter.
            if (rank == 0 && prefetched == args.n_tiles - 1) atomicExch(args.tile_counter, 0);
            if constexpr (kBroadcasts) broadcast();
            tile = gridDim.x / kCtas + prefetched;
        }
    }

    // Information about a tile, or about a part of one.
    FS_DEVICE TileInfo info_of(uint32_t tile) const {
        const ForwardKernelArgs& p = args.problem;
        int part = -1, part_row = kNoPart, part_of_keys = 0;
        if constexpr (Kernel::splits_keys) {
            if (tile >= args.n_whole_tiles) {
                const uint32_t of_parts = tile - args.n_whole_tiles;
                part_row = of_parts * Kernel::B_r;
                part_of_keys = of_parts % CFG.split_keys;
                tile = args.n_whole_tiles + of_parts / CFG.split_keys;
            }
        }
        if (kSplits && tile >= args.n_whole_tiles) {
            const uint32_t of_tiles = tile - args.n_whole_tiles;
            const uint32_t split = quotient(of_tiles, args.parts_per_tile);
            part = of_tiles - split * args.parts_per_tile.divisor;
            tile = args.n_whole_tiles + split;
        }
        uint32_t batch_head, tile_of_head;
        if constexpr (CFG.tile_order == TileOrder::longest_first) {
            const uint32_t group = quotient(tile, args.tiles_per_group);
            const uint32_t offset = tile - group * args.tiles_per_group.divisor;
            const uint32_t first_head = group * args.heads_per_group.divisor;
            const uint32_t heads =
                min(args.heads_per_group.divisor, p.batch * tiled_heads() - first_head);
            // The last group may have fewer heads.
            const uint32_t row = heads == args.heads_per_group.divisor
                                     ? quotient(offset, args.heads_per_group)
                                     : offset / heads;
            batch_head = first_head + offset - row * heads;
            tile_of_head = args.tiles_per_head.divisor - 1 - row;
        } else if (kKeepsShortTilesBack && tile >= args.first_of_last_heads) {
            const uint32_t longs = args.long_tiles;
            const bool is_short = tile >= args.first_short_tile;
            const uint32_t of_head = is_short ? args.tiles_per_head.divisor - longs : longs;
            const uint32_t offset =
                tile - (is_short ? args.first_short_tile : args.first_of_last_heads);
            batch_head = offset / of_head;
            tile_of_head = offset - batch_head * of_head + (is_short ? longs : 0);
            batch_head += quotient(args.first_of_last_heads, args.tiles_per_head);
        } else {
            batch_head = quotient(tile, args.tiles_per_head);
            tile_of_head = tile - batch_head * args.tiles_per_head.divisor;
        }
        const int batch = quotient(batch_head, args.heads_q);
        const int head = batch_head - batch * tiled_heads();
        const SequenceRows q =
            sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, batch, p.seq_q, p.total_q);
        const SequenceRows k = key_rows<SEMANTICS>(p, batch);
        constexpr int kRows = kCtas * Kernel::B_r;
        int q_rows = q.count;
        if constexpr (Kernel::packs_gqa) q_rows *= args.heads_per_kv_head.divisor;
        const auto [first_row, row_end] = tile_rows<Kernel>(tile_of_head, part, q_rows);
        const int rows = kCtas > 1 ? kRows : row_end - first_row;
        BlockRange blocks =
            visible_blocks<Kernel>(KeyMask<SEMANTICS>(p, q.count, k.count), args, first_row, rows);
        if constexpr (Kernel::splits_keys)
            if (part_row != kNoPart) blocks = part_of<CFG.split_keys>(blocks, part_of_keys);
        const WorkTileInfo info = {
            .first_row = first_row + int(rank) * Kernel::B_r,
            .row_end = row_end,
            .head = head,
            .batch = batch,
            .block_begin = blocks.begin,
            // Not every tile has rows for all of its parts.
            .block_end =
                !kSplits || first_row < row_end ? max(blocks.begin, blocks.end) : blocks.begin,
            .q_first = int(q.first),
            .q_count = q.count,
            .k_count = k.count,
            .k_first = int(k.first),
            .head_k = Kernel::packs_gqa ? head : int(quotient(head, args.heads_per_kv_head)),
        };
        if constexpr (Kernel::has_lists)
            return with_list(info, batch, head, tile_of_head);
        else if constexpr (Kernel::splits_keys)
            return {info, part_row};
        else
            return info;
    }

  private:
    // The info about a tile whose blocks are positions in its list.
    FS_DEVICE TileInfo with_list(WorkTileInfo info, int batch, int head, int tile_of_head) const {
        const int32_t* const list = block_lists<Kernel>(args).list(batch, head, tile_of_head);
        info.block_begin = 0;
        info.block_end = list[0];
        return {WorkTileList{info, list, 0, 0, 0}};
    }

    // Sends the number from the first CTA to the second, through the second's full and the first's
    // empty barrier.
    FS_DEVICE void broadcast() {
        const PipelineBarriers barriers{smem + Kernel::broadcast_barriers};
        const uint32_t slot = smem + Kernel::broadcast_offset;
        if (rank == 0) {
            mbarrier_wait(barriers.empty(0), broadcast_state.phase() ^ 1);
            store_remote_16B(cluster_address(slot, 1), cluster_address(barriers.full(0), 1),
                             {prefetched, 0, 0, 0});
        } else {
            mbarrier_arrive_expect(barriers.full(0), sizeof(uint4));
            mbarrier_wait(barriers.full(0), broadcast_state.phase());
            prefetched = load_shared_16B(slot).x;
            mbarrier_arrive_remote(cluster_address(barriers.empty(0), 0));
        }
        broadcast_state.advance();
    }

    // The number of heads of a sequence that have separate tiles.
    FS_DEVICE int tiled_heads() const {
        return Kernel::packs_gqa ? args.problem.heads_k : args.problem.heads_q;
    }
};

}  // namespace flashsmith
