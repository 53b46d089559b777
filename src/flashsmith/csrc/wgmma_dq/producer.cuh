// The producer: one thread that copies Q and do once, and K and V in every step.
#pragma once

#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "wgmma_dq/query_block.cuh"

namespace flashsmith {

template <class Kernel>
struct DqProducer {
    static constexpr WgmmaDqKernelConfig CFG = Kernel::CFG;
    static constexpr bool kPacked = Kernel::SEMANTICS.packed;

    const HopperDqKernelArgs& args;
    const uint32_t smem;
    const QueryBlock<Kernel>& tile;
    TilePipeline<CFG.k_stages, Kernel::K_tile_bytes> K;
    TilePipeline<CFG.v_stages, Kernel::V_tile_bytes> V;

    FS_DEVICE DqProducer(const HopperDqKernelArgs& args, uint32_t smem,
                         const QueryBlock<Kernel>& tile)
        : args(args),
          smem(smem),
          tile(tile),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers) {}

    FS_DEVICE void run() {
        if (tile.n_steps() == 0) return;
        if constexpr (Kernel::has_lists) return load_listed();
        int block = tile.blocks.begin;
        load_queries<Kernel::n_panels>(&args.q, Kernel::Q_offset, Kernel::Q_barrier);
        load_keys<Kernel::n_panels>(K, &args.k, block);
        load_queries<Kernel::V_panels>(&args.d_o, Kernel::do_offset, Kernel::do_barrier);
        load_keys<Kernel::V_panels>(V, &args.v, block);
#pragma unroll 1
        while (++block < tile.blocks.end) {
            load_keys<Kernel::n_panels>(K, &args.k, block);
            load_keys<Kernel::V_panels>(V, &args.v, block);
        }
    }

    // Loads a tile that visits the blocks of a list. The next entry is requested a step ahead.
    FS_DEVICE void load_listed() {
        const int32_t* const entries = tile.list + kBlockListHeader;
        const int n_steps = tile.n_steps();
        BlockEntry entry{entries[0]};
        load_queries<Kernel::n_panels>(&args.q, Kernel::Q_offset, Kernel::Q_barrier);
        load_listed_K(entry);
        load_queries<Kernel::V_panels>(&args.d_o, Kernel::do_offset, Kernel::do_barrier);
#pragma unroll 1
        for (int step = 1;; ++step) {
            const BlockEntry next{step < n_steps ? entries[step] : 0};
            load_keys<Kernel::V_panels>(V, &args.v, entry.block());
            if (step == n_steps) return;
            load_listed_K(next);
            entry = next;
        }
    }

  private:
    FS_DEVICE void load_listed_K(const BlockEntry& entry) {
        // The entry is in shared memory before K's full barrier completes.
        K.producer_wait();
        store_shared_4B(smem + Kernel::K_entries + 4 * K.state.stage(),
                        static_cast<uint32_t>(entry.bits));
        load_keys<Kernel::n_panels>(K, &args.k, entry.block());
    }

    template <int kPanels>
    FS_DEVICE void load_queries(const TensorMap* map, int offset, int barrier) {
        mbarrier_arrive_expect(smem + barrier, kPanels * Kernel::Q_panel_bytes);
        load_panels<kPanels>(
            smem + offset, Kernel::Q_panel_bytes, map,
            box_of_rows<kPacked>(tile.first_row, tile.q.first, tile.q.count, tile.head, tile.batch),
            smem + barrier);
    }

    template <int kPanels, class Pipeline>
    FS_DEVICE void load_keys(Pipeline& pipeline, const TensorMap* map, int block) {
        pipeline.producer_acquire();
        load_panels<kPanels>(pipeline.tile(), Kernel::KV_panel_bytes, map,
                             box_of_rows<kPacked>(block * Kernel::B_c, tile.k.first, tile.k.count,
                                                  tile.head_k, tile.batch),
                             pipeline.full());
        pipeline.state.advance();
    }

    template <int kPanels>
    FS_DEVICE void load_panels(uint32_t smem, int panel_bytes, const TensorMap* map,
                               TmaBox<kPacked> box, uint32_t full) {
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
            box.column = p * Kernel::Panel::kColumns;
            tma_load(smem + p * panel_bytes, map, box, full);
        }
    }
};

}  // namespace flashsmith
