// The producer: a warp that copies blocks of keys from the cache to shared memory, section by
// section. Each lane copies the keys of one box, which lie in one block of the cache.
#pragma once

#include "mla/tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "wgmma_mla/static_kernel_configuration.cuh"

namespace flashsmith {

// The barriers of both stages. A section is full when all its panels are. Its empty barrier is the
// one of its first panel.
template <class Kernel>
FS_DEVICE PipelineBarriers section_barriers(uint32_t smem) {
    return {smem + Kernel::barrier_offset};
}
// The barrier of the section's panel, which counts from the section's first one.
template <class Kernel>
FS_DEVICE constexpr int barrier_index(int stage, int section, int panel = 0) {
    return stage * Kernel::arrivals + Kernel::first_arrival(section) +
           panel / Kernel::joint_panels(section);
}
// The phase in which a stage is full with the i-th block.
FS_DEVICE uint32_t phase_of(int i) {
    return i / kMlaStages % 2;
}

template <class Kernel>
struct MlaProducer {
    const MlaTile<Kernel>& tile;
    const MlaKernelArgs& args;
    const uint32_t smem;
    const int lane, box;  // box: the lane's first key in a block

    FS_DEVICE MlaProducer(const MlaTile<Kernel>& tile, uint32_t smem)
        : tile(tile),
          args(tile.args),
          smem(smem),
          lane(lane_index()),
          box(lane * tile.args.box_keys) {}

    FS_DEVICE void run(const BlockRange& blocks) {
        if (lane == 0) tma_prefetch_map(&args.cache);
        int next = source(blocks.begin);
#pragma unroll 1
        for (int block = blocks.begin; block < blocks.end; ++block) {
            const int now = next;
            next = source(block + 1);  // read one block ahead
            load(block - blocks.begin, block * kMlaKeys + box, now);
        }
    }

  private:
    // The block of the cache that holds the lane's keys. Page indices are clamped, so an invalid
    // index still refers to a page of the cache.
    FS_DEVICE int source(int block) const {
        if (args.page_table == nullptr) return tile.batch;
        const int key = block * kMlaKeys + box;
        if (box >= kMlaKeys || key >= tile.k_count) return 0;
        const int page = args.page_table[tile.batch * args.page_table_stride + key / args.slots];
        return min(max(page, 0), args.blocks - 1);
    }

    // Rows beyond the sequence may hold anything in the cache. They are outside the map, as in
    // box_of_rows(), and arrive as zeros.
    FS_DEVICE void load(int i, int key, int cache_block) const {
        const int stage = i % kMlaStages;
        const int slot = args.page_table == nullptr ? key : key % args.slots;
        const int left = min(max(tile.k_count - key, 0), args.box_keys);
        TmaBox<true> from{0, kRowsOfMap - left, cache_block * args.map_rows + slot + left, 0};
        const uint32_t to =
            smem + Kernel::K_offset + stage * Kernel::tile_bytes + box * Kernel::Panel::kRowBytes;
        // In the order in which sections become free and are read.
        load_section<kTail>(i, from, to);
        load_section<0>(i, from, to);
        load_section<1>(i, from, to);
    }
    template <int kSection>
    FS_DEVICE void load_section(int i, TmaBox<true> from, uint32_t to) const {
        const int first = barrier_index<Kernel>(i % kMlaStages, kSection);
        const PipelineBarriers barriers = section_barriers<Kernel>(smem);
        mbarrier_wait(barriers.empty(first), phase_of(i) ^ 1);
        constexpr int kPanels = Kernel::section_panels(kSection),
                      kJoint = Kernel::joint_panels(kSection);
        if (lane == 0) {
#pragma unroll
            for (int a = 0; a < kPanels / kJoint; ++a)
                mbarrier_arrive_expect(barriers.full(first + a), kJoint * Kernel::panel_bytes);
        }
        __syncwarp();
        if (box >= kMlaKeys) return;
#pragma unroll
        for (int p = Kernel::first_panel(kSection); p < Kernel::first_panel(kSection) + kPanels;
             ++p) {
            from.column = p * Kernel::Panel::kColumns;
            const uint32_t full =
                barriers.full(first + (p - Kernel::first_panel(kSection)) / kJoint);
            if constexpr (Kernel::CFG.evict_keys)
                tma_load(to + p * Kernel::panel_bytes, &args.cache, from, full, cache_hint(true));
            else
                tma_load(to + p * Kernel::panel_bytes, &args.cache, from, full);
        }
    }
};

}  // namespace flashsmith
