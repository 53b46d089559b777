// The kernels that write the lists of K/V blocks. They run before the main kernel: see
// common/block_lists.cuh.
#pragma once

#include "wgmma/scheduler.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_list_blocks_kernel(const __grid_constant__ typename Kernel::Args args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    const ForwardKernelArgs& p = args.problem;
    block_lists<Kernel>(args).enter_bits([&](const auto& tile, int block) {
        const SequenceRows q =
            sequence_rows<SEMANTICS.packed>(p.cu_seqlens_q, tile.batch, p.seq_q, p.total_q);
        const SequenceRows k = key_rows<SEMANTICS>(p, tile.batch);
        const auto [first_row, row_end] = tile_rows<Kernel>(tile.tile_of_head, -1, q.count);
        const BlockRange range = KeyMask<SEMANTICS>(p, q.count, k.count)
                                     .blocks(first_row, row_end - first_row, Kernel::B_c);
        return bits_of_keys<SEMANTICS, Kernel::n_warpgroups, kWarpgroupRows, Kernel::B_c>(
            p, args.program, {tile.batch, q.count, k.count}, tile.head, first_row, row_end, block,
            range);
    });
}

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    hopper_compact_lists_kernel(const __grid_constant__ typename Kernel::Args args) {
    block_lists<Kernel>(args).template compact<Kernel::n_warpgroups>();
}

}  // namespace flashsmith
