// Which keys a query row may see, and so which K/V blocks a Q block visits. Positions of one
// sequence; query i stands at key i + seq_k - seq_q (bottom right).
#pragma once

#include "common/forward_args.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// Rows of one sequence of the batch: the first (in a packed tensor) and how many.
struct SequenceRows {
    int64_t first;
    int count;
};

// The host never reads the contents of cu_seqlens: they are clamped, so that no value leads outside
// the tensors or beyond the grid.
template <bool kPacked>
FS_DEVICE SequenceRows sequence_rows(const int32_t* cu_seqlens, int batch, int max_count,
                                     int total) {
    if constexpr (!kPacked) return {0, max_count};
    const int begin = min(max(cu_seqlens[batch], 0), total);
    const int end = min(max(cu_seqlens[batch + 1], begin), total);
    return {begin, min(end - begin, max_count)};
}

// The keys of one sequence. Of partial kernels those from k_begin on, a row of the tensor, as many
// as seqused_k says: within the tensor, or without a k_begin within the sequence. As cu_seqlens,
// both are clamped.
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

// K/V blocks to visit, [begin, end), of which every row sees all of [full_begin, full_end).
struct BlockRange {
    int begin, end, full_begin, full_end;
    FS_DEVICE bool needs_mask(int block) const { return block < full_begin || block >= full_end; }
};

// The keys that a query at `position` sees, of `seq_k` in its sequence, by struct Mask of the
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

// Elements of a tile of queries by keys whose key its row does not see become `hidden`: -inf of
// scores, 0 of gradients. `seen(m, r)` is what a row of the lane sees, `first_key` that of the
// tiles' first column.
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

// The same of a tile of keys by queries. `seen(n, i)` is what the lane's i-th query of the n-th
// tiles sees, `first_key` the lane's first.
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

    // For rows first_row .. first_row + rows - 1, as far as they exist.
    FS_DEVICE BlockRange blocks(int first_row, int rows, int B_c) const {
        if constexpr (!kMasked) return {0, args.n_KV_blocks, 0, args.n_KV_blocks};
        const int last_row = min(first_row + rows, seq_q) - 1;
        // Both ends of a row's range grow with the row.
        const KeyRange top = keys(first_row), bottom = keys(last_row);
        return {
            .begin = top.first / B_c,
            .end = bottom.last < top.first ? top.first / B_c : bottom.last / B_c + 1,
            .full_begin = (bottom.first + B_c - 1) / B_c,
            .full_end = (top.last + 1) / B_c,
        };
    }

    // Scores of keys that a row may not see become -inf. `row(m, r)` is a row of the lane in its
    // sequence, `first_key` that of the tiles' first column.
    template <int kMTiles, int kNTiles, class Row>
    FS_DEVICE void mask(float (&scores)[kMTiles][kNTiles][4], const int& lane, const Row& row,
                        int first_key) const {
        mask_keys<SEMANTICS>(
            scores, lane, first_key, [&](int m, int r) { return keys(row(m, r)); }, -INFINITY);
    }
};

}  // namespace flashsmith
