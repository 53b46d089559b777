// Lists of the blocks that tiles visit under the mask of a program: the K/V blocks of a tile of
// rows or, in backward passes, the blocks of rows of a tile of keys. Two small kernels write them
// in every call, before the main one, because the tensors that the mask reads may have changed.
// Causal and window limits and uneven ends are applied as well.
//
// A tile's rows (or keys) form groups, one for each warpgroup. A list has a header and the entries
// of its blocks in ascending order.
#pragma once

#include "common/program_scores.cuh"

namespace flashsmith {

// An entry: the index of a block, and two bits for each group. The bits are 0 if no row of the
// group sees a key of the block. kPartial: the mask function hides some keys. kWithinLimits: only
// causal and window limits and the ends of sequences hide some.
struct BlockEntry {
    int32_t bits;

    static constexpr int kBlockShift = 8;
    static constexpr uint32_t kPartial = 1, kWithinLimits = 2, kFull = 3, kAny = 3;

    FS_DEVICE int block() const { return bits >> kBlockShift; }
    // Whether nothing is hidden in a group's part of the block. `shift` is twice the group's index.
    FS_DEVICE bool is_full(int shift) const { return (bits >> shift & kAny) == kFull; }
    // Whether the group must evaluate the mask function, because the function hides some keys of
    // its part, or all of them if only other groups see the block.
    FS_DEVICE bool needs_function(int shift) const { return (bits >> shift & kWithinLimits) == 0; }

    // The bits of all groups for a block in which some rows do not exist: no group counts as full.
    FS_DEVICE static uint32_t not_full(uint32_t bits) { return bits & ~(bits >> 1 & 0x55555555u); }
};

// The ints before a list's entries: the number of entries, and for each group the index of the
// first entry that it sees and one past the index of the last.
constexpr int kMostListGroups = (kBlockListHeader - 1) / 2;

// The index of this warp in a kernel that writes lists, whose CTAs have kListThreads threads.
FS_DEVICE int64_t warp_of_lists() {
    return int64_t{block_index()} * (kListThreads / kWarpSize) + thread_index() / kWarpSize;
}

// Compacts a list: turns words, one per block, which hold the block's bits or zero if no group sees
// it, into entries and a header. A whole warp calls it.
template <int kGroups>
FS_DEVICE void compact_list(int32_t* list, int n_blocks) {
    static_assert(kGroups <= kMostListGroups);
    const int lane = lane_index();
    const uint32_t before = (1u << lane) - 1;
    int32_t* const entries = list + kBlockListHeader;
    int count = 0, begin[kGroups], end[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) begin[g] = end[g] = 0;
#pragma unroll 1
    for (int first = 0; first < n_blocks; first += kWarpSize) {
        const int block = first + lane;
        const uint32_t bits = block < n_blocks ? entries[block] : 0;
        const uint32_t present = __ballot_sync(0xffffffffu, bits != 0);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const uint32_t seen =
                __ballot_sync(0xffffffffu, (bits >> 2 * g & BlockEntry::kAny) != 0);
            if (seen == 0) continue;
            const uint32_t lowest = seen & -seen, highest = 1u << (31 - __clz(seen));
            if (begin[g] == end[g]) begin[g] = count + __popc(present & (lowest - 1));
            end[g] = count + __popc(present & (highest - 1)) + 1;
        }
        // Lanes write only where others have already read.
        __syncwarp();
        if (bits != 0)
            entries[count + __popc(present & before)] =
                static_cast<int32_t>(block << BlockEntry::kBlockShift | bits);
        count += __popc(present);
    }
    if (lane != 0) return;
    list[0] = count;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        list[1 + 2 * g] = begin[g];
        list[2 + 2 * g] = end[g];
    }
}

// The lists of a call in its workspace. A mask that depends on neither the sequence nor the head
// needs only one set of lists, unless sequences may differ in length (packed and partial kernels).
template <Semantics SEMANTICS, class Problem = ForwardKernelArgs>
struct BlockLists {
    static constexpr bool kByBatch = kListsByBatch<SEMANTICS>;
    static constexpr bool kByHead = SEMANTICS.mask_by_head;

    const Problem& problem;
    int32_t* lists;
    uint32_t tiles_per_head;
    int n_blocks;  // most blocks that a list may have

    FS_DEVICE int32_t* list(int64_t index) const {
        return lists + index * (kBlockListHeader + n_blocks);
    }
    FS_DEVICE int32_t* list(int batch, int head, int tile_of_head) const {
        int64_t index = 0;
        if constexpr (kByBatch) index = batch;
        if constexpr (kByHead) index = index * problem.heads_q + head;
        return list(index * tiles_per_head + tile_of_head);
    }
    FS_DEVICE int64_t count() const {
        return int64_t{kByBatch ? problem.batch : 1} * (kByHead ? problem.heads_q : 1) *
               tiles_per_head;
    }
    struct TileOfList {
        int batch, head, tile_of_head;
    };
    FS_DEVICE TileOfList tile_of(int64_t index) const {
        TileOfList found{0, 0, static_cast<int>(index % tiles_per_head)};
        auto rest = static_cast<uint32_t>(index / tiles_per_head);
        if constexpr (kByHead) {
            found.head = rest % problem.heads_q;
            rest /= problem.heads_q;
        }
        found.batch = rest;
        return found;
    }

    // The kernels that write lists. Each warp of the first kernel writes the bits of one block to
    // the list of one tile, and each warp of the second kernel compacts one list. `bits_of(tile,
    // block)` returns zero for a block that no group sees.
    template <class BitsOf>
    FS_DEVICE void enter_bits(const BitsOf& bits_of) const {
        const int64_t warp = warp_of_lists();
        const int64_t index = warp / n_blocks;
        if (index >= count()) return;
        const int block = static_cast<int>(warp % n_blocks);
        const uint32_t bits = bits_of(tile_of(index), block);
        if (lane_index() == 0) list(index)[kBlockListHeader + block] = static_cast<int>(bits);
    }
    template <int kGroups>
    FS_DEVICE void compact() const {
        const int64_t index = warp_of_lists();
        if (index < count()) compact_list<kGroups>(list(index), n_blocks);
    }
};

// The bits of a group in a BlockEntry, for the existing rows [first_row, row_end) and kKeys keys; a
// whole warp computes them. Keys past the end of the sequence count as hidden.
template <Semantics SEMANTICS, int kKeys, class Problem>
FS_DEVICE uint32_t visibility(const Problem& problem, const ProgramArgs& program,
                              const ProgramSequence& of, int head, int first_row, int row_end,
                              int first_key) {
    constexpr int kKeysOfLane = (kKeys + kWarpSize - 1) / kWarpSize, kRowsBetweenVotes = 8;
    const int lane = lane_index();
    bool sees = false, sees_all = true, hides = false;
#pragma unroll 1
    for (int row = first_row; row < row_end; row += kRowsBetweenVotes) {
#pragma unroll 2  // more unrolling would only use more registers
        for (int i = 0; i < kRowsBetweenVotes; ++i) {
            // Rows past the end repeat the last one.
            const int q = min(row + i, row_end - 1);
            const KeyRange range =
                visible_range<SEMANTICS>(problem, q + of.seq_k - of.seq_q, of.seq_k);
#pragma unroll
            for (int n = 0; n < kKeysOfLane; ++n) {
                const int column = lane + n * kWarpSize, k = first_key + column;
                if (kKeys % kWarpSize != 0 && column >= kKeys) continue;
                // The mask is evaluated for all keys, so that loads that depend only on the key can
                // be hoisted out of the loop over rows.
                const bool is_shown =
                    ProgramOf<SEMANTICS>::sees(program, of.batch, head, q, k, of.seq_q, of.seq_k);
                const bool is_within = range.contains(k);
                sees |= is_within & is_shown;
                sees_all &= is_within & is_shown;
                hides |= is_within & !is_shown;
            }
        }
        if (any_lane(sees) && any_lane(hides)) return BlockEntry::kPartial;
    }
    if (!any_lane(sees)) return 0;
    return any_lane(!sees_all) ? BlockEntry::kWithinLimits : BlockEntry::kFull;
}

// The bits of a block of kKeys keys in the list of the rows [first_row, row_end), in groups of
// kGroupRows. `range` holds the blocks that these rows see within the causal and window limits.
template <Semantics SEMANTICS, int kGroups, int kGroupRows, int kKeys, class Problem>
FS_DEVICE uint32_t bits_of_keys(const Problem& problem, const ProgramArgs& program,
                                const ProgramSequence& of, int head, int first_row, int row_end,
                                int block, const BlockRange& range) {
    uint32_t bits = 0;
    if (first_row >= row_end || block < range.begin || block >= range.end) return bits;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
        const int first = first_row + group * kGroupRows;
        bits |= visibility<SEMANTICS, kKeys>(problem, program, of, head, first,
                                             min(first + kGroupRows, row_end), block * kKeys)
                << 2 * group;
    }
    return bits;
}

// The bits of the block of rows [first_row, row_end) in the list of the keys from first_key on, in
// groups of kGroupKeys.
template <Semantics SEMANTICS, int kGroups, int kGroupKeys, class Problem>
FS_DEVICE uint32_t bits_of_rows(const Problem& problem, const ProgramArgs& program,
                                const ProgramSequence& of, int head, int first_row, int row_end,
                                int first_key) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group)
        bits |= visibility<SEMANTICS, kGroupKeys>(problem, program, of, head, first_row, row_end,
                                                  first_key + group * kGroupKeys)
                << 2 * group;
    return bits;
}

}  // namespace flashsmith
