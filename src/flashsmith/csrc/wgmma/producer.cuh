// The producer: one thread that copies the tiles of Q, K and V to shared memory, in the order in
// which the warpgroups use them.
#pragma once

#include "wgmma/coordinates.cuh"
#include "wgmma/pipeline.cuh"
#include "wgmma/static_kernel_configuration.cuh"

namespace flashsmith {

template <class Kernel>
struct Producer {
    static constexpr HopperForwardKernelConfig CFG = Kernel::CFG;
    static constexpr bool kPacked = Kernel::SEMANTICS.packed;

    const HopperForwardKernelArgs& args;
    const uint32_t smem;
    TileRing<Kernel::Q_slots, Kernel::Q_tile_bytes> Q;
    TileRing<CFG.kv_stages, Kernel::KV_tile_bytes, CFG.cluster_size> K, V;

    FS_DEVICE Producer(const HopperForwardKernelArgs& args, uint32_t smem)
        : args(args),
          smem(smem),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers) {}

    // K of the first block comes before Q, whose slots may still be in use; after that a block's K
    // comes before the V of the block before it, as the products want them.
    FS_DEVICE void run() {
        prefetch_maps();
        TileScheduler<Kernel> scheduler(args, smem);
        for (WorkTile tile = scheduler.find(); tile.exists(); tile = scheduler.find()) {
            int block = tile.block_end - 1;
            if (block >= tile.block_begin) load(K, &args.k, tile, block);
            load_Q(tile);
            for (; block > tile.block_begin; --block) {
                load(K, &args.k, tile, block - 1);
                load(V, &args.v, tile, block);
            }
            // Here and not sooner: who asks early has two tiles when others run out of them. The
            // answer comes while the last V waits for its place.
            scheduler.ask();
            if (block == tile.block_begin) load(V, &args.v, tile, block);
            scheduler.take();
        }
        announce_end();
    }

  private:
    // A slot for each warpgroup, and word of the tile in it.
    FS_DEVICE void load_Q(const WorkTile& tile) {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            mbarrier_wait(Q.barriers.empty(Q.place.stage()), Q.place.parity() ^ 1);
            const WorkTile mine = tile.of_warpgroup<Kernel>(w);
            mine.template store<Kernel::tells_q_count>(notice());
            mbarrier_arrive_expect(Q.full(), Kernel::Q_tile_bytes);
            const auto box = box_of_rows<kPacked>(mine.first_row, mine.q_first, mine.row_end,
                                                  mine.head, mine.batch);
            load_panels<Kernel::Q_panel_bytes>(Q.tile(), &args.q, box, Q.full());
            Q.place.advance();
        }
    }

    // The CTAs of a cluster load a part of the rows each, for all.
    template <class Ring>
    FS_DEVICE void load(Ring& ring, const TensorMap* map, const WorkTile& tile, int block) {
        constexpr int kRows = Kernel::B_c / CFG.cluster_size;
        const int first = CFG.cluster_size == 1 ? 0 : cluster_rank() * kRows;
        const auto box = box_of_rows<kPacked>(block * Kernel::B_c + first, tile.k_first,
                                              tile.k_count, tile.head_k, tile.batch);
        ring.begin_fill();
        load_panels<Kernel::KV_panel_bytes, CFG.cluster_size>(
            ring.tile() + first * Kernel::Panel::kRowBytes, map, box, ring.full());
        ring.place.advance();
    }

    template <int kPanelBytes, int kCtas = 1>
    FS_DEVICE void load_panels(uint32_t tile, const TensorMap* map, TmaBox<kPacked> box,
                               uint32_t full) {
#pragma unroll
        for (int p = 0; p < Kernel::n_panels; ++p) {
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
        tma_prefetch_map(&args.o);
    }

    FS_DEVICE void announce_end() {
#pragma unroll 1
        for (int w = 0; w < Kernel::n_warpgroups; ++w) {
            mbarrier_wait(Q.barriers.empty(Q.place.stage()), Q.place.parity() ^ 1);
            WorkTile::none().template store<Kernel::tells_q_count>(notice());
            mbarrier_arrive(Q.full());
            Q.place.advance();
        }
    }

    FS_DEVICE uint32_t notice() const {
        return smem + Kernel::notices + Q.place.stage() * Kernel::notice_bytes;
    }
};

}  // namespace flashsmith
