// Tiles between global and shared memory, in 16-byte chunks, and fragments out of shared memory.
#pragma once

#include "layout.cuh"

namespace flashsmith {

// One thread's share of copying a tile of `kRows` x Layout::kCols with `kThreads` threads.
// Neighbouring threads take neighbouring chunks of a row, so a row leaves global memory in whole
// 128-byte lines; a thread's own chunks are kRowStep rows apart in one column of chunks.
template <class Layout, int kRows, int kThreads>
struct TileCopy {
    static_assert(kThreads % Layout::kChunks == 0, "a pass of all threads covers whole rows");
    static constexpr int kRowStep = kThreads / Layout::kChunks;
    static constexpr int kPasses = (kRows + kRowStep - 1) / kRowStep;
    // Ordinary loads in flight at once; a whole tile of them (up to 64 registers) would spill.
    static constexpr int kBatch = kPasses < 4 ? kPasses : 4;

    int row, chunk;

    FS_DEVICE explicit TileCopy(int thread)
        : row(thread / Layout::kChunks), chunk(thread % Layout::kChunks) {}

    // Whether this thread has a chunk in a pass: always, unless the passes overshoot the tile.
    FS_DEVICE bool active(int pass) const {
        return kPasses * kRowStep == kRows || row + pass * kRowStep < kRows;
    }
    FS_DEVICE uint32_t target(uint32_t smem, int pass) const {
        // Steps of whole swizzle periods keep one address and immediates.
        if constexpr (kRowStep % 8 == 0)
            return smem + Layout::offset(row, chunk) + pass * kRowStep * Layout::kRowBytes;
        else
            return smem + Layout::offset(row + pass * kRowStep, chunk);
    }
    FS_DEVICE int64_t first_byte(int64_t row_bytes) const {
        return row * row_bytes + chunk * kChunkBytes;
    }

    // Issues the tile's cp.async; the caller commits and waits.
    FS_DEVICE void global_to_shared_async(uint32_t smem, const char* gmem,
                                          int64_t row_bytes) const {
        gmem += first_byte(row_bytes);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (active(i)) cp_async_16B(target(smem, i), gmem);
            gmem += kRowStep * row_bytes;
        }
    }

    FS_DEVICE void global_to_shared(uint32_t smem, const char* gmem, int64_t row_bytes) const {
        gmem += first_byte(row_bytes);
#pragma unroll
        for (int i = 0; i < kPasses; i += kBatch) {
            uint4 batch[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                if (i + b < kPasses && active(i + b)) batch[b] = load_global_16B(gmem);
                gmem += kRowStep * row_bytes;
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b)
                if (i + b < kPasses && active(i + b))
                    store_shared_16B(target(smem, i + b), batch[b]);
        }
    }

    FS_DEVICE void shared_to_global(char* gmem, uint32_t smem, int64_t row_bytes) const {
        gmem += first_byte(row_bytes);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (active(i)) store_global_16B(gmem, load_shared_16B(target(smem, i)));
            gmem += kRowStep * row_bytes;
        }
    }
};

// The loaders below give one k16-step of an mma operand to a warp. Each keeps one address per lane
// and steps from it by constants.

// A operand, 16 kMTiles rows: Q as it lies, rows by columns of the head.
template <class Layout, int kMTiles>
struct QLoader {
    using Fragment = uint32_t[kMTiles][4];
    uint32_t lane_address;

    FS_DEVICE QLoader(uint32_t tile, int lane)
        : lane_address(tile + Layout::offset(lane % 16, lane / 16)) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
            ldmatrix_x4(fragment[m], Layout::step(lane_address, 16 * m, 2 * step));
    }
};

// B operand with n along K's rows and k along the head: row-major K is the column-major operand.
template <class Layout, int kNTiles>
struct KLoader {
    using Fragment = uint32_t[kNTiles][2];
    uint32_t lane_address;

    FS_DEVICE KLoader(uint32_t tile, int lane)
        : lane_address(tile + Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2)) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t two_tiles[4];
            ldmatrix_x4(two_tiles, Layout::step(lane_address, 8 * n, 2 * step));
            fragment[n][0] = two_tiles[0];
            fragment[n][1] = two_tiles[1];
            fragment[n + 1][0] = two_tiles[2];
            fragment[n + 1][1] = two_tiles[3];
        }
    }
};

// B operand with k along V's rows and n along the head: transposed on the way to registers.
template <class Layout, int kNTiles>
struct VLoader {
    using Fragment = uint32_t[kNTiles][2];
    uint32_t lane_address;

    FS_DEVICE VLoader(uint32_t tile, int lane)
        : lane_address(tile + Layout::offset(lane % 16, lane / 16)) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t two_tiles[4];
            ldmatrix_x4_transposed(two_tiles, Layout::step(lane_address, 16 * step, n));
            fragment[n][0] = two_tiles[0];
            fragment[n][1] = two_tiles[1];
            fragment[n + 1][0] = two_tiles[2];
            fragment[n + 1][1] = two_tiles[3];
        }
    }
};

}  // namespace flashsmith
