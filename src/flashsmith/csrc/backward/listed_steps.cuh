// The lists of a backward pass, and the steps of a tile of keys whose lists name the blocks of
// queries to visit: see common/block_lists.cuh.
#pragma once

#include "backward/args.cuh"
#include "common/block_lists.cuh"

namespace flashsmith {

FS_DEVICE uint32_t tiles_of(int rows, int tile) {
    return static_cast<uint32_t>((rows + tile - 1) / tile);
}

// The lists of the blocks of B_r queries that each tile of B_c keys visits.
template <class Kernel>
FS_DEVICE BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> query_lists(
    const BackwardKernelArgs& p, const ProgramArgs& program) {
    return {p, program.lists, tiles_of(p.seq_k, Kernel::B_c),
            static_cast<int>(tiles_of(p.seq_q, Kernel::B_r))};
}

// The lists of the blocks of step_keys keys that each tile of dq_rows queries visits.
template <class Kernel>
FS_DEVICE BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> key_lists(const BackwardKernelArgs& p,
                                                                      const ProgramArgs& program) {
    return {p, program.lists, tiles_of(p.seq_q, Kernel::dq_rows),
            static_cast<int>(tiles_of(p.seq_k, Kernel::step_keys))};
}

struct RowsOfSequence {
    SequenceRows q, k;
};
template <Semantics SEMANTICS>
FS_DEVICE RowsOfSequence rows_of_sequence(const BackwardKernelArgs& p, int batch) {
    return {sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, batch, p.seq_q, p.total_q),
            sequence_rows<SEMANTICS.packed>(p.cu_seqlens_k, batch, p.seq_k, p.total_k)};
}

// A step: a block of queries of one head.
struct ListedStep {
    BlockEntry entry;
    int head;  // counted from the first query head of the tile of keys

    FS_DEVICE void store(uint32_t smem) const {
        store_shared_4B(smem, static_cast<uint32_t>(entry.bits));
        store_shared_4B(smem + 4, static_cast<uint32_t>(head));
    }
    // Only one lane reads the step, so that it may release the stage afterwards.
    FS_DEVICE static ListedStep load(uint32_t smem, int lane) {
        uint32_t bits = 0, head = 0;
        if (lane == 0) {
            bits = load_shared_4B(smem);
            head = load_shared_4B(smem + 4);
        }
        return {{static_cast<int>(__shfl_sync(0xffffffffu, bits, 0))},
                static_cast<int>(__shfl_sync(0xffffffffu, head, 0))};
    }
};

// The steps of an existing tile of keys, one head after the other. `Tile` provides the lists,
// list_of(head), the number of heads, n_heads(), and whether lists are read from the end,
// backwards().
template <Semantics SEMANTICS, class Tile>
struct ListedQueries {
    const Tile tile;
    ListedStep now{{0}, 0};
    const int32_t* list = nullptr;
    int place = 0, count = 0;
    int32_t next = 0;  // the next entry, which is requested one step ahead

    FS_DEVICE explicit ListedQueries(const Tile& tile) : tile(tile) {}

    FS_DEVICE int n_steps() const {
        if constexpr (!SEMANTICS.mask_by_head) return tile.list_of(0)[0] * tile.n_heads();
        int sum = 0;
        for (int head = 0; head < tile.n_heads(); ++head) sum += tile.list_of(head)[0];
        return sum;
    }
    FS_DEVICE void begin() {
        now.head = -1;
        next_head();
    }
    FS_DEVICE void advance() {
        if (++place == count) return next_head();
        now.entry.bits = next;
        if (place + 1 < count) next = entry_at(place + 1);
    }

  private:
    FS_DEVICE void next_head() {
        do {
            list = tile.list_of(++now.head);
            count = list[0];
        } while (count == 0);
        place = 0;
        now.entry.bits = entry_at(0);
        if (count > 1) next = entry_at(1);
    }
    FS_DEVICE int32_t entry_at(int place) const {
        return list[kBlockListHeader + (tile.backwards() ? count - 1 - place : place)];
    }
};

}  // namespace flashsmith
