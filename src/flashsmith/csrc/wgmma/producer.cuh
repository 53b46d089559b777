// The producer: one thread that copies the tiles of Q, K and V to shared memory, in the order in
// which the consumer warpgroups use them.
#pragma once

#include "sm90/tma.cuh"
#include "wgmma/scheduler.cuh"

namespace flashsmith {

template <class Kernel>
struct Producer {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using TileInfo = TileInfoOf<Kernel>;
    static constexpr bool kPacked = SEMANTICS.packed;
    static constexpr bool kPacksKeys = packs_keys(SEMANTICS);

    const typename Kernel::Args& args;
    const uint32_t smem;
    TilePipeline<Kernel::Q_slots, Kernel::Q_tile_bytes> Q;
    TilePipeline<CFG.kv_stages, Kernel::K_tile_bytes, CFG.cluster_size> K;
    TilePipeline<CFG.kv_stages, Kernel::V_tile_bytes, CFG.cluster_size> V;

    FS_DEVICE Producer(const typename Kernel::Args& args, uint32_t smem)
        : args(args),
          smem(smem),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers) {}

    // K of the first block comes before Q, whose slots may still be in use. After that, a block's K
    // comes before the V of the preceding block, in the order in which the GEMMs need them.
    FS_DEVICE void run() {
        prefetch_maps();
        TileScheduler<Kernel> scheduler(args, smem);
        for (TileInfo tile = scheduler.find_tile(); tile.is_valid(); tile = scheduler.find_tile()) {
            if constexpr (Kernel::has_lists) {
                load_listed_blocks(tile, scheduler);
                continue;
            }
            // Canonical kernels start with the first block, others with the last.
            constexpr int kNext = Kernel::canonical ? 1 : -1;
            int block = Kernel::canonical ? tile.block_begin : tile.block_end - 1;
            const int last = Kernel::canonical ? tile.block_end - 1 : tile.block_begin;
            const auto is_before_last = [&] {
                return Kernel::canonical ? block < last : block > last;
            };
            if (is_before_last() || block == last) load(K, &args.k, tile, block);
            load_Q(tile);
            for (; is_before_last(); block += kNext) {
                load(K, &args.k, tile, block + kNext);
                load(V, &args.v, tile, block);
            }
            // The next tile is prefetched only here: a CTA that prefetched earlier would hold two
            // tiles while others have none left. The number arrives while the last V waits for a
            // free stage.
            scheduler.prefetch_tile();
            if (block == last) load(V, &args.v, tile, block);
            scheduler.advance();
        }
        send_end();
    }

  private:
    // Loads a tile that visits the blocks of a list. An entry is requested while the block before
    // it waits for a free stage.
    FS_DEVICE void load_listed_blocks(const TileInfo& tile, TileScheduler<Kernel>& scheduler) {
        const int32_t* const entries = tile.list + kBlockListHeader;
        if constexpr (Kernel::canonical) {
            load_ascending(tile, entries);
            scheduler.prefetch_tile();
            scheduler.advance();
            return;
        }
        int i = tile.block_end - 1;
        BlockEntry entry{i >= 0 ? entries[i] : 0}, next{i >= 1 ? entries[i - 1] : 0};
        if (i >= 0) load_K(tile, entry);
        load_Q(tile);
#pragma unroll 1
        for (; i > 0; --i) {
            const BlockEntry after{i >= 2 ? entries[i - 2] : 0};
            load_K(tile, next);
            load(V, &args.v, tile, entry.block());
            entry = next;
            next = after;
        }
        scheduler.prefetch_tile();
        if (i == 0) load(V, &args.v, tile, entry.block());
        scheduler.advance();
    }
    FS_DEVICE void load_ascending(const TileInfo& tile, const int32_t* entries) {
        const int end = tile.block_end;
        BlockEntry entry{end > 0 ? entries[0] : 0}, next{end > 1 ? entries[1] : 0};
        if (end > 0) load_K(tile, entry);
        load_Q(tile);
#pragma unroll 1
        for (int i = 0; i < end; ++i) {
            const BlockEntry after{i + 2 < end ? entries[i + 2] : 0};
            if (i + 1 < end) load_K(tile, next);
            load(V, &args.v, tile, entry.block());
            entry = next;
            next = after;
        }
    }
    // The entry is in shared memory before K's full barrier completes.
    FS_DEVICE void load_K(const TileInfo& tile, BlockEntry entry) {
        K.producer_wait();
        store_shared_4B(smem + Kernel::entry_offset + 4 * K.state.stage(), entry.bits);
        load(K, &args.k, tile, entry.block());
    }

    // Loads one Q slot per warpgroup, together with the tile's info.
    FS_DEVICE void load_Q(const TileInfo& tile) {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            Q.producer_wait();
            const TileInfo info = tile.template of_warpgroup<Kernel>(w);
            info.template store<Kernel::info_has_q_count>(info_slot());
            Q.producer_expect();
            const auto box = box_of_queries<Kernel>(args, info, info.first_row);
            load_panels<Kernel::n_panels, Kernel::Q_panel_bytes>(Q.tile(), &args.q, box, Q.full());
            Q.state.advance();
        }
    }

    // Each CTA of a cluster loads a part of the rows, for all CTAs.
    template <class Pipeline>
    FS_DEVICE void load(Pipeline& pipeline, const TensorMap* map, const TileInfo& tile, int block) {
        constexpr int kRows = Kernel::B_c / CFG.cluster_size;
        const int first = CFG.cluster_size == 1 ? 0 : cluster_rank() * kRows;
        int k_first = tile.k_first;
        if constexpr (SEMANTICS.partial && !kPacked)
            k_first += tile.batch * rows_of_batch(map == &args.k);
        const auto box = box_of_rows<kPacksKeys>(block * Kernel::B_c + first, k_first, tile.k_count,
                                                 tile.head_k, tile.batch);
        pipeline.producer_acquire();
        load_panels<Pipeline::kBytes / Kernel::KV_panel_bytes, Kernel::KV_panel_bytes,
                    CFG.cluster_size>(pipeline.tile() + first * Kernel::Panel::kRowBytes, map, box,
                                      pipeline.full());
        pipeline.state.advance();
    }

    // The distance between batches in a map that has them one after another: see rows_of_batches()
    // in plan.cc.
    FS_DEVICE int rows_of_batch(bool of_k) const {
        const ForwardKernelArgs& p = args.problem;
        return static_cast<int>(of_k ? p.k_batch_stride : p.v_batch_stride);
    }

    template <int kPanels, int kPanelBytes, int kCtas = 1, bool kPackedBox>
    FS_DEVICE void load_panels(uint32_t tile, const TensorMap* map, TmaBox<kPackedBox> box,
                               uint32_t full) {
        // The copies of long rows, unrolled, would need more registers than a producer has.
        constexpr int kUnrolled = kPanels > 4 ? 1 : kPanels;
#pragma unroll kUnrolled
        for (int p = 0; p < kPanels; ++p) {
            box.column = p * Kernel::Panel::kColumns;
            if constexpr (kCtas == 1)
                tma_load(tile + p * kPanelBytes, map, box, full);
            else
                tma_load_multicast(tile + p * kPanelBytes, map, box, full, (1 << kCtas) - 1);
        }
    }

    FS_DEVICE void prefetch_maps() const {
        tma_prefetch_map(&args.q);
        tma_prefetch_map(&args.k);
        tma_prefetch_map(&args.v);
        if constexpr (!SEMANTICS.partial) tma_prefetch_map(&args.o);
    }

    FS_DEVICE void send_end() {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            Q.producer_wait();
            TileInfo::invalid().template store<Kernel::info_has_q_count>(info_slot());
            mbarrier_arrive(Q.full());
            Q.state.advance();
        }
    }

    FS_DEVICE uint32_t info_slot() const {
        return smem + Kernel::info_offset + Q.state.stage() * Kernel::info_bytes;
    }
};

}  // namespace flashsmith
