// The kernel that reads the cache: a CTA computes the state of one tile of rows over one part of
// its sequence's keys, part by part.
//
// Rows of a tile are the query heads of one K/V head, and then its next query: each key is read
// once for all of them. Each warp has keys of its own, every n_warps-th warp_keys of the part, and
// copies them into stages of its own: no warp waits for another before the part is done.
//
// For sequences with many rows there is the same with larger tiles (chunk_kernel.cuh), whose warps
// have rows of their own and share the stages.
#pragma once

#include "common/softmax.cuh"
#include "mma_sync_backward/products.cuh"
#include "mma_sync_decode/row_state.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct DecodePart {
    static_assert(Kernel::valid_config());
    using value_t = typename Kernel::value_t;
    using Layout = typename Kernel::KeysLayout;
    using Softmax = OnlineSoftmax<Kernel::row_tiles, true, false>;
    using Scores = float[Kernel::row_tiles][Kernel::key_tiles][4];
    using Sums = float[Kernel::row_tiles][Kernel::column_tiles][4];
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kWarpKeys = Kernel::warp_keys;
    static constexpr int kStages = Kernel::stages;

    const DecodeKernelArgs& args;
    const DecodeItem& item;
    const uint32_t smem, ring;
    const int warp, lane;
    const int first_row, rows;    // of the tile, in the K/V head's rows
    int part_begin;               // first key of the part
    int begin, end;               // keys that some row of the tile sees, of the part
    int seen_begin, seen_end;     // keys that some row of the warp sees, of the part
    int full_begin, full_end;     // keys that every row of it sees
    const char *k_head, *v_head;  // the head's rows of block 0, dense: of the sequence's block

    FS_DEVICE DecodePart(const DecodeKernelArgs& args, const DecodeItem& item, uint32_t smem)
        : args(args),
          item(item),
          smem(smem),
          ring(smem + Kernel::ring_offset + thread_index() / kWarpSize * Kernel::ring_bytes),
          warp(thread_index() / kWarpSize),
          lane(lane_index()),
          first_row(item.tile * Kernel::B_r),
          rows(min(Kernel::B_r, item.sequence.queries * args.heads_per_group - first_row)) {
        const DecodeSequence& s = item.sequence;
        part_begin = s.begin + item.part * s.chunk;
        const KeyRange top = keys_of_row(0), bottom = keys_of_row(rows - 1);
        begin = max(part_begin, top.first);
        end = min(part_begin + s.chunk, bottom.last + 1);
        seen_begin = begin;
        seen_end = end;
        full_begin = bottom.first;
        full_end = top.last + 1;
        if constexpr (Kernel::takes_chunks) own_rows_only();
        const int64_t block = kPaged ? 0 : item.batch;
        k_head = static_cast<const char*>(args.k_cache) +
                 (block * args.k_cache_strides.batch + item.head_k * args.k_cache_strides.head) *
                     kElementBytes;
        v_head = static_cast<const char*>(args.v_cache) +
                 (block * args.v_cache_strides.batch + item.head_k * args.v_cache_strides.head) *
                     kElementBytes;
    }

    FS_DEVICE int query_of_row(int row) const { return args.by_group.divide(first_row + row); }

    // Of a row of the tile.
    FS_DEVICE KeyRange keys_of_row(int row) const {
        const DecodeSequence& s = item.sequence;
        KeyRange keys{0, s.keys - 1};
        if constexpr (SEMANTICS.mask != MaskKind::none) {
            const int position = query_of_row(row) + s.keys - s.queries;
            if constexpr (SEMANTICS.mask == MaskKind::causal) keys.last = min(keys.last, position);
            if constexpr (SEMANTICS.mask == MaskKind::window) {
                keys.last = min(keys.last, position + args.window_right);
                keys.first = max(keys.first, position - args.window_left);
            }
        }
        return keys;
    }

    FS_DEVICE void run() {
        start_queries();
        cp_async_commit();
        const int first_step = begin > part_begin ? (begin - part_begin) / Kernel::B_c : 0;
        const int steps = end > begin ? (end - part_begin + Kernel::B_c - 1) / Kernel::B_c : 0;

        // A page's number is on its way while the stages before are copied.
        int entries[kStages];
#pragma unroll
        for (int i = 0; i < kStages; ++i) entries[i] = page_of(first_step + i);
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (first_step + i < steps) start_step(first_step + i, i, entries[i]);
            cp_async_commit();
        }
        int next_entry = entries[kStages - 1];

        cp_async_wait<kStages - 1>();
        __syncthreads();  // the queries are here
        Queries queries(smem, lane, warp_row());
        Softmax softmax(args.scale_log2);
        Sums o;
        zero(o);
        int stage = 0;
        for (int step = first_step; step < steps; ++step) {
            cp_async_wait<kStages - 2>();
            sync_stages();  // this stage is here, and the last one is read
            const int last = stage == 0 ? kStages - 1 : stage - 1;
            if (step + kStages - 1 < steps) {
                start_step(step + kStages - 1, last, next_entry);
                next_entry = page_of(step + kStages);
            }
            cp_async_commit();
            multiply_step(step, stage, queries, softmax, o);
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }
        cp_async_wait<0>();
        sync_stages();
        if constexpr (Kernel::takes_chunks)
            store_own_rows(softmax, o);
        else
            exchange(softmax, o);
    }

    // ---- warps with rows of their own ----

    // The first of the warp's rows in the tile, and of the keys that it copies in a stage.
    FS_DEVICE int warp_row() const { return Kernel::takes_chunks ? 16 * warp : 0; }
    FS_DEVICE int warp_slot() const { return Kernel::takes_chunks ? warp * kWarpKeys : 0; }

    FS_DEVICE static void sync_stages() {
        if constexpr (Kernel::takes_chunks)
            __syncthreads();
        else
            __syncwarp();
    }

    FS_DEVICE void own_rows_only();
    FS_DEVICE void store_own_rows(const Softmax& softmax, const Sums& o) const;

    // ---- copies ----

    // Rows that the tile has not are zero.
    FS_DEVICE void start_queries() const {
        constexpr int kChunks = Kernel::d_head / kChunkElements;
        using QueriesLayout = typename Kernel::QueriesLayout;
        const int head_q = item.head_k * args.heads_per_group;
        for (int i = thread_index(); i < Kernel::B_r * kChunks; i += Kernel::n_threads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int query = query_of_row(row);
            const int head = head_q + first_row + row - query * args.heads_per_group;
            const char* source = static_cast<const char*>(args.q) +
                                 (item.batch * args.q_strides.batch +
                                  int64_t{item.sequence.first_query + query} * args.q_strides.row +
                                  head * args.q_strides.head + chunk * kChunkElements) *
                                     kElementBytes;
            const bool present =
                row < rows && (!SEMANTICS.uneven || chunk * kChunkElements < args.d);
            const uint32_t offset =
                chunk / 8 < QueriesLayout::kWidePanels
                    ? chunk / 8 * QueriesLayout::template Panel<false>::kBytes +
                          QueriesLayout::template Panel<false>::offset(row, chunk % 8)
                    : QueriesLayout::kNarrowOffset +
                          QueriesLayout::template Panel<true>::offset(row, chunk % 8);
            cp_async_16B_or_zeros(smem + offset, source, present);
        }
    }

    FS_DEVICE int first_key(int step) const {
        return part_begin + step * Kernel::B_c + warp * kWarpKeys;
    }
    FS_DEVICE uint32_t K_tile(int stage) const { return ring + stage * Kernel::stage_bytes; }
    FS_DEVICE uint32_t V_tile(int stage) const { return K_tile(stage) + Layout::kBytes; }

    // The page table's number for the key of a step that is the lane's, 0 where there is none.
    FS_DEVICE int page_of(int step) const {
        if constexpr (!kPaged) return 0;
        const int key = first_key(step) + lane % kWarpKeys;
        if (key < begin || key >= end) return 0;
        return args.page_table[item.batch * args.page_table_stride + args.by_page.divide(key)];
    }

    // Keys that no row sees are not read, whatever is there: they are zero.
    FS_DEVICE void start_step(int step, int stage, int entry) const {
        const int key = first_key(step);
        // A bad number leads to some page of the cache.
        const int page = min(max(entry, 0), args.blocks - 1);
        int slot = 0;
        if constexpr (kPaged) {
            const int own = key + lane % kWarpKeys;
            slot = own - args.by_page.divide(own) * static_cast<int>(args.by_page.divisor);
        }
        if constexpr (Layout::kWidePanels > 0) start_panels<false>(key, stage, page, slot);
        if constexpr (Layout::kHasNarrowPanel) start_panels<true>(key, stage, page, slot);
    }

    template <bool kNarrow>
    FS_DEVICE void start_panels(int first_key, int stage, int page, int slot) const {
        using Panel = typename Layout::template Panel<kNarrow>;
        constexpr int kPanels = kNarrow ? 1 : Layout::kWidePanels;
        constexpr int kFirstChunk = kNarrow ? 8 * Layout::kWidePanels : 0;
        constexpr int kRowStep = kWarpSize / Panel::kChunks;
        const int chunk = lane % Panel::kChunks;
        const uint32_t target = K_tile(stage) + (kNarrow ? Layout::kNarrowOffset : 0);
#pragma unroll
        for (int i = 0; i < kWarpKeys / kRowStep; ++i) {
            const int row = lane / Panel::kChunks + i * kRowStep, key = first_key + row;
            const bool present = key >= begin && key < end;
            int64_t k_offset, v_offset;
            if constexpr (kPaged) {
                const int64_t block = __shfl_sync(kWholeWarp, page, row);
                const int64_t in_block = __shfl_sync(kWholeWarp, slot, row);
                k_offset = block * args.k_cache_strides.batch + in_block * args.k_cache_strides.row;
                v_offset = block * args.v_cache_strides.batch + in_block * args.v_cache_strides.row;
            } else {
                k_offset = key * args.k_cache_strides.row;
                v_offset = key * args.v_cache_strides.row;
            }
            const int first = (kFirstChunk + chunk) * kChunkElements;
            const char* const k_row = k_head + (k_offset + first) * kElementBytes;
            const char* const v_row = v_head + (v_offset + first) * kElementBytes;
            const uint32_t offset = Panel::offset(warp_slot() + row, chunk);
#pragma unroll
            for (int p = 0; p < kPanels; ++p) {
                const bool copied = present && (!SEMANTICS.uneven || first + 64 * p < args.d);
                const uint32_t place = target + p * Panel::kBytes + offset;
                cp_async_16B_or_zeros(place, k_row + p * 128, copied);
                cp_async_16B_or_zeros(place + Layout::kBytes, v_row + p * 128, copied);
            }
        }
    }

    // ---- the algorithm ----

    // A operand of the scores: in registers, or read again in each step where there is no room.
    struct KeptQueries : InRegisters<Kernel::row_tiles, Kernel::d_steps> {
        FS_DEVICE KeptQueries(uint32_t tile, int lane, int row) {
            const RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles> rows(tile, lane, row);
#pragma unroll
            for (int step = 0; step < Kernel::d_steps; ++step)
                rows.load(this->fragments[step], step);
        }
    };
    struct ReadQueries : RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles> {
        FS_DEVICE ReadQueries(uint32_t tile, int lane, int row)
            : RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles>(tile, lane, row) {}
    };
    using Queries = std::conditional_t<Kernel::keeps_queries, KeptQueries, ReadQueries>;

    FS_DEVICE void multiply_step(int step, int stage, const Queries& queries, Softmax& softmax,
                                 Sums& o) const {
        constexpr int kKeys = 8 * Kernel::key_tiles;
        const int key = Kernel::takes_chunks ? part_begin + step * Kernel::B_c : first_key(step);
        if (key >= seen_end || key + kKeys <= seen_begin) return;
        Scores scores;
        zero(scores);
        multiply<value_t, Kernel::d_steps>(scores, queries, RowsB<Layout>(K_tile(stage), lane));
        if constexpr (SEMANTICS.softcap) tanh_scaled(scores, args.softcap_scale_2log2e);
        if (key < full_begin || key + kKeys > full_end) mask(scores, key);
        softmax.template update<false>(scores, o);
        InRegisters<Kernel::row_tiles, Kernel::key_steps> probabilities;
        round_to<value_t>(probabilities, scores);
        multiply<value_t, Kernel::key_steps>(o, probabilities,
                                             ColumnsB<Layout, 1>(V_tile(stage), lane));
    }

    FS_DEVICE void mask(Scores& scores, int first_key) const {
        const int first_column = first_key + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < Kernel::row_tiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const KeyRange keys = keys_of_row(warp_row() + 16 * m + 8 * r + lane / 4);
#pragma unroll
                for (int n = 0; n < Kernel::key_tiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (!keys.contains(first_column + 8 * n + e))
                            scores[m][n][2 * r + e] = -INFINITY;
            }
    }

    // ---- the epilogue ----

    FS_DEVICE uint32_t sums(int of_warp, int row, int column) const {
        return smem + Kernel::ring_offset + of_warp * Kernel::ring_bytes +
               row * Kernel::sums_row_bytes + column * 4;
    }
    FS_DEVICE uint32_t statistics(int of_warp, int row) const {
        return smem + Kernel::statistics_offset + (of_warp * Kernel::B_r + row) * 8;
    }

    // The warps' states through shared memory, merged in the warps' order.
    FS_DEVICE void exchange(const Softmax& softmax, const Sums& o) const {
#pragma unroll
        for (int m = 0; m < Kernel::row_tiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 16 * m + 8 * r + lane / 4;
                const float sum = quad_sum(softmax.row_sum[m][r]);
                if (row >= rows) continue;
                if (lane % 4 == 0)
                    store_shared_8B(statistics(warp, row),
                                    {as_uint(softmax.offset[m][r]), as_uint(sum)});
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; ++n)
                    store_shared_8B(sums(warp, row, 8 * n + lane % 4 * 2),
                                    {as_uint(o[m][n][2 * r]), as_uint(o[m][n][2 * r + 1])});
            }
        __syncthreads();
        constexpr int kColumns = Kernel::d_head / 4;
        for (int i = thread_index(); i < rows * kColumns; i += Kernel::n_threads) {
            const int row = i / kColumns, column = i % kColumns * 4;
            RowState state;
            float2 of_warps[Kernel::n_warps];
#pragma unroll
            for (int w = 0; w < Kernel::n_warps; ++w) {
                of_warps[w] = load_shared_float2(statistics(w, row));
                state.maximum = fmaxf(state.maximum, of_warps[w].x);
            }
#pragma unroll
            for (int w = 0; w < Kernel::n_warps; ++w) {
                const uint4 x = load_shared_16B(sums(w, row, column));
                state.add(of_warps[w].x, of_warps[w].y,
                          {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                           __uint_as_float(x.w)});
            }
            const int query = query_of_row(row);
            const DecodeSequence& s = item.sequence;
            if (s.parts == 1) {
                const int head = item.head_k * args.heads_per_group + first_row + row -
                                 query * args.heads_per_group;
                store_row<value_t>(args, state, row_end(args, state, head), item.batch,
                                   s.first_query, query, head, column);
            } else {
                store_state(state, row, column);
            }
        }
        __syncthreads();  // the next item's copies take the place of these states
    }

    // For the merge.
    FS_DEVICE void store_state(const RowState& state, int row, int column) const {
        const DecodeStates places(args, item.sequence, item.batch, item.head_k);
        store_global_16B(
            args.part_o + places.sums(item.part, first_row + row) * Kernel::d_head + column,
            {as_uint(state.o[0]), as_uint(state.o[1]), as_uint(state.o[2]), as_uint(state.o[3])});
        if (column == 0)
            store_global_8B(
                args.part_statistics + 2 * (places.statistics(first_row + row) + item.part),
                {as_uint(state.maximum), as_uint(state.sum)});
    }
};

template <class Kernel, bool kPaged>
FS_DEVICE void compute_parts(const DecodeKernelArgs& args, uint32_t smem) {
    DecodeItems<Kernel> items(args);
    DecodeItem item;
    for (uint32_t index = block_index(); items.find(index, item); index += gridDim.x)
        DecodePart<Kernel, kPaged>(args, item, smem).run();
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads) decode_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<Kernel, false>(args, shared_address(shared_memory));
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads)
    decode_paged_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<Kernel, true>(args, shared_address(shared_memory));
}

}  // namespace flashsmith
