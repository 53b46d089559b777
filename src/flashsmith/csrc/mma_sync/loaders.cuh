// Loads K and V fragments from shared memory, one k16-step of an mma operand per warp. Each loader
// keeps one address per lane and adds constant offsets.
#pragma once

#include "common/warp_mma.cuh"

namespace flashsmith {

// A operand: Q as stored, rows by columns of the head.
template <class Layout, int kMTiles>
using QLoader = RowsA<Layout, kMTiles>;

// B operand with n along K's rows and k along the head: row-major K is the column-major operand.
template <class Layout, int kNTiles>
struct KLoader {
    using Fragment = uint32_t[kNTiles][2];
    typename Layout::Cursor cursor;
    uint32_t stage = 0;  // byte distance of the current tile from the first

    FS_DEVICE KLoader(uint32_t tile, int lane)
        : cursor(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t two_tiles[4];
            ldmatrix_x4(two_tiles, cursor.at(8 * n, 2 * step, stage));
            fragment[n][0] = two_tiles[0];
            fragment[n][1] = two_tiles[1];
            fragment[n + 1][0] = two_tiles[2];
            fragment[n + 1][1] = two_tiles[3];
        }
    }
};

// B operand with k along V's rows and n along the head: ldmatrix transposes it.
template <class Layout, int kNTiles>
struct VLoader {
    using Fragment = uint32_t[kNTiles][2];
    typename Layout::Cursor cursor;
    uint32_t stage = 0;  // byte distance of the current tile from the first

    FS_DEVICE VLoader(uint32_t tile, int lane) : cursor(tile, lane % 16, lane / 16) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t two_tiles[4];
            ldmatrix_x4_transposed(two_tiles, cursor.at(16 * step, n, stage));
            fragment[n][0] = two_tiles[0];
            fragment[n][1] = two_tiles[1];
            if (n + 1 == kNTiles) break;  // with 72 columns, the next tile holds only zeros
            fragment[n + 1][0] = two_tiles[2];
            fragment[n + 1][1] = two_tiles[3];
        }
    }
};

}  // namespace flashsmith
