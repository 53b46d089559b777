// Which keys a query row may see, and which K/V blocks a Q block must therefore visit. Positions
// are relative to the sequence; query i is aligned with key i + seq_k - seq_q (bottom right).
#pragma once

#include "common/forward_args.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// Rows of one sequence of the batch: the index of the first row (in a packed tensor) and the number
// of rows.
struct SequenceRows {
    int64_t first;
    int count;
};

// The host never reads the contents of cu_seqlens. They are clamped here, so that no value can
// address memory outside the tensors or work beyond the grid.
template <bool kPacked>
FS_DEVICE SequenceRows sequence_rows(const int32_t* cu_seqlens, int batch, int max_count,
                                     int total) {
    if constexpr (!kPacked) return {0, max_count};
    const int begin = min(max(cu_seqlens[batch], 0), total);
    const int end = min(max(cu_seqlens[batch + 1], begin), total);
    return {begin, min(end - begin, max_count)};
}

// The keys of one sequence. In partial kernels they start at tensor row k_begin, and seqused_k is
// their number. Both are clamped to the tensor like cu_seqlens; without k_begin, to the sequence.
template <Semantics SEMANTICS>
FS_DEVICE SequenceRows key_rows(const ForwardKernelArgs& args, int batch) {
    SequenceRows k =
        sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    if constexpr (SEMANTICS.partial) {
        const int rows = SEMANTICS.packed ? args.total_k : args.seq_k;
        const int own_end = static_cast<int>(k.first) + k.count;
        int first = static_cast<int>(k.first), end = own_end;
        if (args.k_begin != nullptr) {
            first = min(max(args.k_begin[batch], 0), rows);
            end = args.seqused_k != nullptr ? rows : own_end;
        }
        int count = max(end - first, 0);
        if (args.seqused_k != nullptr) count = min(count, max(args.seqused_k[batch], 0));
        k = {first, min(count, args.seq_k)};
    }
    return k;
}

struct KeyRange {
    int first, last;  // inclusive
    FS_DEVICE bool contains(int key) const { return key >= first && key <= last; }
};

// K/V blocks to visit, [begin, end). Every row sees all of [full_begin, full_end).
struct BlockRange {
    int begin, end, full_begin, full_end;
    FS_DEVICE bool needs_mask(int block) const { return block < full_begin || block >= full_end; }
};

// The keys visible to a query at `position` in a sequence of `seq_k` keys, by struct Mask of the
// library's semantics.cuh. `window` has window_left and window_right.
template <Semantics SEMANTICS, class Window>
FS_DEVICE KeyRange visible_range(const Window& window, int position, int seq_k) {
    KeyRange keys{0, seq_k - 1};
    if constexpr (SEMANTICS.hides_later)
        keys.last =
            min(keys.last, Mask::last_key(position, window.window_left, window.window_right));
    if constexpr (SEMANTICS.hides_earlier)
        keys.first =
            max(keys.first, Mask::first_key(position, window.window_left, window.window_right));
    return keys;
}

// Writes `hidden` (-inf for scores, 0 for gradients) to the elements of a query-by-key tile whose
// key is not visible to their row. `seen(m, r)` is the range of keys visible to a row of the lane,
// and `first_key` is the key of the tile's first column.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Seen>
FS_DEVICE void mask_keys(float (&x)[kMTiles][kNTiles][4], const int& lane, int first_key,
                         const Seen& seen, float hidden) {
    const int first_column = first_key + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange keys = seen(m, r);
            const KeyRange columns{keys.first - first_column, keys.last - first_column};
#pragma unroll
            for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e > columns.last ||
                        (SEMANTICS.hides_earlier && 8 * n + e < columns.first))
                        x[m][n][2 * r + e] = hidden;
        }
}

// Writes `hidden` to the elements of a key-by-query tile whose key is not visible to their query.
// `seen(n, i)` is the range of keys visible to the lane's i-th query in tile column n, and
// `first_key` is the lane's first key.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Seen>
FS_DEVICE void mask_queries(float (&x)[kMTiles][kNTiles][4], int first_key, const Seen& seen,
                            float hidden) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const KeyRange keys = seen(n, i);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = first_key + 16 * m + 8 * r;
                    const bool sees =
                        SEMANTICS.hides_earlier ? keys.contains(key) : key <= keys.last;
                    if (!sees) x[m][n][2 * r + i] = hidden;
                }
        }
}

template <Semantics SEMANTICS>
struct KeyMask {
    const ForwardKernelArgs& args;
    int seq_q, seq_k;
    static constexpr bool kMasked = SEMANTICS.masked();

    FS_DEVICE KeyMask(const ForwardKernelArgs& args, int seq_q, int seq_k)
        : args(args), seq_q(seq_q), seq_k(seq_k) {}

    FS_DEVICE KeyRange keys(int row) const {
        return visible_range<SEMANTICS>(args, row + seq_k - seq_q, seq_k);
    }

    // The blocks that the existing rows among first_row .. first_row + rows - 1 visit.
    FS_DEVICE BlockRange blocks(int first_row, int rows, int B_c) const {
        if constexpr (!kMasked) return {0, args.n_KV_blocks, 0, args.n_KV_blocks};
        const int last_row = min(first_row + rows, seq_q) - 1;
        // Neither end of the visible range decreases from row to row.
        const KeyRange top = keys(first_row), bottom = keys(last_row);
        return {
            .begin = top.first / B_c,
            .end = bottom.last < top.first ? top.first / B_c : bottom.last / B_c + 1,
            .full_begin = (bottom.first + B_c - 1) / B_c,
            .full_end = (top.last + 1) / B_c,
        };
    }

    // Sets scores of keys that a row may not see to -inf. `row(m, r)` is a row of the lane within
    // its sequence, `first_key` the key of the tile's first column.
    template <int kMTiles, int kNTiles, class Row>
    FS_DEVICE void mask(float (&scores)[kMTiles][kNTiles][4], const int& lane, const Row& row,
                        int first_key) const {
        mask_keys<SEMANTICS>(
            scores, lane, first_key, [&](int m, int r) { return keys(row(m, r)); }, -INFINITY);
    }
};

}  // namespace flashsmith
