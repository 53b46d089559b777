// How the keys of a sequence are split into parts, and which CTA computes which part.
//
// Where parts begin and end follows from the sequence's own queries and keys and from numbers of
// the launch that a user's other sequences, the page size and the cache's capacity do not change.
#pragma once

#include "common/visible_keys.cuh"
#include "mma_sync_decode/static_kernel_configuration.cuh"

namespace flashsmith {

constexpr unsigned kWholeWarp = 0xffffffffu;

struct DecodeSequence {
    int first_query, queries;  // of a packed tensor, and how many
    int keys;                  // in the cache after appending
    int begin;                 // of the first part: a multiple of B_c
    int chunk;                 // keys of a part, but of the last
    int parts;                 // at least one, which writes the rows of a sequence without keys
    int tiles;                 // of rows
    bool is_chunk;             // whether it has many rows, for which there is another kernel
};

// No value of cache_lens or cu_seqlens_q leads outside the cache or the tensors.
template <class Kernel>
FS_DEVICE DecodeSequence sequence_of(const DecodeKernelArgs& args, int batch) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    const SequenceRows q =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    DecodeSequence s;
    s.first_query = static_cast<int>(q.first);
    s.queries = q.count;
    s.keys = min(max(args.cache_lens[batch], 0), args.capacity);
    if (args.new_k != nullptr) s.keys = min(s.keys + s.queries, args.capacity);
    s.begin = 0;
    if constexpr (SEMANTICS.mask == MaskKind::window)
        s.begin = max(s.keys - s.queries - args.window_left, 0) & ~(Kernel::B_c - 1);
    const int rows = s.queries * args.heads_per_group;
    s.is_chunk = Kernel::chunk_rows > 0 && rows > Kernel::most_rows_without_chunks;
    const int tile_rows = s.is_chunk ? Kernel::chunk_rows : Kernel::B_r;
    s.tiles = (rows + tile_rows - 1) / tile_rows;
    const int units = (s.keys - s.begin + Kernel::B_c - 1) / Kernel::B_c;
    int units_of_part;
    if (s.tiles <= 1 && !s.is_chunk) {
        units_of_part = args.by_parts.divide(units + args.most_parts - 1);
    } else {
        const int most_parts = s.is_chunk ? args.most_chunk_parts : args.most_parts;
        const int parts = max(most_parts / s.tiles, 1);
        units_of_part = (units + parts - 1) / parts;
    }
    units_of_part = max(units_of_part, s.is_chunk ? args.min_chunk_units : args.min_units);
    s.chunk = units_of_part * Kernel::B_c;
    s.parts = max((units + units_of_part - 1) / units_of_part, 1);
    return s;
}

// Where the states of a sequence's rows of a K/V head lie, in rows: sums part by part, and a row's
// statistics side by side.
struct DecodeStates {
    int64_t first;
    int rows, parts;

    FS_DEVICE DecodeStates(const DecodeKernelArgs& args, const DecodeSequence& s, int batch,
                           int head_k)
        : rows(s.queries * args.heads_per_group), parts(s.parts) {
        first = (int64_t{batch} * args.heads_k + head_k) * args.most_slots * args.slot_rows;
        if (s.is_chunk)
            first = args.chunk_states + head_k * args.chunk_head_rows +
                    batch * args.chunk_batch_rows + s.first_query * args.chunk_query_rows;
    }

    FS_DEVICE int64_t sums(int part, int row) const { return first + int64_t{part} * rows + row; }
    FS_DEVICE int64_t statistics(int row) const { return first + int64_t{row} * parts; }
};

// What CTAs take one after another, so many of each sequence. A warp looks through 32 sequences at
// once, each lane one, and goes on from there for the CTA's next item. `Count` says how many items
// a sequence has.
template <class Kernel, class Count>
struct SequenceItems {
    const DecodeKernelArgs& args;
    const int lane;
    int first = 0;        // sequence of lane 0
    uint32_t before = 0;  // items of the sequences before it
    uint32_t end;         // of this lane's sequence, counted from `before`
    DecodeSequence own;   // this lane's

    FS_DEVICE explicit SequenceItems(const DecodeKernelArgs& args)
        : args(args), lane(lane_index()) {
        look();
    }

    // Finds item `index`; the indices of successive calls grow. `rest` is its number among those of
    // its sequence.
    FS_DEVICE bool find(uint32_t index, int& batch, DecodeSequence& s, int& rest) {
        uint32_t all = __shfl_sync(kWholeWarp, end, 31);
        while (index >= before + all) {
            first += 32;
            if (first >= args.batch) return false;
            before += all;
            look();
            all = __shfl_sync(kWholeWarp, end, 31);
        }
        const uint32_t within = index - before;
        const int i = __popc(__ballot_sync(kWholeWarp, end <= within));
        const uint32_t begin = __shfl_sync(kWholeWarp, end, max(i - 1, 0));
        batch = first + i;
        s.first_query = __shfl_sync(kWholeWarp, own.first_query, i);
        s.queries = __shfl_sync(kWholeWarp, own.queries, i);
        s.keys = __shfl_sync(kWholeWarp, own.keys, i);
        s.begin = __shfl_sync(kWholeWarp, own.begin, i);
        s.chunk = __shfl_sync(kWholeWarp, own.chunk, i);
        s.parts = __shfl_sync(kWholeWarp, own.parts, i);
        s.tiles = __shfl_sync(kWholeWarp, own.tiles, i);
        s.is_chunk = Kernel::chunk_rows > 0 &&
                     s.queries * args.heads_per_group > Kernel::most_rows_without_chunks;
        rest = static_cast<int>(within - (i == 0 ? 0 : begin));
        return true;
    }

  private:
    FS_DEVICE void look() {
        end = 0;
        if (first + lane < args.batch) {
            own = sequence_of<Kernel>(args, first + lane);
            end = Count::items(args, own);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t below = __shfl_up_sync(kWholeWarp, end, step);
            if (lane >= step) end += below;
        }
    }
};

// Parts and row tiles of the K/V heads, of the sequences that a kernel is for.
template <class Kernel>
struct PartCount {
    FS_DEVICE static uint32_t items(const DecodeKernelArgs& args, const DecodeSequence& s) {
        return s.is_chunk == Kernel::takes_chunks ? s.parts * s.tiles * args.heads_k : 0;
    }
};

struct DecodeItem {
    int batch, head_k, tile, part;
    DecodeSequence sequence;
};

// The items of a call in order: sequences, parts, K/V heads, row tiles. Heads that read the same
// rows of the cache, and tiles that read the same keys, are neighbours.
template <class Kernel>
struct DecodeItems : SequenceItems<Kernel, PartCount<Kernel>> {
    using SequenceItems<Kernel, PartCount<Kernel>>::SequenceItems;

    FS_DEVICE bool find(uint32_t index, DecodeItem& item) {
        DecodeSequence& s = item.sequence;
        int rest;
        if (!SequenceItems<Kernel, PartCount<Kernel>>::find(index, item.batch, s, rest))
            return false;
        item.tile = 0;
        if (s.tiles > 1) {
            item.tile = rest % s.tiles;
            rest /= s.tiles;
        }
        item.part = this->args.by_heads_k.divide(rest);
        item.head_k = rest - item.part * this->args.heads_k;
        return true;
    }
};

}  // namespace flashsmith
