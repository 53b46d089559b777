// The producer of the kernel for sequences with many rows: a warpgroup that copies the tiles of Q,
// and the tiles of K and V from the cache. Two warps copy K, the other two copy V, and one of the
// latter also copies Q. One warp could not request small copies as fast as they are needed.
//
// K and V are copied by TMA, box by box. Boxes of few keys take TMA longer than their bytes would.
// For small pages the threads therefore copy rows by cp.async. A lane reads the page indices of its
// boxes or rows one block ahead.
#pragma once

#include "mma_sync_decode/warpgroup_tiles.cuh"

namespace flashsmith {

// What a warp copies: K, or V and Q. kGathers: whether threads copy rows.
template <class Kernel, bool kOfK, bool kGathers>
struct CacheProducer {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr unsigned kAllLanes = 0xffffffffu;
    using Panel = typename Kernel::Panel;
    // The rows of a tile that one warp gathers, and the steps that this takes, one row per lane.
    static constexpr int kWarpKeys = Kernel::B_c / kProducersOfTile;
    static_assert(Kernel::B_c <= kFewestBoxKeys * kProducersOfTile * kWarpSize,
                  "a thread copies at most one box of a tile");
    static constexpr int kSteps = kGathers ? (kWarpKeys + kWarpSize - 1) / kWarpSize : 1;

    const WarpgroupKernelArgs& args;
    const uint32_t smem;
    const int warp, lane;  // one of kProducersOfTile warps
    TilePipeline<Kernel::Q_slots, Kernel::Q_tile_bytes> Q;
    // The panels of the tensor that this warp copies.
    static constexpr int kPanels = kOfK ? Kernel::n_panels : Kernel::V_panels;
    TilePipeline<CFG.kv_stages, kPanels * Kernel::KV_panel_bytes> KV;

    FS_DEVICE CacheProducer(const WarpgroupKernelArgs& args, uint32_t smem)
        : args(args),
          smem(smem),
          warp(__shfl_sync(kAllLanes, thread_index() / kWarpSize % kProducersOfTile, 0)),
          lane(lane_index()),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          KV(smem + (kOfK ? Kernel::K_offset : Kernel::V_offset),
             smem + (kOfK ? Kernel::K_barriers : Kernel::V_barriers)) {}

    FS_DEVICE void run() {
        const bool leads = kOfK && warp == 0 && lane == 0;
        if (leads) prefetch_maps();
        CachedTiles<Kernel> tiles(args, smem, leads);
        for (WorkTileInfo tile = tiles.find_tile(); tile.is_valid(); tile = tiles.find_tile()) {
            // Canonical kernels start with the first block, others with the last.
            constexpr int kNext = Kernel::canonical ? 1 : -1;
            const int count = tile.n_blocks();
            int block = Kernel::canonical ? tile.block_begin : tile.block_end - 1;
            Sources next = sources_of(tile, block);
            // Before V, which is needed later. K does not wait for Q's slots to be free.
            if (!kOfK && warp == 0) load_Q(tile);
#pragma unroll 1
            for (int i = 0; i < count; ++i, block += kNext) {
                const Sources now = next;
                next = sources_of(tile, block + kNext);
                KV.producer_wait();
                if constexpr (kGathers)
                    gather(tile, block, now);
                else
                    load_box(tile, block, now);
                KV.state.advance();
            }
            // The next tile is prefetched only here: a CTA that prefetched earlier would hold two
            // tiles while others have none left. The tile's number arrives while the last V waits
            // for a free stage.
            tiles.prefetch_tile();
            tiles.advance();
        }
        if (!kOfK && warp == 0) send_end();
    }

  private:
    // The blocks of the cache that hold the keys of this thread's box, or of its rows.
    struct Sources {
        int of_step[kSteps];
    };

    // The first key of this thread's box of a block, or the key of its row in a step.
    FS_DEVICE int key_of_thread(int block, int step) const {
        const int key = kGathers ? warp * kWarpKeys + step * kWarpSize + lane
                                 : (lane * kProducersOfTile + warp) * args.box_keys;
        return block * Kernel::B_c + key;
    }
    // Page indices are clamped, so an invalid index still refers to a page of the cache. Keys
    // beyond the sequence have no page.
    FS_DEVICE Sources sources_of(const WorkTileInfo& tile, int block) const {
        Sources sources;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            int& source = sources.of_step[step];
            source = tile.batch;
            if (args.page_table == nullptr) continue;
            const int key = key_of_thread(block, step);
            source = 0;
            if (static_cast<uint32_t>(key) >= static_cast<uint32_t>(tile.k_count)) continue;
            const int page = args.by_page.divide(key);
            const int number = args.page_table[tile.batch * args.page_table_stride + page];
            source = min(max(number, 0), args.blocks - 1);
        }
        return sources;
    }
    // The key's slot in its block of the cache.
    FS_DEVICE int slot_of(int key) const {
        if (args.page_table == nullptr) return key;
        return key - args.by_page.divide(key) * static_cast<int>(args.by_page.divisor);
    }

    // Requests this thread's box. Rows beyond the sequence may hold anything in the cache. They are
    // outside the map, as in box_of_rows(), and arrive as zeros.
    FS_DEVICE void load_box(const WorkTileInfo& tile, int block, const Sources& sources) {
        const int key = key_of_thread(block, 0), in_tile = key - block * Kernel::B_c;
        if (in_tile == 0) KV.producer_expect();
        if (in_tile >= Kernel::B_c) return;
        const int left = min(max(tile.k_count - key, 0), args.box_keys);
        const int row = sources.of_step[0] * (kOfK ? args.k_rows : args.v_rows) + slot_of(key);
        TmaBox<true> box{0, kRowsOfMap - left, row + left, tile.head_k};
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
            box.column = p * Panel::kColumns;
            tma_load(KV.tile() + in_tile * Panel::kRowBytes + p * Kernel::KV_panel_bytes,
                     kOfK ? &args.forward.k : &args.forward.v, box, KV.full());
        }
    }

    // Copies the warp's rows. Rows beyond the sequence are zero-filled and not read.
    FS_DEVICE void gather(const WorkTileInfo& tile, int block, const Sources& sources) {
        constexpr int kRows = kWarpSize / Panel::kChunks;  // of one instruction
        const CacheStrides& strides = kOfK ? args.k_strides : args.v_strides;
        const int chunk = lane % Panel::kChunks;
        const auto* const cache =
            static_cast<const char*>(kOfK ? args.k_cache : args.v_cache) + chunk * kChunkBytes;
        const int last = tile.k_count - block * Kernel::B_c;
        const int columns = kOfK && CFG.d_v > 0 ? args.d : args.forward.problem.d;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t own = sources.of_step[step] * strides.block +
                                 slot_of(key_of_thread(block, step)) * strides.row +
                                 tile.head_k * strides.head;
            constexpr int kLeft = kWarpKeys % kWarpSize == 0 ? kWarpSize : kWarpKeys % kWarpSize;
#pragma unroll 4
            for (int i = 0; i < (step == kSteps - 1 ? kLeft : kWarpSize); i += kRows) {
                const int row_of_step = i + lane / Panel::kChunks;
                const char* const from =
                    cache + int64_t{__shfl_sync(kAllLanes, own, row_of_step)} * kChunkBytes;
                const int row = warp * kWarpKeys + step * kWarpSize + row_of_step;
                const uint32_t to = KV.tile() + Panel::offset(row, chunk);
#pragma unroll
                for (int p = 0; p < kPanels; ++p)
                    cp_async_16B_or_zeros(
                        to + p * Kernel::KV_panel_bytes, from + p * Panel::kRowBytes,
                        row < last && p * Panel::kColumns + chunk * kChunkElements < columns);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        tma_store_fence();  // the MMA reads the rows through the same proxy
        __syncwarp();
        if (lane == 0) mbarrier_arrive(KV.full());
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
                    box.column = p * Panel::kColumns;
                    tma_load(Q.tile() + p * Kernel::Q_panel_bytes, &args.forward.q, box, Q.full());
                }
            }
            Q.state.advance();
        }
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

    FS_DEVICE void prefetch_maps() const {
        tma_prefetch_map(&args.forward.q);
        tma_prefetch_map(&args.forward.k);
        tma_prefetch_map(&args.forward.v);
        tma_prefetch_map(&args.forward.o);
    }

    FS_DEVICE uint32_t info_slot() const {
        return smem + Kernel::info_offset + Q.state.stage() * Kernel::info_bytes;
    }
};

}  // namespace flashsmith
