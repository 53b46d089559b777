// How a sequence's keys are split into parts, and which CTA computes which parts.
//
// Where parts begin and end depends only on the sequence's own queries and keys, and on numbers of
// the launch that do not depend on other sequences, the page size or the cache's capacity. The
// states of parts are the leaves of a binary tree: neighbours that start at an even number are
// merged first, then neighbouring pairs, and so on. A CTA takes a run of parts, which is a whole
// subtree of 2^n leaves, and merges it. The length of runs depends on the batch, but changes no
// bit.
#pragma once

#include "common/key_mask.cuh"
#include "mma_sync_decode/row_state.cuh"
#include "mma_sync_decode/static_kernel_configuration.cuh"

namespace flashsmith {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kMostDropped = 1 << 30;  // so that positions stay below 2^31
constexpr int kMostShare = 1 << 30;    // in blocks of B_c keys; above that of any sequence

struct DecodeSequence {
    int first_query, queries;  // first query in a packed tensor, and number of queries
    int keys;                  // number of keys in the cache after appending
    int begin;                 // first key of the first part: a multiple of B_c
    int chunk;                 // keys per part, except for the last
    int parts;                 // at least 1: one part writes the rows even if there are no keys
    int run_levels;            // log2 of the parts per run
    int runs;
    int tiles;      // tiles of rows; 0 if the kernel with warpgroups computes the sequence
    bool is_chunk;  // whether the sequence has many rows; another kernel handles it then
};

// The number of blocks of B_c keys.
template <class Kernel>
FS_DEVICE int units_of(const DecodeSequence& s) {
    return (s.keys - s.begin + Kernel::B_c - 1) / Kernel::B_c;
}

// Sets a sequence's queries and number of row tiles.
template <class Kernel>
FS_DEVICE void set_rows(DecodeSequence& s, const DecodeKernelArgs& args, int first_query,
                        int queries) {
    s.first_query = first_query;
    s.queries = queries;
    const int rows = queries * args.heads_per_group;
    if constexpr (Kernel::has_warpgroups) {
        if (rows > args.most_rows) {
            s.is_chunk = true;
            s.tiles = 0;
            return;
        }
    }
    s.is_chunk = Kernel::chunk_rows > 0 && rows > Kernel::most_rows_without_chunks;
    const int tile_rows = s.is_chunk ? Kernel::chunk_rows : Kernel::B_r;
    s.tiles = (rows + tile_rows - 1) / tile_rows;
}

// Cache lengths before the call appends, read from memory or guessed. Guesses exist for up to
// kMostGuessed sequences: each lane holds the guess of the sequence with the lane's number, and
// must not request another guess. Runs that are known without a search therefore use no guesses,
// since all lanes would request the same sequence's guess.
struct Lengths {
    bool are_guessed = false;
    int guess = 0;
    FS_DEVICE int of(const DecodeKernelArgs& args, int batch) const {
        return are_guessed ? guess : args.cache_lens[batch];
    }
};

// The number of keys that a sequence's cache has dropped, which is the position of its first key.
FS_DEVICE int dropped_keys(const DecodeKernelArgs& args, int batch) {
    return args.kv_offset == nullptr ? 0 : min(max(args.kv_offset[batch], 0), kMostDropped);
}

// A sequence's rows and keys. Clamping ensures that no value of cache_lens or cu_seqlens_q refers
// to anything outside the cache or the tensors.
template <class Kernel>
FS_DEVICE DecodeSequence undivided_sequence(const DecodeKernelArgs& args, int batch,
                                            const Lengths& lengths) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    DecodeSequence s;
    set_rows<Kernel>(s, args, static_cast<int>(q.first), q.count);
    s.keys = min(max(lengths.of(args, batch), 0), args.capacity);
    if (args.new_k != nullptr) s.keys = min(s.keys + s.queries, args.capacity);
    s.begin = 0;
    if constexpr (SEMANTICS.hides_earlier) {
        const int first =
            max(Mask::first_key(s.keys - s.queries, args.window_left, args.window_right), 0);
        // Chunks begin at positions in the whole sequence, so that the first may begin at a
        // negative key of the cache.
        const int dropped = Kernel::canonical ? dropped_keys(args, batch) : 0;
        s.begin = ((first + dropped) & ~((Kernel::canonical ? kCanonicalChunk : Kernel::B_c) - 1)) -
                  dropped;
    }
    return s;
}

// Prefetches the lengths of all sequences, 32 per line, since searches read the lines one after
// another. This does not wait even for the preceding launch: its remaining writes go through L2, so
// a prefetched line does not become stale.
template <class Kernel>
FS_DEVICE void prefetch_lengths(const DecodeKernelArgs& args) {
    const int batch = thread_index() * kWarpSize;
    if (batch >= args.batch) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(args.cache_lens + batch));
    if constexpr (Kernel::SEMANTICS.packed)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(args.cu_seqlens_q + batch));
}

// Prefetches into L2 the line of keys or values that holds an element of a head's row.
template <int kBytes>
FS_DEVICE void prefetch_line(const void* cache, const DecodeStrides& strides, int64_t block,
                             int head, int slot, int element) {
    const int64_t first = block * strides.batch + head * strides.head + slot * strides.row;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(cache) +
                                                  (first + element) * kBytes));
}

// Whether rows of the call may be shorter than the kernel's, if q and v have the same width.
template <class Kernel>
inline constexpr bool kCutsRows = Kernel::SEMANTICS.uneven && !Kernel::has_d_v;

// Prefetches the lines of a key's row and of its value's row that begin with this element. If the
// widths differ, a row that is too short to have the element is left out.
template <class Kernel>
FS_DEVICE void prefetch_lines(const DecodeKernelArgs& args, int64_t block, int head, int slot,
                              int element) {
    constexpr int kBytes = Kernel::cache_bytes;
    if (!Kernel::has_d_v || element < d_of_qk<Kernel>(args))
        prefetch_line<kBytes>(args.k_cache, args.k_cache_strides, block, head, slot, element);
    if (!Kernel::has_d_v || element < d_of_v<Kernel>(args))
        prefetch_line<kBytes>(args.v_cache, args.v_cache_strides, block, head, slot, element);
}

// Prefetches the keys and values that a CTA copies first, if each of its runs is a whole sequence
// of one tile. It does so before it knows how many keys the sequence has.
template <class Kernel>
FS_DEVICE void prefetch_run(const DecodeKernelArgs& args) {
    constexpr int kLineBytes = 128, kBytes = Kernel::cache_bytes;
    constexpr int kRowBytes = Kernel::d_wider * kBytes;
    constexpr int kRowLines = kRowBytes < kLineBytes ? 1 : kRowBytes / kLineBytes;  // whole ones
    constexpr uint32_t kLines = (Kernel::stages - 1) * Kernel::B_c * kRowLines;
    const int index = static_cast<int>(block_index());
    const int batch = args.by_whole_runs.divide(index), head = index - batch * args.heads_k;
#pragma unroll
    for (uint32_t first = 0; first < kLines; first += Kernel::n_threads) {
        const uint32_t line = first + static_cast<uint32_t>(thread_index());
        const int key = static_cast<int>(line / kRowLines);
        if ((kLines % Kernel::n_threads != 0 && line >= kLines) || key >= args.capacity) break;
        const int element = static_cast<int>(line % kRowLines) * (kLineBytes / kBytes);
        if (kCutsRows<Kernel> && element >= args.d) continue;
        prefetch_lines<Kernel>(args, batch, head, key, element);
    }
}

// Prefetches the first keys and values of all sequences, the same number of each; a thread
// prefetches some of the lines. It does so before lengths are known, and before the preceding
// launch is over, which may still write these lines in L2. A page index that is still being written
// refers to some page.
template <class Kernel, bool kPaged>
FS_DEVICE void prefetch_first_keys(const DecodeKernelArgs& args) {
    constexpr int kLineElements = 128 / Kernel::cache_bytes;
    constexpr int kRowLines = (Kernel::d_wider + kLineElements - 1) / kLineElements;
    const int keys = 1 << args.log2_prefetched_keys;
    const int lines = args.batch * keys * args.heads_k * kRowLines;
    const int step = static_cast<int>(gridDim.x) * Kernel::n_threads;
    struct Line {
        int block, head, slot, element;
    };
    // In a paged cache this loads the page index, one line ahead of its use.
    const auto find = [&](int line) {
        const int row = line / kRowLines;
        const int key_of_all = args.by_heads_k.divide(row);
        Line its{key_of_all >> args.log2_prefetched_keys, row - key_of_all * args.heads_k,
                 key_of_all & (keys - 1), line % kRowLines * kLineElements};
        if constexpr (kPaged) {
            const int page = args.by_page.divide(its.slot);
            its.slot -= page * static_cast<int>(args.by_page.divisor);
            its.block = load_relaxed(args.page_table + its.block * args.page_table_stride + page);
        }
        return its;
    };
    int line = static_cast<int>(block_index()) * Kernel::n_threads + thread_index();
    if (line >= lines) return;
    Line next = find(line);
#pragma unroll 1
    for (bool goes_on = true; goes_on;) {
        const Line its = next;
        line += step;
        goes_on = line < lines;
        if (goes_on) next = find(line);
        if (kCutsRows<Kernel> && its.element >= args.d) continue;
        const int block = kPaged ? min(max(its.block, 0), args.blocks - 1) : its.block;
        prefetch_lines<Kernel>(args, block, its.head, its.slot, its.element);
    }
}

// The length that a run should have, in blocks of B_c keys: a share of the keys of all sequences
// without many rows. It is odd if CTAs request their runs from a counter. 0: one part per run. Must
// be called by whole warps.
template <class Kernel>
FS_DEVICE int share_of_cta(const DecodeKernelArgs& args, const Lengths& lengths = {}) {
    if (args.share == 0.0f) return 0;
    if (Kernel::has_whole_runs && args.by_whole_runs.divisor != 0) return kMostShare;
    float units = 0.0f, most = 0.0f;
    for (int batch = lane_index(); batch < args.batch; batch += kWarpSize) {
        const DecodeSequence s = undivided_sequence<Kernel>(args, batch, lengths);
        if (s.is_chunk) continue;
        const auto its = static_cast<float>(units_of<Kernel>(s));
        units += its * static_cast<float>(s.tiles);
        most = fmaxf(most, its);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) units += __shfl_xor_sync(kWholeWarp, units, step);
    float of_units = units < args.from_large ? args.share : args.share_of_large;
    if (__any_sync(kWholeWarp, most > units * args.most_of_equal) && units >= args.from_ragged)
        of_units = args.share_of_ragged;
    const int share = static_cast<int>(fminf(units * fabsf(of_units), kMostShare));
    return (share & ~1) | (of_units < 0.0f ? 1 : 0);
}

template <class Kernel>
FS_DEVICE DecodeSequence sequence_of(const DecodeKernelArgs& args, int batch, int share,
                                     const Lengths& lengths = {}) {
    DecodeSequence s = undivided_sequence<Kernel>(args, batch, lengths);
    const int units = units_of<Kernel>(s);
    if constexpr (Kernel::has_warpgroups) {
        if (s.is_chunk && s.tiles == 0) {
            s.chunk = Kernel::B_c;
            s.parts = s.runs = 1;
            s.run_levels = 0;
            return s;
        }
    }
    int units_of_part;
    if (s.tiles <= 1 && !s.is_chunk) {
        units_of_part = args.by_parts.divide(units + args.most_parts - 1);
    } else {
        const int most_parts = s.is_chunk ? args.most_chunk_parts : args.most_parts;
        const int parts = max(most_parts / s.tiles, 1);
        units_of_part = (units + parts - 1) / parts;
    }
    units_of_part = max(units_of_part, s.is_chunk ? args.min_chunk_units : args.min_units);
    if constexpr (Kernel::canonical) units_of_part = kCanonicalChunk / Kernel::B_c;
    s.chunk = units_of_part * Kernel::B_c;
    const auto all_units = static_cast<uint32_t>(units + units_of_part - 1);
    s.parts = max(static_cast<int>(all_units / static_cast<uint32_t>(units_of_part)), 1);
    s.run_levels = 0;
    s.runs = s.parts;
    if (s.is_chunk) return s;
    if constexpr (Kernel::has_clusters) {
        if (args.cluster_levels > 0) {
            s.run_levels = args.cluster_run_levels;
            s.runs = (s.parts + (1 << s.run_levels) - 1) >> s.run_levels;
            return s;
        }
    }
    while (s.runs > 1 && units_of_part <= share >> (s.run_levels + 1)) {
        ++s.run_levels;
        s.runs = (s.runs + 1) / 2;
    }
    return s;
}

// The softmax states of a sequence's rows for one K/V head: one for each part of the keys, or for
// each subtree, which uses the slot of its first part. Sums are stored part by part; the statistics
// of a row are next to each other.
template <class Kernel>
struct PartStates {
    const DecodeKernelArgs& args;
    int64_t first;  // first row
    int rows, parts;

    FS_DEVICE PartStates(const DecodeKernelArgs& args, int batch, int head_k, int rows, int parts)
        : args(args),
          first((int64_t{batch} * args.heads_k + head_k) * args.most_slots * args.slot_rows),
          rows(rows),
          parts(parts) {}
    FS_DEVICE PartStates(const DecodeKernelArgs& args, const DecodeSequence& s, int batch,
                         int head_k)
        : PartStates(args, batch, head_k, s.queries * args.heads_per_group, s.parts) {
        if (s.is_chunk)
            first = args.chunk_states + head_k * args.chunk_head_rows +
                    batch * args.chunk_batch_rows + s.first_query * args.chunk_query_rows;
    }

    FS_DEVICE float* sums(int part, int row) const {
        return args.part_o + (first + int64_t{part} * rows + row) * Kernel::d_v;
    }
    FS_DEVICE float* statistics(int part, int row) const {
        return args.part_statistics + 2 * (first + int64_t{row} * parts + part);
    }

    // Loads and stores four neighbouring columns. The thread of column 0 stores the statistics.
    FS_DEVICE RowState load(int part, int row, int column) const {
        const float2 its = *reinterpret_cast<const float2*>(statistics(part, row));
        return RowState(its, load_global_16B(sums(part, row) + column));
    }
    FS_DEVICE void store(const RowState& state, int part, int row, int column) const {
        store_global_16B(sums(part, row) + column, state.bits_of_sums());
        if (column == 0) store_global_8B(statistics(part, row), state.bits_of_statistics());
    }
};

// The states of few parts, in memory that is zero where no word has arrived. Each word shows by
// itself whether it has arrived, so no order is needed between words. A float is stored as its
// complement; a NaN whose complement is 0 becomes another NaN.
template <class Kernel>
struct ArrivingStates {
    uint32_t *const sums, *const statistics;  // addresses for the first row of the first part
    const int rows, parts;

    FS_DEVICE ArrivingStates(const DecodeKernelArgs& args, int head_k, int rows, int parts)
        : sums(args.arriving + head_k * args.arriving_rows * Kernel::d_v),
          statistics(args.arriving +
                     (args.heads_k * Kernel::d_v + head_k * 2) * args.arriving_rows),
          rows(rows),
          parts(parts) {}

    FS_DEVICE uint32_t* sums_of(int part, int row) const {
        return sums + (part * rows + row) * Kernel::d_v;
    }
    FS_DEVICE uint32_t* statistics_of(int part, int row) const {
        return statistics + 2 * (row * parts + part);
    }
    FS_DEVICE void send(const RowState& state, int part, int row, int column) const {
        const uint4 of_o = state.bits_of_sums();
        send_global_16B(sums_of(part, row) + column,
                        {sent(of_o.x), sent(of_o.y), sent(of_o.z), sent(of_o.w)});
        if (column > 0) return;
        const uint2 its = state.bits_of_statistics();
        send_global_8B(statistics_of(part, row), {sent(its.x), sent(its.y)});
    }
    FS_DEVICE static uint32_t sent(uint32_t bits) { return max(~bits, 1u); }
    FS_DEVICE static float received(uint32_t word) { return __uint_as_float(~word); }
};

// The position where the search for an item begins.
struct WorkCursor {
    int first = 0;        // first sequence to search
    uint32_t before = 0;  // number of items in the sequences before `first`
    int share;            // result of share_of_cta()
    uint32_t index;       // index of the item
    static constexpr int kBytes = 16;

    FS_DEVICE WorkCursor(int share, uint32_t index) : share(share), index(index) {}

    // Loads a cursor from shared memory.
    FS_DEVICE explicit WorkCursor(uint32_t address) {
        const uint4 x = load_shared_16B(address);
        first = x.x, before = x.y, share = x.z, index = x.w;
    }
    FS_DEVICE void save(uint32_t address) const {
        store_shared_16B(address, {as_uint(first), before, as_uint(share), index});
    }
    // Whether the CTA's next item is past the end of `all` items. The next item's index is the
    // current one plus the grid size. If a counter assigns items, the next index is at least the
    // grid size. Most CTAs end this way and need no further search.
    FS_DEVICE bool is_last(uint32_t all) const {
        return ((share & 1) != 0 ? 0 : index) + gridDim.x >= all;
    }

  private:
    FS_DEVICE static uint32_t as_uint(int x) { return static_cast<uint32_t>(x); }
};

// Finds the sequence of an item, and the item's index within the sequence. `Count` provides the
// number of items of a sequence. A CTA takes one item after another, so indices of successive
// searches grow. A warp searches 32 sequences at once, one per lane.
template <class Kernel, class Count>
FS_DEVICE bool find_sequence(const DecodeKernelArgs& args, WorkCursor& cursor, int& batch,
                             DecodeSequence& s, int& rest, const Lengths& lengths = {}) {
    // If the host has given the number of items of each sequence, no search is needed.
    const bool is_known = Count::kHasWholeRuns && args.by_whole_runs.divisor != 0;
    const int lane = is_known ? 0 : lane_index();
    if (is_known) {
        cursor.first = args.by_whole_runs.divide(static_cast<int>(cursor.index));
        cursor.before = static_cast<uint32_t>(cursor.first) * args.by_whole_runs.divisor;
    }
    for (; cursor.first < args.batch; cursor.first += kWarpSize) {
        DecodeSequence own;
        uint32_t end = 0;  // where this lane's sequence ends, counted from `before`
        if (cursor.first + lane < args.batch) {
            own = sequence_of<Kernel>(args, cursor.first + lane, cursor.share, lengths);
            end = Count::items(args, own);
        }
        if (is_known) {
            batch = cursor.first;
            s = own;
            set_rows<Kernel>(s, args, 0, args.seq_q);
            rest = static_cast<int>(cursor.index - cursor.before);
            return true;
        }
#pragma unroll
        for (int step = 1; step < kWarpSize; step *= 2) {
            const uint32_t below = __shfl_up_sync(kWholeWarp, end, step);
            if (lane >= step) end += below;
        }
        const uint32_t all = __shfl_sync(kWholeWarp, end, kWarpSize - 1);
        const uint32_t within = cursor.index - cursor.before;
        if (within >= all) {
            cursor.before += all;
            continue;
        }
        const int i = __popc(__ballot_sync(kWholeWarp, end <= within));
        const uint32_t begin = __shfl_sync(kWholeWarp, end, max(i - 1, 0));
        batch = cursor.first + i;
        s.keys = __shfl_sync(kWholeWarp, own.keys, i);
        s.begin = __shfl_sync(kWholeWarp, own.begin, i);
        s.chunk = __shfl_sync(kWholeWarp, own.chunk, i);
        s.parts = __shfl_sync(kWholeWarp, own.parts, i);
        s.run_levels = __shfl_sync(kWholeWarp, own.run_levels, i);
        s.runs = __shfl_sync(kWholeWarp, own.runs, i);
        if constexpr (Kernel::SEMANTICS.packed)
            set_rows<Kernel>(s, args, __shfl_sync(kWholeWarp, own.first_query, i),
                             __shfl_sync(kWholeWarp, own.queries, i));
        else
            set_rows<Kernel>(s, args, 0, args.seq_q);
        rest = static_cast<int>(within - (i == 0 ? 0 : begin));
        if (cursor.first + kWarpSize >= args.batch && cursor.is_last(cursor.before + all))
            cursor.first = args.batch;
        return true;
    }
    return false;
}

// Items are the runs, K/V heads and row tiles of the sequences that a kernel handles.
template <class Kernel>
struct RunCount {
    static constexpr bool kHasWholeRuns = !Kernel::takes_chunks && Kernel::has_whole_runs;
    FS_DEVICE static uint32_t items(const DecodeKernelArgs& args, const DecodeSequence& s) {
        if constexpr (Kernel::has_clusters && !Kernel::takes_chunks)
            if (args.cluster_levels > 0)
                return s.is_chunk ? 0 : s.tiles * args.heads_k << args.cluster_levels;
        return s.is_chunk == Kernel::takes_chunks ? s.runs * s.tiles * args.heads_k : 0;
    }
};

struct DecodeItem {
    int batch, head_k, tile;
    int first_part, end_part;  // of the run
    DecodeSequence sequence;
};

// Items of a call are ordered by sequence, run, K/V head and row tile. So heads that read the same
// rows of the cache are neighbours, and so are tiles that read the same keys.
template <class Kernel>
FS_DEVICE bool find_item(const DecodeKernelArgs& args, WorkCursor& cursor, DecodeItem& item,
                         const Lengths& lengths = {}) {
    DecodeSequence& s = item.sequence;
    int rest;
    if (!find_sequence<Kernel, RunCount<Kernel>>(args, cursor, item.batch, s, rest, lengths))
        return false;
    bool in_cluster = false;
    if constexpr (Kernel::has_clusters && !Kernel::takes_chunks)
        in_cluster = args.cluster_levels > 0;
    int run = 0;
    item.tile = 0;
    if (in_cluster) {
        // Each CTA of a cluster has a run, or one past the end, which has no parts.
        run = rest & ((1 << args.cluster_levels) - 1);
        rest >>= args.cluster_levels;
    }
    if (s.tiles > 1) {
        item.tile = rest % s.tiles;
        rest /= s.tiles;
    }
    if (in_cluster) {
        item.head_k = rest;
    } else {
        run = args.by_heads_k.divide(rest);
        item.head_k = rest - run * args.heads_k;
    }
    item.first_part = run << s.run_levels;
    item.end_part = min(item.first_part + (1 << s.run_levels), s.parts);
    return true;
}

}  // namespace flashsmith
