// The kernel that rounds the fp32 sums of dq.
#pragma once

#include "backward/store_gradient.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

// Rounds dq for one block of queries. The sums have the layout of the accumulators of the
// warpgroups that have added them.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::dq_parts* kWarpgroupThreads)
    hopper_backward_finish_kernel(const BackwardKernelArgs args) {
    constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    constexpr int kTiles = Kernel::dq_columns / 8;
    const int n_blocks = (args.seq_q + Kernel::B_r - 1) / Kernel::B_r;
    // The sums of the last blocks are the most likely to be still in the L2.
    const uint32_t number = gridDim.x - 1 - block_index();
    const uint32_t sequence = number / n_blocks;
    const int first_row = number % n_blocks * Kernel::B_r;
    const int batch = sequence / args.heads_q, head = sequence % args.heads_q;
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const SequenceRows k =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    if (SEMANTICS.packed && first_row >= q.count) return;
    const int part = thread_index() / kWarpgroupThreads, lane = lane_index();
    const int warp = thread_index() / kWarpSize % kWarpsPerWarpgroup;
    const int row =
        first_row + (Kernel::shares_rows ? part * kWarpgroupRows : 0) + warp * kWarpRows;
    const int column = Kernel::shares_rows ? 0 : part * Kernel::dq_columns;

    const int64_t statistic = first_statistic<SEMANTICS>(args, batch, head, q.first) + first_row;
    const float* const sums = args.dq_sums + Kernel::first_dq_sum(statistic) +
                              part * Kernel::part_sums + (warp * Kernel::warp_lanes + lane) * 4;
    const int unseeing =
        BackwardKeyMask<SEMANTICS>(args, q.count, k.count).first_attending_row() - row;
    bool is_hidden[2] = {};  // whether a program hides all keys from the row
    if constexpr (Kernel::has_program)
        for (int r = 0; r < 2; ++r)
            is_hidden[r] =
                args.lse_log2[statistic + row - first_row + lane / 4 + 8 * r] == INFINITY;
    float dq[1][kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        // The sums of the second part begin with its whole panel, whose columns come after those of
        // the half panel.
        constexpr int kPanel = Kernel::Panel::kColumns / 8;
        const int tile = Kernel::halves_a_panel && part == 1
                             ? (n < kPanel / 2 ? n + kPanel : n - kPanel / 2)
                             : n;
        const uint4 x = load_global_16B(sums + tile * Kernel::tile_sums);
        const uint32_t elements[4] = {x.x, x.y, x.z, x.w};
        // If a key is NaN, the sums of rows that see no key are 0 times NaN, so they are replaced.
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dq[0][n][e] = is_hidden[e / 2] || lane / 4 + e / 2 * 8 < unseeing
                              ? 0.0f
                              : __uint_as_float(elements[e]);
    }
    const int64_t element = batch * args.dq_batch_stride + head * args.dq_head_stride +
                            (q.first + row) * args.dq_seq_stride + column;
    store_gradient<typename Kernel::value_t>(
        static_cast<char*>(args.dq) + element * (args.grads_fp32 ? 4 : 2), args.dq_seq_stride,
        q.count - row, d_of_qk<Kernel>(args) - column, args.grads_fp32, dq, args.scale);
}

}  // namespace flashsmith
