// The steps of a block of keys whose lists name the blocks of queries to visit, and the order of
// these steps with ordered_dq.
#pragma once

#include "backward/listed_steps.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

// With ordered_dq: the order in which blocks of keys add to a block of queries. In the workspace
// these numbers follow the lists.
template <class Kernel>
struct BlockRanks {
    BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> lists;

    // How many blocks of keys visit a block of queries before the block of keys that has this list.
    FS_DEVICE int32_t& rank(int64_t list, int block) const {
        return behind_lists()[list * lists.n_blocks + block];
    }
    // How many blocks of keys of the list's head visit a block of queries.
    FS_DEVICE int32_t& total(int64_t list, int block) const {
        return behind_lists()[(lists.count() + list / lists.tiles_per_head) * lists.n_blocks +
                              block];
    }

  private:
    FS_DEVICE int32_t* behind_lists() const { return lists.list(lists.count()); }
};

// The lists of a block of keys.
template <class Kernel>
struct ListsOfKeys {
    const typename Kernel::Args& args;
    const KeyBlock<Kernel>& keys;

    FS_DEVICE const int32_t* list_of(int head) const {
        return lists().list(keys.batch, keys.first_head + head, keys.first_key / Kernel::B_c);
    }
    FS_DEVICE int n_heads() const { return keys.n_heads; }
    FS_DEVICE bool backwards() const { return Kernel::CFG.ordered_dq && keys.direction < 0; }
    FS_DEVICE BlockLists<Kernel::SEMANTICS, BackwardKernelArgs> lists() const {
        return query_lists<Kernel>(args.problem, args.program);
    }
};

// The steps of a block of keys.
template <class Kernel>
struct ListedSteps : ListedQueries<Kernel::SEMANTICS, ListsOfKeys<Kernel>> {
    using Base = ListedQueries<Kernel::SEMANTICS, ListsOfKeys<Kernel>>;
    using Base::list, Base::now, Base::tile;

    FS_DEVICE ListedSteps(const typename Kernel::Args& args, const KeyBlock<Kernel>& keys)
        : Base(ListsOfKeys<Kernel>{args, keys}) {}

    FS_DEVICE int n_steps() const {
        return tile.keys.first_key >= tile.keys.k.count ? 0 : Base::n_steps();
    }
    // With ordered_dq: the turn at which this step adds to its block of queries.
    FS_DEVICE uint32_t turn() const {
        const BlockRanks<Kernel> ranks{tile.lists()};
        const int64_t number =
            (list - ranks.lists.lists) / (kBlockListHeader + ranks.lists.n_blocks);
        const int block = now.entry.block(), rank = ranks.rank(number, block);
        return tile.keys.direction < 0 ? rank : ranks.total(number, block) - 1 - rank;
    }
};

// Runs between the two kernels that write lists: each thread ranks the blocks of keys that visit
// one block of queries.
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_backward_rank_blocks_kernel(const BackwardProgramArgs args) {
    const auto lists = query_lists<Kernel>(args, args.program);
    const BlockRanks<Kernel> ranks{lists};
    const int64_t thread = int64_t{block_index()} * kListThreads + thread_index();
    const int64_t first = thread / lists.n_blocks * lists.tiles_per_head;
    if (first >= lists.count()) return;
    const int block = static_cast<int>(thread % lists.n_blocks);
    int rank = 0;
#pragma unroll 8
    for (int tile = 0; tile < static_cast<int>(lists.tiles_per_head); ++tile) {
        const bool is_visited = lists.list(first + tile)[kBlockListHeader + block] != 0;
        ranks.rank(first + tile, block) = rank;
        rank += is_visited;
    }
    ranks.total(first, block) = rank;
}

}  // namespace flashsmith
