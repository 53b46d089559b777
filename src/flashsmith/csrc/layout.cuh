// Where a 16-bit tile's elements lie in shared memory.
#pragma once

#include "ptx_functions.cuh"

namespace flashsmith {

constexpr int kChunkBytes = 16;  // what one thread copies, and one row of an 8x8 matrix
constexpr int kChunkElements = 8;

// A row-major tile of `kCols` 16-bit columns. Swizzled, chunk c of row r lies where chunk c ^ (r %
// 8) would: the eight rows an ldmatrix phase reads then fall into eight different groups of four
// banks, where the plain layout puts them all into one (rows are 128 or 256 bytes apart).
template <int kCols_, bool kSwizzled_>
struct SmemLayout {
    static constexpr int kCols = kCols_;
    static constexpr bool kSwizzled = kSwizzled_;
    static constexpr int kChunks = kCols / kChunkElements;
    static constexpr int kRowBytes = kCols * 2;
    static_assert(kChunks % 8 == 0 && (kChunks & (kChunks - 1)) == 0,
                  "the swizzle permutes groups of eight chunks; address() needs a power of two");

    FS_DEVICE static uint32_t offset(int row, int chunk) {
        if constexpr (kSwizzled) chunk ^= row % 8;
        return row * kRowBytes + chunk * kChunkBytes;
    }

    // The address `row_step` rows and `chunk_step` chunks from `lane_address`, which is
    // tile + offset(row, chunk) of a tile aligned to its row. For row_step a multiple of 8 and
    // chunk_step sharing no bit with chunk this is offset(row + row_step, chunk + chunk_step), in
    // one XOR with a constant: the swizzle stays inside the row's own address bits.
    FS_DEVICE static uint32_t step(uint32_t lane_address, int row_step, int chunk_step) {
        const uint32_t bytes = chunk_step * kChunkBytes;
        return (kSwizzled ? lane_address ^ bytes : lane_address + bytes) + row_step * kRowBytes;
    }
};

}  // namespace flashsmith
