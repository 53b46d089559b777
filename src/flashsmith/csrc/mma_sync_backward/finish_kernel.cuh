// The kernel that rounds the fp32 sums of dq.
#pragma once

#include "mma_sync_backward/common_parts.cuh"

namespace flashsmith {

// Rounds dq for one block of queries. The sums have the layout of the accumulators of the warps
// that have added them.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads)
    backward_finish_kernel(const BackwardKernelArgs args) {
    using value_t = typename Kernel::value_t;
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const int n_blocks = (args.seq_q + Kernel::B_r - 1) / Kernel::B_r;
    // The sums that the previous kernel added last are still in the L2.
    const uint32_t number = gridDim.x - 1 - block_index();
    const uint32_t sequence = number / n_blocks;
    const int first_row = number % n_blocks * Kernel::B_r;
    const int batch = sequence / args.heads_q, head = sequence % args.heads_q;
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const SequenceRows k =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    if (SEMANTICS.packed && first_row >= q.count) return;
    const int warp = thread_index() / kWarpSize, lane = thread_index() % kWarpSize;
    const int warp_row = warp / Kernel::dq_column_warps, turn = warp % Kernel::dq_column_warps;

    const int unseeing =
        BackwardKeyMask<SEMANTICS>(args, q.count, k.count).first_attending_row() - first_row;
    const int64_t statistic = first_statistic<SEMANTICS>(args, batch, head, q.first) + first_row;
    const float* sums = first_dq_sums<Kernel>(args, statistic, warp, lane);
    const int64_t origin = batch * args.dq_batch_stride + head * args.dq_head_stride;
    const uint32_t tile = shared_address(shared_memory);
    // The rows of the warps alternate, as their columns do, in groups of 16.
#pragma unroll
    for (int m = 0; m < Kernel::dq_row_tiles; ++m) {
        const int row = 16 * (warp_row + Kernel::dq_row_warps * m);
        bool is_hidden[2] = {};  // whether a program hides all keys from the row
        if constexpr (Kernel::has_program)
            for (int r = 0; r < 2; ++r)
                is_hidden[r] = args.lse_log2[statistic + row + lane / 4 + 8 * r] == INFINITY;
        float dq[1][Kernel::dq_column_tiles][4];
#pragma unroll
        for (int n = 0; n < Kernel::dq_column_tiles; ++n, sums += kTileSums) {
            float tile_sums[4];
            load_tile(tile_sums, sums);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                // If a key is NaN, the sums of rows that see no key are 0 times NaN, so they are
                // replaced.
                dq[0][n][e] =
                    is_hidden[e / 2] || row + lane / 4 + e / 2 * 8 < unseeing ? 0.0f : tile_sums[e];
        }
        if (args.grads_fp32) {
            float* const first =
                static_cast<float*>(args.dq) + origin + (q.first + first_row) * args.dq_seq_stride;
            store_fp32_gradient<Kernel::dq_column_warps>(first, args.dq_seq_stride,
                                                         q.count - first_row, d_of_qk<Kernel>(args),
                                                         dq, args.scale, row, turn, lane);
        } else {
            stage_gradient<typename Kernel::QueriesLayout, value_t, Kernel::dq_column_warps>(
                tile, dq, args.scale, row, turn, lane);
        }
    }
    if (args.grads_fp32) return;
    __syncthreads();
    char* const first = const_cast<char*>(
        row_address<value_t>(args.dq, origin, q.first + first_row, args.dq_seq_stride));
    typename Kernel::CopyQueries(thread_index())
        .shared_to_global(first, tile, args.dq_seq_stride * int64_t{sizeof(value_t)},
                          {q.count - first_row, d_of_qk<Kernel>(args) / kChunkElements});
}

}  // namespace flashsmith
