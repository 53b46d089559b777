// Loads fragments of mma.sync from row-major global memory and stores them to it.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith::roofline {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// Signed, as when the recorded rates were measured.
FS_DEVICE int lane_index() {
    return thread_index() % kWarpSize;
}
FS_DEVICE int warp_index() {
    return thread_index() / kWarpSize;
}

// Loads a 16-bit matrix as an A fragment: the rows `row` to row + 15 and the columns `column` to
// column + 15. Rows are `pitch` elements apart.
FS_DEVICE void load_a(uint32_t (&a)[4], const uint16_t* matrix, int pitch, int row, int column) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = row + g + i % 2 * 8, c = column + 2 * t + i / 2 * 8;
        a[i] = *reinterpret_cast<const uint32_t*>(matrix + r * pitch + c);
    }
}

// Loads 8 rows as a B fragment; each row is a column of B.
FS_DEVICE void load_b(uint32_t (&b)[2], const uint16_t* matrix, int pitch, int row, int column) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        b[i] =
            *reinterpret_cast<const uint32_t*>(matrix + (row + g) * pitch + column + 2 * t + i * 8);
}

// Stores an accumulator to the rows `row` to row + 15 and the columns `column` to column + 7.
FS_DEVICE void store_c(float* matrix, int pitch, int row, int column, const float (&c)[4]) {
    const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        matrix[(row + g + i / 2 * 8) * pitch + column + 2 * t + i % 2] = c[i];
}

}  // namespace flashsmith::roofline
