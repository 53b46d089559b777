// Where the boxes of a tile begin, in the dimensions of the tensor maps (hopper_plan.cc).
#pragma once

#include "scheduler.cuh"
#include "tma.cuh"

namespace flashsmith {

// A box of `box_rows` rows from `row` on of one head of a sequence with `count` rows.
//
// Dense, the dimensions are (column, row, head, batch), and what is past the sequence is outside of
// the tensor. Packed it is not: the next sequence begins there, whose values may be NaN, and
// 0 x NaN is NaN. So a packed tensor's map has rows twice, as the row in the box (of which there
// are box_rows, and a box is as long) and as the row where a box ends, with the tensor's address
// `box_rows` rows early. A box of n rows begins at box_rows - n of the one: what is past the
// sequence is outside of the box. Its end is n rows after its first row, in the other.
template <bool kPacked>
FS_DEVICE TmaBox box_of_rows(int row, int box_rows, int sequence_first, int count, int head,
                             int batch) {
    if constexpr (!kPacked) return {0, row, head, batch};
    const int present = min(max(count - row, 0), box_rows);
    return {0, box_rows - present, sequence_first + row + present, head};
}

}  // namespace flashsmith
