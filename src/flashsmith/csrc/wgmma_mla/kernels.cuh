// Attention over a latent cache (sm_90a): a row of the cache is a key, and its first columns are
// the value. All query heads share it, so that a CTA multiplies 64 rows, heads and tokens, with
// each block of keys, and reads the block from global memory once for scores and output.
#pragma once

#include "common/merge.cuh"
#include "wgmma_mla/consumer.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(kMlaThreads, 1)
    mla_kernel(const __grid_constant__ MlaKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t smem = shared_address(shared_memory);
    // CTAs of the same sequence and part are neighbours: they read the same keys.
    const uint32_t tiles = args.batch * args.tiles;
    const MlaTile<Kernel> tile(args, block_index() % tiles);
    const int part = static_cast<int>(block_index() / tiles);
    // Every CTA waits: the next launch waits for this one only, not for the one that appends.
    wait_for_launch_before();
    allow_next_launch();
    if (!tile.exists() || part >= tile.parts) return;
    if (thread_index() == 0) {
        section_barriers<Kernel>(smem).init(kMlaStages * kSections, kWarpsPerWarpgroup);
        mbarrier_init_fence();
    }
    __syncthreads();

    // The shuffle lets the compiler know that the value is the same in all lanes of a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, thread_index() / kWarpgroupThreads, 0);
    if (warpgroup == kMlaConsumers) {
        set_registers<Kernel::registers_at_start, Kernel::CFG.producer_registers>();
        if (thread_index() / kWarpSize == kMlaConsumers * kWarpsPerWarpgroup)
            MlaProducer<Kernel>(tile, smem).run(tile.of_part(part));
    } else {
        set_registers<Kernel::registers_at_start, Kernel::CFG.consumer_registers>();
        if (warpgroup == 0)
            MlaConsumer<Kernel, 0>(tile, smem).run(part);
        else
            MlaConsumer<Kernel, 1>(tile, smem).run(part);
    }
}

// Merges the parts of the tiles that were split; a warp has one row.
template <class Kernel>
__global__ void __launch_bounds__(kMlaMergeThreads) mla_merge_kernel(const MlaKernelArgs args) {
    using value_t = typename Kernel::value_t;
    constexpr int kRows = kMlaMergeThreads / kWarpSize;
    static_assert(kMlaRows % kRows == 0, "the rows of a CTA are of one tile");
    const uint32_t index = block_index() * kRows + thread_index() / kWarpSize;
    const MlaTile<Kernel> tile(args, index / kMlaRows);
    const int row = tile.first_row + static_cast<int>(index % kMlaRows);
    wait_for_launch_before();  // also without rows, as in mla_kernel
    if (row >= tile.row_end || !tile.is_split()) return;

    const int64_t first = tile.first_part_row + index % kMlaRows;
    const float* const lses = args.parts + args.part_rows * Kernel::d_v + first;
    constexpr int kColumns = Kernel::d_v / kWarpSize, kGroups = kColumns / 4;
    const float* rows = args.parts + first * Kernel::d_v + 4 * lane_index();
    MergedRow<kColumns> merged;
#pragma unroll 2
    for (int part = 0; part < tile.parts; ++part, rows += kMlaRows * Kernel::d_v) {
        float values[kColumns];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const float4 x = *reinterpret_cast<const float4*>(rows + 4 * kWarpSize * g);
            values[4 * g] = x.x, values[4 * g + 1] = x.y;
            values[4 * g + 2] = x.z, values[4 * g + 3] = x.w;
        }
        merged.add(lses[part * kMlaRows], 1.0f, values);
    }
    const float lse = merged.finish(args.sinks == nullptr ? nullptr : args.sinks + tile.head(row));
    if (lane_index() == 0 && args.lse != nullptr) *tile.lse(row) = lse;
    auto* const o =
        static_cast<value_t*>(args.o) + tile.element(args.o_strides, row) + 4 * lane_index();
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
        store_global_8B(o + 4 * kWarpSize * g,
                        uint2{pack_16bit<value_t>(merged.o[4 * g], merged.o[4 * g + 1]),
                              pack_16bit<value_t>(merged.o[4 * g + 2], merged.o[4 * g + 3])});
}

// Appends new rows to the cache; a warp copies one. Nothing is written outside the cache.
template <class Kernel>
__global__ void __launch_bounds__(kMlaAppendThreads) mla_append_kernel(const MlaKernelArgs args) {
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
    auto* to = static_cast<value_t*>(args.cache_rows) + block * args.cache_strides.batch +
               slot * args.cache_strides.row;
    for (int column = 8 * lane_index(); column < Kernel::d_head; column += 8 * kWarpSize)
        store_global_16B(to + column, load_global_16B(from + column));
}

}  // namespace flashsmith
