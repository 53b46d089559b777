// Where the boxes of a tile begin, in the dimensions of the tensor maps (plan.cc).
#pragma once

#include "wgmma/scheduler.cuh"
#include "wgmma/tma.cuh"

namespace flashsmith {

// A box of rows from `row` on of one head of a sequence with `count` rows.
//
// Dense, the dimensions are (column, row, head, batch), and what is past the sequence is outside of
// the tensor. Packed it is not: the next sequence begins there, whose values may be NaN, and
// 0 x NaN is NaN. So a packed tensor's map has rows twice: counted so that a sequence ends with the
// map, at row kRowsOfMap, and as the row of the tensor where it ends. Together they are kRowsOfMap
// rows too far, and the fifth dimension takes those back.
template <bool kPacked>
FS_DEVICE TmaBox<kPacked> box_of_rows(int row, int sequence_first, int count, int head, int batch) {
    if constexpr (kPacked)
        return {0, kRowsOfMap - count + row, sequence_first + count, head};
    else
        return {0, row, head, batch};
}

}  // namespace flashsmith
