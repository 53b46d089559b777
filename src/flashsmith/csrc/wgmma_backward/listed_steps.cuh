// The steps of a block of keys that visits the blocks of queries of lists: see
// common/block_lists.cuh.
#pragma once

#include "common/block_lists.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

template <class Kernel>
FS_DEVICE BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> block_lists(
    const typename Kernel::Args& args) {
    const BackwardKernelArgs& p = args.problem;
    return {p, args.program.lists, static_cast<uint32_t>((p.seq_k + Kernel::B_c - 1) / Kernel::B_c),
            (p.seq_q + Kernel::B_r - 1) / Kernel::B_r};
}

// With ordered_dq: the order in which blocks of keys add to a block of queries. The workspace has
// these numbers behind the lists.
template <class Kernel>
struct BlockRanks {
    BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> lists;

    // How many blocks of keys before that of a list visit a block of queries.
    FS_DEVICE int32_t& rank(int64_t list, int block) const {
        return behind_lists()[list * lists.n_blocks + block];
    }
    // How many blocks of keys of a list's head visit it.
    FS_DEVICE int32_t& total(int64_t list, int block) const {
        return behind_lists()[(lists.count() + list / lists.tiles_per_head) * lists.n_blocks +
                              block];
    }

  private:
    FS_DEVICE int32_t* behind_lists() const { return lists.list(lists.count()); }
};

// A step as it is passed to the consumers.
struct ListedStep {
    BlockEntry entry;
    int head;  // counted from the first query head of the block of keys

    FS_DEVICE void store(uint32_t smem) const {
        store_shared_4B(smem, static_cast<uint32_t>(entry.bits));
        store_shared_4B(smem + 4, static_cast<uint32_t>(head));
    }
    // One lane reads, and may then release the stage.
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

// The steps of a block of keys, which must exist.
template <class Kernel>
struct ListedSteps {
    const typename Kernel::Args& args;
    const KeyBlock<Kernel>& keys;
    ListedStep now{{0}, 0};
    const int32_t* list = nullptr;
    int place = 0, count = 0;
    int32_t next = 0;  // the entry after this one, which is requested a step ahead

    FS_DEVICE ListedSteps(const typename Kernel::Args& args, const KeyBlock<Kernel>& keys)
        : args(args), keys(keys) {}

    FS_DEVICE const int32_t* list_of(int head) const {
        return block_lists<Kernel>(args).list(keys.batch, keys.first_head + head,
                                              keys.first_key / Kernel::B_c);
    }
    // With ordered_dq: this step's turn to add to its block of queries.
    FS_DEVICE uint32_t turn() const {
        const BlockRanks<Kernel> ranks{block_lists<Kernel>(args)};
        const int64_t number =
            (list - ranks.lists.lists) / (kBlockListHeader + ranks.lists.n_blocks);
        const int block = now.entry.block(), rank = ranks.rank(number, block);
        return keys.direction < 0 ? rank : ranks.total(number, block) - 1 - rank;
    }
    FS_DEVICE int n_steps() const {
        if (keys.first_key >= keys.k.count) return 0;
        if constexpr (!SEMANTICS.mask_by_head) return list_of(0)[0] * keys.n_heads;
        int sum = 0;
        for (int head = 0; head < keys.n_heads; ++head) sum += list_of(head)[0];
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
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    FS_DEVICE void next_head() {
        do {
            list = list_of(++now.head);
            count = list[0];
        } while (count == 0);
        place = 0;
        now.entry.bits = entry_at(0);
        if (count > 1) next = entry_at(1);
    }
    FS_DEVICE int32_t entry_at(int place) const {
        const bool backwards = Kernel::CFG.ordered_dq && keys.direction < 0;
        return list[kBlockListHeader + (backwards ? count - 1 - place : place)];
    }
};

}  // namespace flashsmith
