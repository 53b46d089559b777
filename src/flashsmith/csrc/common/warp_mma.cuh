// A warp's matrix products with operands in registers or in one of four shared-memory layouts.
// Warps that share a product's columns interleave them in groups of 16: warp i of n has columns 16
// (i + n t). Each lane then needs one base address and constant offsets. If each warp has an odd
// number of 8-column tiles, the last tiles of the warps are neighbours.
#pragma once

#include "common/accumulators.cuh"
#include "common/layout.cuh"

namespace flashsmith {

// The number of 8-column tiles that each of `turns` warps has. With 72 columns and two warps, the
// last tile of one warp lies beyond the columns.
constexpr int tiles_each(int columns, int turns) {
    return (columns / 8 + turns - 1) / turns;
}
// The distance in tiles from a warp's first tile to the n-th of its kTiles tiles. For the last one
// of an odd number of tiles, it is the distance from the tile with the index `turn`.
template <int kTurns>
FS_DEVICE constexpr int tile_step(int n) {
    return n / 2 * 2 * kTurns + n % 2;
}
template <int kTiles>
FS_DEVICE constexpr bool is_single_tile(int n) {
    return kTiles % 2 == 1 && n == kTiles - 1;
}

// A operand of 16 kMTiles rows from `first_row` on, with k along the columns.
template <class Layout, int kMTiles>
struct RowsA {
    using Fragment = uint32_t[kMTiles][4];
    typename Layout::Cursor cursor;

    FS_DEVICE RowsA(uint32_t tile, int lane, int first_row)
        : cursor(tile, first_row + lane % 16, lane / 16) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) ldmatrix_x4(fragment[m], cursor.at(16 * m, 2 * step));
    }
};

// A operand with k along the rows. Warp `turn` of `kTurns` has every kTurns-th group of 16 columns.
template <class Layout, int kMTiles, int kTurns>
struct ColumnsA {
    using Fragment = uint32_t[kMTiles][4];
    typename Layout::Cursor cursor;

    FS_DEVICE ColumnsA(uint32_t tile, int lane, int turn)
        : cursor(tile, lane % 8 + lane / 16 * 8, 2 * turn + lane / 8 % 2) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
            ldmatrix_x4_transposed(fragment[m], cursor.at(16 * step, 2 * kTurns * m));
    }
};

// A operand that is already in registers.
template <int kMTiles, int kSteps>
struct InRegisters {
    using Fragment = uint32_t[kMTiles][4];
    Fragment fragments[kSteps];

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) fragment[m][i] = fragments[step][m][i];
    }
};

// B operand with n along the rows and k along the columns, from `first_row` and `first_chunk` on.
template <class Layout>
struct RowsB {
    typename Layout::Cursor cursor;

    FS_DEVICE RowsB(uint32_t tile, int lane, int first_row = 0, int first_chunk = 0)
        : cursor(tile, first_row + lane % 8 + lane / 16 * 8, first_chunk + lane / 8 % 2) {}

    // Loads the operands of two 8-column tiles of the product, which start at column 16 * pair.
    FS_DEVICE void load(uint32_t (&two_tiles)[4], int step, int pair) const {
        ldmatrix_x4(two_tiles, cursor.at(16 * pair, 2 * step));
    }
};

// B operand with k along the rows. Warp `turn` of `kTurns` has every kTurns-th group of 16 columns
// n.
template <class Layout, int kTurns>
struct ColumnsB {
    typename Layout::Cursor cursor, single;

    FS_DEVICE ColumnsB(uint32_t tile, int lane, int turn = 0)
        : cursor(tile, lane % 16, 2 * turn + lane / 16), single(tile, lane % 16, turn) {}

    FS_DEVICE void load(uint32_t (&two_tiles)[4], int step, int pair) const {
        ldmatrix_x4_transposed(two_tiles, cursor.at(16 * step, 2 * kTurns * pair));
    }
    // Loads the operand of the last one of an odd number of tiles, after `pairs` pairs.
    FS_DEVICE void load_single(uint32_t (&tile)[2], int step, int pairs) const {
        ldmatrix_x2_transposed(tile, single.at(16 * step, 2 * kTurns * pairs));
    }
};

// acc += A B, in kSteps k16-steps.
template <typename value_t, int kSteps, int kMTiles, int kNTiles, class A, class B>
FS_DEVICE void multiply(float (&acc)[kMTiles][kNTiles][4], const A& a, const B& b) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        typename A::Fragment rows;
        a.load(rows, step);
#pragma unroll
        for (int pair = 0; pair < kNTiles / 2; ++pair) {
            uint32_t two_tiles[4];
            b.load(two_tiles, step, pair);
            const uint32_t low[2] = {two_tiles[0], two_tiles[1]};
            const uint32_t high[2] = {two_tiles[2], two_tiles[3]};
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
                mma_m16n8k16<value_t>(acc[m][2 * pair], rows[m], low);
                mma_m16n8k16<value_t>(acc[m][2 * pair + 1], rows[m], high);
            }
        }
        if constexpr (kNTiles % 2 == 1) {
            uint32_t tile[2];
            b.load_single(tile, step, kNTiles / 2);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
                mma_m16n8k16<value_t>(acc[m][kNTiles - 1], rows[m], tile);
        }
    }
}

// Rounds accumulators and packs them as an A operand.
template <typename value_t, int kMTiles, int kNTiles>
FS_DEVICE void round_to(InRegisters<kMTiles, kNTiles / 2>& a,
                        const float (&acc)[kMTiles][kNTiles][4]) {
#pragma unroll
    for (int k = 0; k < kNTiles / 2; ++k)
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
            pack_fragment<value_t>(a.fragments[k][m], acc[m][2 * k], acc[m][2 * k + 1]);
}

}  // namespace flashsmith
