// The shared-memory layout of a 16-bit tile.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

constexpr int kChunkBytes = 16;  // what a thread copies at once; also a row of an 8x8 matrix
constexpr int kChunkElements = 8;

// A tile of `kRows` x `kCols` is stored as adjacent row-major panels: as many of 64 columns as fit,
// and one of 32 for a remainder (96 = 64 + 32).
//
// The swizzle permutes a row's chunks so that the eight rows of an ldmatrix phase use eight
// different groups of four banks. In the plain layout all eight use the same group. Rows of a wide
// panel are 128 bytes apart: chunk c goes to c ^ (row % 8). Two rows of a narrow panel share 128
// bytes: c goes to c ^ (row / 2 % 4).
template <int kRows, int kCols, bool kSwizzled>
struct SmemLayout {
    static_assert(kCols % 32 == 0 && kRows % 8 == 0);
    static constexpr int kBytes = kRows * kCols * 2;
    static constexpr int kWidePanels = kCols / 64;
    static constexpr bool kHasNarrowPanel = kCols % 64 != 0;

    // The chunks per row, row pitch and chunk offsets of one panel.
    template <bool kNarrow>
    struct Panel {
        static constexpr int kChunks = kNarrow ? 4 : 8;
        static constexpr int kRowBytes = kChunks * kChunkBytes;
        static constexpr int kBytes = kRows * kRowBytes;

        FS_DEVICE static uint32_t offset(int row, int chunk) {
            if constexpr (kSwizzled) chunk ^= kNarrow ? row / 2 % 4 : row % 8;
            return row * kRowBytes + chunk * kChunkBytes;
        }
        // Computes offset(row + row_step, chunk + chunk_step) from offset(row, chunk) in one XOR
        // with a constant. row_step must be a multiple of 8, and chunk_step must share no bit with
        // chunk. The panel is aligned to its rows, so the XOR stays inside a row's own address
        // bits.
        FS_DEVICE static uint32_t step(uint32_t address, int row_step, int chunk_step) {
            const uint32_t bytes = chunk_step * kChunkBytes;
            return (kSwizzled ? address ^ bytes : address + bytes) + row_step * kRowBytes;
        }
    };
    static constexpr int kNarrowOffset = kWidePanels * Panel<false>::kBytes;

    // A lane's position in the tile. All other positions that it needs are a constant step away.
    struct Cursor {
        uint32_t wide, narrow;  // some layouts use only one of the two

        FS_DEVICE Cursor(uint32_t tile, int row, int chunk, int byte = 0)
            : wide(tile + Panel<false>::offset(row, chunk) + byte),
              narrow(tile + kNarrowOffset + Panel<true>::offset(row, chunk) + byte) {}

        // `chunk_step` counts from the row's first chunk, across panels. `tile` is the distance to
        // another tile in bytes.
        FS_DEVICE uint32_t at(int row_step, int chunk_step, uint32_t tile = 0) const {
            const int panel = chunk_step / 8;
            if (panel < kWidePanels)
                return Panel<false>::step(wide + tile, row_step, chunk_step % 8) +
                       panel * Panel<false>::kBytes;
            return Panel<true>::step(narrow + tile, row_step, chunk_step % 8);
        }
    };
};

// A tile of `kRows` x `kCols` 8-bit elements in panels of 64 columns, the narrow panels of
// SmemLayout.
template <int kRows, int kCols>
struct CodePanels {
    static_assert(kCols % 64 == 0);
    using Panel = typename SmemLayout<kRows, 32, true>::template Panel<true>;
    static constexpr int kBytes = kCols / 64 * Panel::kBytes;

    // Like SmemLayout's.
    struct Cursor {
        uint32_t address;

        FS_DEVICE Cursor(uint32_t tile, int row, int chunk, int byte = 0)
            : address(tile + Panel::offset(row, chunk) + byte) {}

        FS_DEVICE uint32_t at(int row_step, int chunk_step) const {
            return Panel::step(address, row_step, chunk_step % Panel::kChunks) +
                   chunk_step / Panel::kChunks * Panel::kBytes;
        }
    };
};

}  // namespace flashsmith
