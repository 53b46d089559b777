// The kernel that runs first: it appends new keys and values to the cache and applies the rotary
// embedding to keys and queries. A warp handles one row of k, v or q.
#pragma once

#include "common/stored_row.cuh"
#include "mma_sync_decode/cache_scales.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

template <class Kernel>
struct Append {
    using value_t = typename Kernel::value_t;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    // The types of the rows that this kernel writes: rows of q, and rows of the cache.
    using Row = StoredRow<value_t, CacheFormat::plain>;
    using CacheRow = StoredRow<value_t, Kernel::cache>;

    const DecodeKernelArgs& args;
    const int lane;

    // Handles row `part` of a query: heads_k rows of k, then heads_k rows of v and, with rotary
    // embedding, heads_q rows of q.
    FS_DEVICE void run(int batch, int query, int first_query, int part) const {
        const int length = args.cache_lens[batch];
        const int64_t row = first_query + query;
        if (part >= 2 * args.heads_k) {
            const int head = part - 2 * args.heads_k;
            const bool moves = kHidesKeys<SEMANTICS>;
            turn(address(args.q_source, args.q_source_strides, batch, row, head),
                 Row{address(args.q_rotated, args.q_strides, batch, row, head)},
                 position(batch, length, moves ? query : 0));
            return;
        }
        // Nothing is written outside the cache.
        if (length < 0 || length >= args.capacity || query >= args.capacity - length) return;
        const int key = length + query;
        int block = batch, slot = key;
        if (args.page_table != nullptr) {
            const int page = args.by_page.divide(key);
            block = args.page_table[batch * args.page_table_stride + page];
            slot = key - page * static_cast<int>(args.by_page.divisor);
            if (block < 0 || block >= args.blocks) return;
        }
        if (part < args.heads_k) {
            const value_t* source = address(args.new_k, args.new_k_strides, batch, row, part);
            const CacheRow target =
                cache_row<false>(args.k_cache, args.k_cache_strides, block, slot, part);
            if (args.cos != nullptr)
                turn(source, target, position(batch, length, query));
            else
                copy<false>(source, target, 0);
        } else {
            const int head = part - args.heads_k;
            copy<true>(address(args.new_v, args.new_v_strides, batch, row, head),
                       cache_row<true>(args.v_cache, args.v_cache_strides, block, slot, head), 0);
        }
    }

    // The row of cos and sin, clamped so that no length leads outside the tables. Keys that the
    // cache has dropped count as positions.
    FS_DEVICE int position(int batch, int length, int query) const {
        const int first =
            min(min(max(length, 0), args.capacity) + dropped_keys(args, batch), args.positions - 1);
        return min(first + query, args.positions - 1);
    }

    FS_DEVICE static value_t* address(const void* tensor, const DecodeStrides& strides,
                                      int64_t batch, int64_t row, int64_t head) {
        return static_cast<value_t*>(const_cast<void*>(tensor)) + batch * strides.batch +
               row * strides.row + head * strides.head;
    }

    template <bool kOfValues>
    FS_DEVICE CacheRow cache_row(void* cache, const DecodeStrides& strides, int64_t block,
                                 int64_t slot, int head) const {
        if constexpr (Kernel::has_scales) {
            const float scale = kOfValues ? v_scale(args, head) : k_scale(args, head);
            if constexpr (Kernel::has_codes)
                return {static_cast<uint8_t*>(cache) + block * strides.batch + slot * strides.row +
                            head * strides.head,
                        scale};
            else
                return {address(cache, strides, block, slot, head), scale};
        } else {
            return {address(cache, strides, block, slot, head)};
        }
    }

    template <bool kOfValues, class Target>
    FS_DEVICE void copy(const value_t* source, const Target& target, int first) const {
        for (int i = first + lane; i < (kOfValues ? d_of_v<Kernel>(args) : d_of_qk<Kernel>(args));
             i += kWarpSize)
            target.put(i, source[i]);
    }

    FS_DEVICE float factor(const void* table, int64_t stride, int position, int pair) const {
        const int64_t place = position * stride + pair;
        if (args.rotary_fp32 != 0) return static_cast<const float*>(table)[place];
        return to_float(static_cast<const value_t*>(table)[place]);
    }

    // Rotates each pair of elements by its angle. Products and their sum are each rounded to fp32,
    // so that the compiler cannot contract them.
    template <class Target>
    FS_DEVICE void turn(const value_t* source, const Target& target, int position) const {
        for (int pair = lane; pair < args.rotary_half; pair += kWarpSize) {
            const int i = args.interleaved != 0 ? 2 * pair : pair;
            const int j = args.interleaved != 0 ? i + 1 : i + args.rotary_half;
            const float cos = factor(args.cos, args.cos_stride, position, pair);
            const float sin = factor(args.sin, args.sin_stride, position, pair);
            const float x = to_float(source[i]), y = to_float(source[j]);
            const uint32_t turned =
                pack_16bit<value_t>(__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)),
                                    __fadd_rn(__fmul_rn(x, sin), __fmul_rn(y, cos)));
            target.put_bits(i, static_cast<uint16_t>(turned));
            target.put_bits(j, static_cast<uint16_t>(turned >> 16));
        }
        copy<false>(source, target, 2 * args.rotary_half);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(kAppendThreads)
    decode_append_kernel(const typename Kernel::ScaledArgs args) {
    // The order matters: the next launch reads lengths before it waits.
    wait_for_launch_before();
    allow_next_launch();
    const int of_query = 2 * args.heads_k + (args.cos == nullptr ? 0 : args.heads_q);
    const int row_blocks =
        (of_query * args.seq_q + kAppendThreads / kWarpSize - 1) / (kAppendThreads / kWarpSize);
    const int batch = block_index() / row_blocks;
    const int index =
        block_index() % row_blocks * (kAppendThreads / kWarpSize) + thread_index() / kWarpSize;
    const SequenceRows q =
        sequence_rows<Kernel::SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const int query = index / of_query;
    if (query >= q.count) return;
    Append<Kernel>{args, lane_index()}.run(batch, query, static_cast<int>(q.first),
                                           index - query * of_query);
}

}  // namespace flashsmith
