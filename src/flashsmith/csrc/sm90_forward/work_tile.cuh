// The info about a tile of queries that the producer passes to the consumer warpgroups.
#pragma once

#include "common/block_lists.cuh"
#include "common/split_keys.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

FS_DEVICE uint32_t quotient(uint32_t n, const Reciprocal& by) {
    return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// The token of a row in its sequence, and the query head of a row. `head` is the tile's head; with
// pack_gqa, it is a key head. A group then has a power of two of heads, which plan.cc ensures.
template <class Kernel>
FS_DEVICE int token_of(const HopperForwardKernelArgs& args, int row) {
    return Kernel::packs_gqa ? row >> args.heads_per_kv_head.shift : row;
}
template <class Kernel>
FS_DEVICE int head_of(const HopperForwardKernelArgs& args, int head, int row) {
    const int group = args.heads_per_kv_head.divisor;
    return Kernel::packs_gqa ? head * group + (row & (group - 1)) : head;
}

// The K/V blocks that any of the `rows` rows sees.
template <class Kernel>
FS_DEVICE BlockRange visible_blocks(const KeyMask<Kernel::SEMANTICS>& visible,
                                    const HopperForwardKernelArgs& args, int first_row, int rows) {
    if constexpr (!Kernel::packs_gqa) return visible.blocks(first_row, rows, Kernel::B_c);
    const int first = token_of<Kernel>(args, first_row);
    const int last = token_of<Kernel>(args, first_row + max(rows, 1) - 1);
    return visible.blocks(first, last - first + 1, Kernel::B_c);
}

// Up to B_r rows of the queries of one head or group, and the K/V blocks that they see.
struct WorkTileInfo {
    int first_row, row_end;  // in its sequence
    int head, batch;         // with pack_gqa, head is a key head
    int block_begin, block_end;
    int q_first, q_count;  // the sequence's first row in the tensor, and its number of rows
    int k_count;
    int k_first, head_k;  // used only by the producer

    FS_DEVICE static WorkTileInfo invalid() { return {0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0}; }
    FS_DEVICE bool is_valid() const { return batch >= 0; }
    FS_DEVICE int n_blocks() const { return block_end - block_begin; }

    // The info for one warpgroup. first_row becomes the first of the warpgroup's own rows, or
    // row_end or later if it has none.
    template <class Kernel>
    FS_DEVICE WorkTileInfo of_warpgroup(int warpgroup) const {
        int index = warpgroup;
        if constexpr (Kernel::last_rows_first) {
            const int all = (row_end - first_row + kWarpgroupRows - 1) / kWarpgroupRows;
            const int last = min(all, Kernel::n_warpgroups) - 1;
            if (warpgroup <= last) index = last - warpgroup;
        }
        WorkTileInfo info = *this;
        info.first_row += index * kWarpgroupRows;
        return info;
    }

    // Stores the fields that consumers need in shared memory. q_count is stored only if sequences
    // differ (kHasCount).
    template <bool kHasCount>
    FS_DEVICE void store(uint32_t smem) const {
        store_shared_16B(
            smem, {unsigned(first_row), unsigned(head), unsigned(batch), unsigned(block_begin)});
        store_shared_16B(smem + 16, {unsigned(block_end), unsigned(q_first), unsigned(row_end),
                                     unsigned(k_count)});
        if constexpr (kHasCount) store_shared_16B(smem + 32, {unsigned(q_count), 0, 0, 0});
    }
    // The shuffles let the compiler know that the values are the same in every lane.
    template <bool kHasCount>
    FS_DEVICE static WorkTileInfo load(uint32_t smem, int q_count) {
        const uint4 a = load_shared_16B(smem), b = load_shared_16B(smem + 16);
        const auto uniform = [](uint32_t x) { return int(__shfl_sync(0xffffffffu, x, 0)); };
        if constexpr (kHasCount) q_count = uniform(load_shared_16B(smem + 32).x);
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

// The info about a tile in a kernel that splits keys.
struct WorkTilePart : WorkTileInfo {
    int part_row;  // its first row among the rows of parts; kNoPart: no part

    FS_DEVICE static WorkTilePart invalid() { return {WorkTileInfo::invalid(), kNoPart}; }

    template <class Kernel>
    FS_DEVICE WorkTilePart of_warpgroup(int warpgroup) const {
        const WorkTileInfo info = WorkTileInfo::of_warpgroup<Kernel>(warpgroup);
        const int rows = info.first_row - first_row;
        return {info, part_row == kNoPart ? kNoPart : part_row + rows};
    }
    template <bool>
    FS_DEVICE void store(uint32_t smem) const {
        WorkTileInfo::store<false>(smem);
        store_shared_16B(smem + 32, {unsigned(q_count), unsigned(part_row), 0, 0});
    }
    template <bool kHasCount>
    FS_DEVICE static WorkTilePart load(uint32_t smem, int q_count) {
        const WorkTileInfo info = WorkTileInfo::load<kHasCount>(smem, q_count);
        return {info, int(__shfl_sync(0xffffffffu, load_shared_16B(smem + 32).y, 0))};
    }
};

// The info about a tile that visits the blocks of a list. Block numbers are positions in the list.
struct WorkTileList : WorkTileInfo {
    const int32_t* list;
    int own_begin, own_end;  // the positions that a warpgroup's rows see
    int group_shift;         // see BlockEntry::is_full()

    FS_DEVICE static WorkTileList invalid() { return {WorkTileInfo::invalid(), nullptr, 0, 0, 0}; }

    template <class Kernel>
    FS_DEVICE WorkTileList of_warpgroup(int warpgroup) const {
        const WorkTileInfo info = WorkTileInfo::of_warpgroup<Kernel>(warpgroup);
        const int group = (info.first_row - first_row) / kWarpgroupRows;
        return {info, list, list[1 + 2 * group], list[2 + 2 * group], 2 * group};
    }
    template <bool>
    FS_DEVICE void store(uint32_t smem) const {
        WorkTileInfo::store<false>(smem);
        store_shared_16B(smem + 32, {unsigned(q_count), unsigned(own_begin), unsigned(own_end),
                                     unsigned(group_shift)});
    }
    template <bool kHasCount>
    FS_DEVICE static WorkTileList load(uint32_t smem, int q_count) {
        const WorkTileInfo info = WorkTileInfo::load<kHasCount>(smem, q_count);
        const uint4 own = load_shared_16B(smem + 32);
        const auto uniform = [](uint32_t x) { return int(__shfl_sync(0xffffffffu, x, 0)); };
        return {info, nullptr, uniform(own.y), uniform(own.z), uniform(own.w)};
    }
};

// The info about a tile in a canonical kernel, whose consumers read the list, too, to find the ends
// of chunks.
struct WorkTileChunks : WorkTileList {
    static constexpr int kBytes = 64;

    FS_DEVICE static WorkTileChunks invalid() { return {WorkTileList::invalid()}; }

    template <class Kernel>
    FS_DEVICE WorkTileChunks of_warpgroup(int warpgroup) const {
        return {WorkTileList::of_warpgroup<Kernel>(warpgroup)};
    }
    template <bool kHasCount>
    FS_DEVICE void store(uint32_t smem) const {
        WorkTileList::store<kHasCount>(smem);
        const auto address = reinterpret_cast<uint64_t>(list);
        store_shared_16B(smem + 48, {unsigned(address), unsigned(address >> 32), 0, 0});
    }
    template <bool kHasCount>
    FS_DEVICE static WorkTileChunks load(uint32_t smem, int q_count) {
        WorkTileChunks found{WorkTileList::load<kHasCount>(smem, q_count)};
        const uint4 address = load_shared_16B(smem + 48);
        found.list = reinterpret_cast<const int32_t*>(uint64_t{address.y} << 32 | address.x);
        return found;
    }
};

template <class Kernel>
using TileInfoOf =
    std::conditional_t<Kernel::has_lists,
                       std::conditional_t<Kernel::canonical, WorkTileChunks, WorkTileList>,
                       std::conditional_t<Kernel::splits_keys, WorkTilePart, WorkTileInfo>>;

// The box of a tile's queries that begins at `row`.
template <class Kernel>
FS_DEVICE auto box_of_queries(const HopperForwardKernelArgs& args, const WorkTileInfo& info,
                              int row) {
    constexpr bool kPacked = Kernel::SEMANTICS.packed;
    if constexpr (Kernel::packs_gqa)
        return box_of_group<kPacked>(token_of<Kernel>(args, row), info.q_first,
                                     token_of<Kernel>(args, info.row_end),
                                     head_of<Kernel>(args, info.head, row), info.batch);
    else
        return box_of_rows<kPacked>(row, info.q_first, info.row_end, info.head, info.batch);
}

// The rows of a head's tile, or of one part of it, in a sequence of `count` rows. Under a mask
// the first tile is the short one: its rows see the fewest keys. Without a mask the last two
// tiles share their rows: one warpgroup alone would take hardly less time than two together.
struct TileRows {
    int first, end;
};
template <class Kernel>
FS_DEVICE TileRows tile_rows(int tile_of_head, int part, int count) {
    constexpr int kCtas = Kernel::CFG.cluster_size;
    if constexpr (kCtas > 1) return {tile_of_head * kCtas * Kernel::B_r, count};
    constexpr int kWarpgroups = Kernel::n_warpgroups;
    // Counted in units of a warpgroup's rows.
    int first = tile_of_head * kWarpgroups, end = first + kWarpgroups;
    const int all = (count + kWarpgroupRows - 1) / kWarpgroupRows;
    const int last = (all + kWarpgroups - 1) / kWarpgroups - 1;  // index of the last tile
    if constexpr (kHidesKeys<Kernel::SEMANTICS>) {
        const int missing = (last + 1) * kWarpgroups - all;
        if (tile_of_head <= last) {
            first = max(first - missing, 0);
            end -= missing;
        }
    } else if constexpr (kWarpgroups > 2) {
        const int before = (last - 1) * kWarpgroups;
        const int middle = before + (all - before + 1) / 2;
        if (last > 0 && tile_of_head == last - 1) end = middle;
        if (last > 0 && tile_of_head == last) first = middle;
    }
    if (part >= 0) {
        first += part;
        end = min(end, first + 1);
    }
    return {first * kWarpgroupRows, min(end * kWarpgroupRows, count)};
}

}  // namespace flashsmith
