// The producer of the kernel for sequences with many rows: a warp that copies the tiles of Q, and
// those of K and V from the cache, in the order in which the consumer warpgroups use them. Each
// lane requests one box of a tile of K or V, whose number in the page table it has read before.
#pragma once

#include "mma_sync_decode/warpgroup_tiles.cuh"

namespace flashsmith {

template <class Kernel>
struct CacheProducer {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr unsigned kAllLanes = 0xffffffffu;

    const WarpgroupKernelArgs& args;
    const uint32_t smem;
    const int lane;
    TilePipeline<Kernel::Q_slots, Kernel::Q_tile_bytes> Q;
    TilePipeline<CFG.kv_stages, Kernel::KV_tile_bytes> K, V;

    FS_DEVICE CacheProducer(const WarpgroupKernelArgs& args, uint32_t smem)
        : args(args),
          smem(smem),
          lane(lane_index()),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers) {}

    // K of the first block comes before Q, whose slots may still be in use. After that, a block's K
    // comes before the V of the preceding block. Page numbers are read two blocks ahead.
    FS_DEVICE void run() {
        if (lane == 0) prefetch_maps();
        CachedTiles<Kernel> tiles(args);
        for (WorkTileInfo tile = tiles.find_tile(); tile.is_valid(); tile = tiles.find_tile()) {
            // Canonical kernels start with the first block, others with the last.
            constexpr int kNext = Kernel::canonical ? 1 : -1;
            const int count = tile.n_blocks();
            int block = Kernel::canonical ? tile.block_begin : tile.block_end - 1;
            int source = block_of_box(tile, block, lane);
            int next_source = block_of_box(tile, block + kNext, lane);
            if (count > 0) load(K, &args.forward.k, args.k_rows, tile, block, source);
            load_Q(tile);
#pragma unroll 1
            for (int i = 1; i < count; ++i, block += kNext) {
                const int after = block_of_box(tile, block + 2 * kNext, lane);
                load(K, &args.forward.k, args.k_rows, tile, block + kNext, next_source);
                load(V, &args.forward.v, args.v_rows, tile, block, source);
                source = next_source;
                next_source = after;
            }
            // As in Producer::run(), the number arrives while the last V waits for a free stage.
            tiles.prefetch_tile();
            if (count > 0) load(V, &args.forward.v, args.v_rows, tile, block, source);
            tiles.advance();
        }
        send_end();
    }

  private:
    // The block of the cache that holds the keys of a tile's box. Clamped, so that an invalid
    // number leads to some page of the cache. Keys beyond the sequence have no entry in the page
    // table.
    FS_DEVICE int block_of_box(const WorkTileInfo& tile, int block, int box) const {
        if (args.page_table == nullptr) return tile.batch;
        const int key = block * Kernel::B_c + box * args.box_keys;
        if (static_cast<uint32_t>(key) >= static_cast<uint32_t>(tile.k_count)) return 0;
        const int page = args.by_page.divide(key);
        const int number = args.page_table[tile.batch * args.page_table_stride + page];
        return min(max(number, 0), args.blocks - 1);
    }

    // Loads one Q slot per warpgroup, together with the tile's info.
    FS_DEVICE void load_Q(const WorkTileInfo& tile) {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            Q.producer_wait();
            if (lane == 0) {
                const WorkTileInfo info = tile.of_warpgroup<Kernel>(w);
                info.store<Kernel::info_has_q_count>(info_slot());
                Q.producer_expect();
                auto box = box_of_queries<Kernel>(args.forward, info, info.first_row);
#pragma unroll
                for (int p = 0; p < Kernel::n_panels; ++p) {
                    box.column = p * Kernel::Panel::kColumns;
                    tma_load(Q.tile() + p * Kernel::Q_panel_bytes, &args.forward.q, box, Q.full());
                }
            }
            Q.state.advance();
        }
    }

    // Copies a tile of keys or values, box by box. Rows beyond the sequence are outside the map, as
    // in box_of_rows(): they may hold anything in the cache, and arrive as zeros.
    template <class Pipeline>
    FS_DEVICE void load(Pipeline& pipeline, const TensorMap* map, int rows_of_block,
                        const WorkTileInfo& tile, int block, int source) {
        const int keys = args.box_keys, boxes = Kernel::B_c / keys;
        pipeline.producer_wait();
        if (lane == 0) pipeline.producer_expect();
#pragma unroll 1
        for (int box = lane; box < boxes; box += kWarpSize) {
            if (box >= kWarpSize) source = block_of_box(tile, block, box);
            const int key = block * Kernel::B_c + box * keys;
            const int left = min(max(tile.k_count - key, 0), keys);
            int slot = key;
            if (args.page_table != nullptr)
                slot -= args.by_page.divide(key) * static_cast<int>(args.by_page.divisor);
            load_box(pipeline.tile() + box * keys * Kernel::Panel::kRowBytes, map,
                     {0, kRowsOfMap - left, source * rows_of_block + slot + left, tile.head_k},
                     pipeline.full());
        }
        pipeline.state.advance();
    }
    FS_DEVICE static void load_box(uint32_t target, const TensorMap* map, TmaBox<true> box,
                                   uint32_t full) {
#pragma unroll
        for (int p = 0; p < Kernel::n_panels; ++p) {
            box.column = p * Kernel::Panel::kColumns;
            tma_load(target + p * Kernel::KV_panel_bytes, map, box, full);
        }
    }

    FS_DEVICE void prefetch_maps() const {
        tma_prefetch_map(&args.forward.q);
        tma_prefetch_map(&args.forward.k);
        tma_prefetch_map(&args.forward.v);
        tma_prefetch_map(&args.forward.o);
    }

    FS_DEVICE void send_end() {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            Q.producer_wait();
            if (lane == 0) {
                WorkTileInfo::invalid().store<Kernel::info_has_q_count>(info_slot());
                mbarrier_arrive(Q.full());
            }
            Q.state.advance();
        }
    }

    FS_DEVICE uint32_t info_slot() const {
        return smem + Kernel::info_offset + Q.state.stage() * Kernel::info_bytes;
    }
};

}  // namespace flashsmith
