// The tiles of the kernel for sequences with many rows; only the device knows their number.
#pragma once

#include "mma_sync_decode/warpgroup_config.cuh"
#include "sm90_forward/work_tile.cuh"

namespace flashsmith {

// Hands out the tiles of a CTA, one after another, to the warps of the producer. Tiles are ordered
// by sequence, then by sections of K/V heads that fit in L2, and within a section the last rows of
// all heads come first.
template <class Kernel>
struct CachedTiles {
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr unsigned kAllLanes = 0xffffffffu;
    // The barrier's id comes after the ids of the consumers' barriers: see StageOrder.
    static constexpr int kBarrier = 1 + 2 * Kernel::n_warpgroups;

    const WarpgroupKernelArgs& args;
    const ForwardKernelArgs& problem;
    const uint32_t smem;
    const bool leads;  // whether this thread requests numbers
    const int lane;
    uint32_t tile = block_index();
    uint32_t prefetched = 0;  // if this thread leads: the counter's value, perhaps still in flight
    int round = 0;

    struct Sequence {
        int q_first, q_count, k_count;
        int tiles;  // tiles of one query head; 0 if other kernels compute the sequence
    };

    FS_DEVICE CachedTiles(const WarpgroupKernelArgs& args, uint32_t smem, bool leads)
        : args(args), problem(args.forward.problem), smem(smem), leads(leads), lane(lane_index()) {}

    // Clamped, so that no value of cache_lens or cu_seqlens_q refers to anything outside the cache
    // or the tensors.
    FS_DEVICE Sequence sequence(int batch) const {
        const SequenceRows q = sequence_rows<SEMANTICS.packed>(problem.cu_seqlens_q, batch,
                                                               problem.seq_q, problem.total_q);
        int keys = min(max(args.cache_lens[batch], 0), args.capacity);
        if (args.appends != 0) keys = min(keys + q.count, args.capacity);
        const int group = static_cast<int>(args.forward.heads_per_kv_head.divisor);
        const bool is_ours = q.count * group > args.most_rows;
        return {static_cast<int>(q.first), q.count, keys,
                is_ours ? (q.count + Kernel::B_r - 1) / Kernel::B_r : 0};
    }
    FS_DEVICE uint32_t items(const Sequence& s) const { return s.tiles * problem.heads_q; }

    // The current tile, or WorkTileInfo::invalid() after the last one. Every search starts at the
    // first sequence: the producer has few registers, and the consumers have work for longer.
    FS_DEVICE WorkTileInfo find_tile() const {
        uint32_t before = 0;  // tiles of the sequences before `first`
#pragma unroll 1
        for (int first = 0; first < problem.batch; first += kWarpSize) {
            const uint32_t own = first + lane < problem.batch ? items(sequence(first + lane)) : 0;
            uint32_t end = own;  // where this lane's sequence ends, counted from `before`
#pragma unroll
            for (int step = 1; step < kWarpSize; step *= 2) {
                const uint32_t below = __shfl_up_sync(kAllLanes, end, step);
                if (lane >= step) end += below;
            }
            const uint32_t of_all = __shfl_sync(kAllLanes, end, kWarpSize - 1);
            const uint32_t within = tile - before;
            if (within >= of_all) {
                before += of_all;
                continue;
            }
            const int i = __popc(__ballot_sync(kAllLanes, end <= within));
            const uint32_t begin = __shfl_sync(kAllLanes, end - own, i);
            return info_of(sequence(first + i), first + i, within - begin);
        }
        // All CTAs together make as many requests as there are tiles, and the last request resets
        // the counter.
        if (leads && tile - gridDim.x == before - 1) atomicExch(args.forward.tile_counter, 0);
        return WorkTileInfo::invalid();
    }
    // Requests the number of the tile after this one, which takes a while to arrive.
    FS_DEVICE void prefetch_tile() {
        if (leads) prefetched = atomicAdd(args.forward.tile_counter, 1);
    }
    // Moves on to the next tile, which was prefetched. The number alternates between two slots,
    // because a warp may still read the previous one.
    FS_DEVICE void advance() {
        const uint32_t place = smem + Kernel::broadcast_offset + round * sizeof(uint32_t);
        round ^= 1;
        if (leads) store_shared_4B(place, prefetched);
        named_barrier_wait(kBarrier, kWarpgroupThreads);
        tile = gridDim.x + load_shared_4B(place);
    }

  private:
    FS_DEVICE WorkTileInfo info_of(const Sequence& s, int batch, uint32_t index) const {
        const uint32_t group = args.forward.heads_per_kv_head.divisor;
        const auto heads_k = static_cast<uint32_t>(problem.heads_k);
        // Sections are as even as possible: if the last section had few heads, its tiles would
        // leave SMs idle.
        const uint32_t fitting =
            max(static_cast<uint32_t>(args.section_keys) / max(s.k_count, 1), 1u);
        const uint32_t sections = (heads_k + fitting - 1) / fitting;
        const uint32_t in_section = (heads_k + sections - 1) / sections;
        const uint32_t section = index / (in_section * group * s.tiles);
        const uint32_t first_head = section * in_section;
        const uint32_t offset = index - first_head * group * s.tiles;
        const uint32_t heads = min(in_section, heads_k - first_head) * group;
        const uint32_t row = offset / heads;
        const uint32_t head = first_head * group + offset - row * heads;
        const auto [first_row, row_end] =
            tile_rows<Kernel>(s.tiles - 1 - static_cast<int>(row), -1, s.q_count);
        const BlockRange blocks =
            visible_blocks<Kernel>(KeyMask<SEMANTICS>(problem, s.q_count, s.k_count), args.forward,
                                   first_row, row_end - first_row);
        return {
            .first_row = first_row,
            .row_end = row_end,
            .head = static_cast<int>(head),
            .batch = batch,
            .block_begin = blocks.begin,
            .block_end = max(blocks.begin, blocks.end),
            .q_first = s.q_first,
            .q_count = s.q_count,
            .k_count = s.k_count,
            .k_first = 0,
            .head_k = static_cast<int>(head / group),
        };
    }
};

}  // namespace flashsmith
