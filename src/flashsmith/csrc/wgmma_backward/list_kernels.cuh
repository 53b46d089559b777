// The kernels that write the lists of blocks of queries before the main kernel: see
// common/block_lists.cuh. Each warp of the first one evaluates the mask on one block of keys and
// one of queries; each warp of the second one turns the results for a block of keys into its list.
#pragma once

#include "wgmma_backward/listed_steps.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_backward_list_blocks_kernel(const __grid_constant__ typename Kernel::Args args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    const BackwardKernelArgs& p = args.problem;
    const auto lists = block_lists<Kernel>(args);
    const int64_t warp = warp_of_lists();
    const int64_t index = warp / lists.n_blocks;
    if (index >= lists.count()) return;
    const int block = static_cast<int>(warp % lists.n_blocks);
    const auto [batch, head, tile_of_head] = lists.tile_of(index);
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, batch, p.seq_q, p.total_q);
    const SequenceRows k =
        sequence_rows<SEMANTICS.packed>(p.cu_seqlens_k, batch, p.seq_k, p.total_k);
    const int first_key = tile_of_head * Kernel::B_c, first_row = block * Kernel::B_r;
    const int row_end = min(first_row + Kernel::B_r, q.count);
    uint32_t bits = 0;
    if (first_key < k.count && first_row < row_end) {
        const BlockRange range = BackwardKeyMask<SEMANTICS>(p, q.count, k.count)
                                     .query_blocks(first_key, Kernel::B_c, Kernel::B_r);
        if (block >= range.begin && block < range.end)
            bits = bits_of_rows<SEMANTICS, Kernel::key_groups, kWarpgroupRows>(
                p, args.program, {batch, q.count, k.count}, head, first_row, row_end, first_key);
    }
    // Blocks with nonexistent rows are not full: 0 times an infinite key is NaN.
    if (row_end - first_row < Kernel::B_r) bits &= 0x55555555u * BlockEntry::kSees;
    if (lane_index() == 0) lists.list(index)[kBlockListHeader + block] = static_cast<int>(bits);
}

// With ordered_dq, between the two others: each thread ranks the blocks of keys that visit one
// block of queries.
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_backward_rank_blocks_kernel(const __grid_constant__ typename Kernel::Args args) {
    const auto lists = block_lists<Kernel>(args);
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

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_backward_compact_lists_kernel(const __grid_constant__ typename Kernel::Args args) {
    const auto lists = block_lists<Kernel>(args);
    const int64_t index = warp_of_lists();
    if (index < lists.count()) compact_list<Kernel::key_groups>(lists.list(index), lists.n_blocks);
}

}  // namespace flashsmith
