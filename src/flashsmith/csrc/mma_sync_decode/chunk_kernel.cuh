// What is different in kernels for sequences with many rows, such as chunks of a prompt: a warp has
// 16 rows of the tile over all keys of the part, and writes them from its registers.
//
// Other sequences of the call are another kernel's, by their own queries alone: a sequence has the
// same bits beside any.
#pragma once

#include "mma_sync_decode/own_rows.cuh"

namespace flashsmith {

// Of two tiles of eight columns the even lanes get four columns of the first, the odd ones of the
// second.
template <class Kernel, bool kPaged>
FS_DEVICE void DecodeRun<Kernel, kPaged>::store_own_rows(const Softmax& softmax,
                                                         const Sums& o) const {
    static_assert(!Kernel::takes_chunks || Kernel::row_tiles == 1);
    const int lane = lane_index();  // no address from it is worth a register in the steps
    const bool odd = lane % 2 != 0;
    const DecodeSequence& s = item.sequence;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp_row() + 8 * r + lane / 4;
        const int query = query_of_row(row);
        const int head =
            item.head_k * args.heads_per_group + first_row + row - query * args.heads_per_group;
        RowState state;
        state.maximum = softmax.offset[0][r];
        state.sum = quad_sum(softmax.row_sum[0][r]);
        const bool present = row < rows;
        const RowEnd end = row_end(args, state, present ? head : 0);
#pragma unroll
        for (int n = 0; n < Kernel::column_tiles; n += 2) {
            const float *const first = &o[0][n][2 * r], *const second = &o[0][n + 1][2 * r];
            float theirs[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                theirs[e] = __shfl_xor_sync(kWholeWarp, odd ? first[e] : second[e], 1);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                state.o[e] = odd ? theirs[e] : first[e];
                state.o[2 + e] = odd ? second[e] : theirs[e];
            }
            if (!present) continue;
            const int column = 8 * (n + odd) + lane % 4 / 2 * 4;
            if (s.parts == 1)
                store_row<value_t>(args, state, end, item.batch, s.first_query, query, head,
                                   column);
            else
                PartStates<Kernel>(args, s, item.batch, item.head_k)
                    .store(state, item.first_part, first_row + row, column);
        }
    }
    // All warps have read what the next item's copies replace: the barrier behind the last step.
}

template <class Kernel>
__global__ void __launch_bounds__(ChunkKernelConfig<Kernel>::n_threads, 1)
    decode_chunk_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<ChunkKernelConfig<Kernel>, false>(args, shared_address(shared_memory));
}

template <class Kernel>
__global__ void __launch_bounds__(ChunkKernelConfig<Kernel>::n_threads, 1)
    decode_paged_chunk_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<ChunkKernelConfig<Kernel>, true>(args, shared_address(shared_memory));
}

}  // namespace flashsmith
