// Which keys a query sees, which queries see a key, and which blocks of both must therefore be
// multiplied. Positions count within the sequence; query i is aligned with key i + seq_k - seq_q
// (bottom right).
#pragma once

#include "backward/args.cuh"
#include "common/key_mask.cuh"

namespace flashsmith {

template <Semantics SEMANTICS>
struct BackwardKeyMask {
    static constexpr bool kMasked = SEMANTICS.masked();
    int seq_q, seq_k;
    int window_left, window_right;

    FS_DEVICE BackwardKeyMask(const BackwardKernelArgs& args, int seq_q, int seq_k)
        : seq_q(seq_q),
          seq_k(seq_k),
          window_left(args.window_left),
          window_right(args.window_right) {}

    // The keys that a row sees; the row must exist.
    FS_DEVICE KeyRange keys(int row) const {
        return visible_range<SEMANTICS>(*this, row + seq_k - seq_q, seq_k);
    }

    // The first row that sees any key, or seq_q if no row does. All later rows see a key, too.
    FS_DEVICE int first_attending_row() const {
        if (seq_k == 0) return seq_q;
        if constexpr (!kHidesKeys<SEMANTICS>) return 0;
        return min(seq_q, max(0, seq_q - seq_k + Mask::first_row(0, window_left, window_right)));
    }

    // The blocks of B_r queries that see any of the `keys` keys from first_key on. In the blocks of
    // the full range, every query sees all of these keys.
    FS_DEVICE BlockRange query_blocks(int first_key, int keys, int B_r) const {
        const int n_blocks = (seq_q + B_r - 1) / B_r;
        if constexpr (!kMasked) return {0, n_blocks, 0, n_blocks};
        const int last_key = min(first_key + keys, seq_k) - 1;
        // Rows [begin, end) see some of the keys, [full_begin, full_end) see all of them. Sums may
        // exceed 32 bits.
        int64_t begin = 0, end = seq_q, full_begin = 0, full_end = seq_q;
        const int64_t shift = int64_t{seq_q} - seq_k;
        if constexpr (SEMANTICS.hides_later) {
            begin = max(begin, Mask::first_row(first_key, window_left, window_right) + shift);
            full_begin =
                max(full_begin, Mask::first_row(last_key, window_left, window_right) + shift);
        }
        if constexpr (SEMANTICS.hides_earlier) {
            end = min(end, Mask::last_row(last_key, window_left, window_right) + shift + 1);
            full_end =
                min(full_end, Mask::last_row(first_key, window_left, window_right) + shift + 1);
        }
        // Keys past the end must be masked in every query block, so no block is full.
        if (first_key + keys > seq_k) full_end = 0;
        if (begin >= end) return {0, 0, 0, 0};
        return {
            .begin = static_cast<int>(begin / B_r),
            .end = static_cast<int>((end + B_r - 1) / B_r),
            .full_begin = static_cast<int>((full_begin + B_r - 1) / B_r),
            // A block with rows that do not exist is not full: 0 times an infinite key is NaN.
            .full_end = static_cast<int>(max(full_end, int64_t{0}) / B_r),
        };
    }

    // Blocks of B_c keys that the existing rows among first_row .. first_row + rows - 1 see.
    FS_DEVICE BlockRange key_blocks(int first_row, int rows, int B_c) const {
        const int n_blocks = (seq_k + B_c - 1) / B_c;
        if constexpr (!kMasked) return {0, n_blocks, 0, n_blocks};
        const int last_row = min(first_row + rows, seq_q) - 1;
        // Neither end of the range of visible keys decreases from row to row.
        const KeyRange top = this->keys(first_row), bottom = this->keys(last_row);
        if (bottom.last < top.first) return {0, 0, 0, 0};
        return {
            .begin = top.first / B_c,
            .end = bottom.last / B_c + 1,
            .full_begin = (bottom.first + B_c - 1) / B_c,
            .full_end = max(top.last + 1, 0) / B_c,
        };
    }
};

}  // namespace flashsmith
