// The kernel that appends to a latent cache.
#pragma once

#include "mla/row_scale.cuh"
#include "mla/tile.cuh"

namespace flashsmith {

// Appends new rows, divided by the cache's scale. Each warp copies one row. Nothing is written
// outside the cache.
template <class Kernel>
__global__ void __launch_bounds__(kMlaAppendThreads)
    mla_append_kernel(const typename Kernel::Args args) {
    using value_t = typename Kernel::value_t;
    allow_next_launch();
    const uint32_t index =
        block_index() * (kMlaAppendThreads / kWarpSize) + thread_index() / kWarpSize;
    const int batch = static_cast<int>(index / args.seq_q), query = index % args.seq_q;
    if (batch >= args.batch) return;
    const SequenceRows q =
        sequence_rows<Kernel::SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const int length = args.cache_lens[batch];
    if (query >= q.count || length < 0 || length >= args.capacity ||
        query >= args.capacity - length)
        return;
    const int key = length + query;
    int block = batch, slot = key;
    if (args.page_table != nullptr) {
        block = args.page_table[batch * args.page_table_stride + key / args.slots];
        slot = key % args.slots;
        if (block < 0 || block >= args.blocks) return;
    }
    const auto* from = static_cast<const value_t*>(args.new_rows) + batch * args.new_strides.batch +
                       (q.first + query) * args.new_strides.row;
    auto* to = static_cast<typename Kernel::element_t*>(args.cache_rows) +
               block * args.cache_strides.batch + slot * args.cache_strides.row;
    if constexpr (Kernel::has_scale) {
        const StoredRow<value_t, Kernel::cache> row{to, row_scale(args)};
        for (int column = lane_index(); column < Kernel::d_head; column += kWarpSize)
            row.put(column, from[column]);
        return;
    }
    for (int column = 8 * lane_index(); column < Kernel::d_head; column += 8 * kWarpSize)
        store_global_16B(to + column, load_global_16B(from + column));
}

}  // namespace flashsmith
