// The kernels that write the lists of K/V blocks before the main kernel: see
// common/block_lists.cuh. Each warp of the first one evaluates the mask on one tile of Q and one
// block; each warp of the second one turns the results for a tile into its list.
#pragma once

#include "wgmma/scheduler.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_list_blocks_kernel(const __grid_constant__ typename Kernel::Args args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    const ForwardKernelArgs& p = args.problem;
    const auto lists = block_lists<Kernel>(args);
    const int64_t warp = warp_of_lists();
    const int64_t index = warp / p.n_KV_blocks;
    if (index >= lists.count()) return;
    const int block = static_cast<int>(warp % p.n_KV_blocks);
    const auto [batch, head, tile_of_head] = lists.tile_of(index);
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, batch, p.seq_q, p.total_q);
    const SequenceRows k = key_rows<SEMANTICS>(p, batch);
    const auto [first_row, row_end] = tile_rows<Kernel>(tile_of_head, -1, q.count);
    const BlockRange range =
        KeyMask<SEMANTICS>(p, q.count, k.count).blocks(first_row, row_end - first_row, Kernel::B_c);
    uint32_t bits = 0;
    if (first_row < row_end && block >= range.begin && block < range.end)
        bits = bits_of_keys<SEMANTICS, Kernel::n_warpgroups, kWarpgroupRows, Kernel::B_c>(
            p, args.program, {batch, q.count, k.count}, head, first_row, row_end,
            block * Kernel::B_c);
    if (lane_index() == 0) lists.list(index)[kBlockListHeader + block] = static_cast<int>(bits);
}

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_compact_lists_kernel(const __grid_constant__ typename Kernel::Args args) {
    const auto lists = block_lists<Kernel>(args);
    const int64_t index = warp_of_lists();
    if (index < lists.count())
        compact_list<Kernel::n_warpgroups>(lists.list(index), args.problem.n_KV_blocks);
}

}  // namespace flashsmith
