// Copies tiles between global and shared memory in 16-byte chunks.
#pragma once

#include "common/layout.cuh"

namespace flashsmith {

// The part of a tile that lies within global memory: the first `rows` rows, and the first `chunks`
// chunks of each row. The rest is zero-filled in shared memory and not written to global memory.
struct TileExtent {
    int rows, chunks;
};

// Offset of a row from the first one, in bytes or elements. Rows are `step` apart.
FS_DEVICE int64_t row_offset(int64_t step, int row) {
    return row * step;
}
// Distance from `row` to the row that is `rows` later.
FS_DEVICE int64_t next_row(int64_t step, int, int rows) {
    return rows * step;
}

// The row offsets of a tile whose rows are the heads of a group, token after token (pack_gqa). Row
// 0 is the sequence's row `first`; offsets are relative to the group's first head in the sequence's
// first token.
struct GroupRows {
    int first, group;
    int64_t token_step, head_step;
};
FS_DEVICE int64_t row_offset(const GroupRows& rows, int row) {
    const int token = (rows.first + row) / rows.group, head = (rows.first + row) % rows.group;
    return token * rows.token_step + head * rows.head_step;
}
FS_DEVICE int64_t next_row(const GroupRows& rows, int row, int further) {
    return row_offset(rows, row + further) - row_offset(rows, row);
}

// One thread's share of copying a tile's wide panels or its narrow panel.
//
// Neighbouring threads copy neighbouring chunks of a row, so that a row is read from global memory
// in whole lines. A thread's chunks lie in one column of chunks, kRowStep rows apart.
template <class Layout, bool kNarrow, int kRows, int kThreads, bool kPredicated>
struct PanelCopy {
    using Panel = typename Layout::template Panel<kNarrow>;
    static constexpr int kPanels = kNarrow ? 1 : Layout::kWidePanels;
    static constexpr int kFirstChunk = kNarrow ? 8 * Layout::kWidePanels : 0;
    static constexpr uint32_t kTileOffset = kNarrow ? Layout::kNarrowOffset : 0;
    static_assert(kThreads % Panel::kChunks == 0, "a pass of all threads covers whole rows");
    static constexpr int kRowStep = kThreads / Panel::kChunks;
    static constexpr int kPasses = (kRows + kRowStep - 1) / kRowStep;
    // Number of ordinary loads in flight: four, or one for each panel of a row if there are more
    // panels. The loads of a whole tile (up to 64 registers) would spill.
    static constexpr int kBatchPasses = kPanels >= 4 ? 1 : 4 / kPanels;

    int first_row, row, chunk;

    FS_DEVICE PanelCopy(int thread, int first_row)
        : first_row(first_row),
          row(first_row + thread / Panel::kChunks),
          chunk(thread % Panel::kChunks) {}

    // Whether this thread copies chunks in a pass. It copies none only where the passes extend past
    // the last row.
    FS_DEVICE bool active(int pass) const {
        return pass < kPasses &&
               (kPasses * kRowStep == kRows || row - first_row + pass * kRowStep < kRows);
    }
    FS_DEVICE bool present(int pass, int panel, TileExtent extent) const {
        return !kPredicated || (row + pass * kRowStep < extent.rows &&
                                kFirstChunk + 8 * panel + chunk < extent.chunks);
    }
    FS_DEVICE uint32_t target(uint32_t tile, int pass, int panel) const {
        // If passes are whole swizzle periods apart, one address and immediate offsets are enough.
        const uint32_t offset = kRowStep % 8 == 0
                                    ? Panel::offset(row, chunk) + pass * kRowStep * Panel::kRowBytes
                                    : Panel::offset(row + pass * kRowStep, chunk);
        return tile + kTileOffset + panel * Panel::kBytes + offset;
    }
    template <class Rows>
    FS_DEVICE int64_t first_byte(Rows rows) const {
        return row_offset(rows, row) + (kFirstChunk + chunk) * kChunkBytes;
    }
    static constexpr int kPanelBytes = 8 * kChunkBytes;  // bytes of a row's panel in global memory

    template <class Rows>
    FS_DEVICE void global_to_shared_async(uint32_t tile, const char* gmem, Rows rows,
                                          TileExtent extent) const {
        gmem += first_byte(rows);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
#pragma unroll
            for (int p = 0; p < kPanels; ++p) {
                if (!active(i)) continue;
                if constexpr (kPredicated)
                    cp_async_16B_or_zeros(target(tile, i, p), gmem + p * kPanelBytes,
                                          present(i, p, extent));
                else
                    cp_async_16B(target(tile, i, p), gmem + p * kPanelBytes);
            }
            gmem += next_row(rows, row + i * kRowStep, kRowStep);
        }
    }

    template <class Rows>
    FS_DEVICE void global_to_shared(uint32_t tile, const char* gmem, Rows rows,
                                    TileExtent extent) const {
        gmem += first_byte(rows);
#pragma unroll
        for (int i = 0; i < kPasses; i += kBatchPasses) {
            uint4 batch[kBatchPasses][kPanels];
#pragma unroll
            for (int b = 0; b < kBatchPasses; ++b) {
#pragma unroll
                for (int p = 0; p < kPanels; ++p) {
                    batch[b][p] = uint4{0, 0, 0, 0};
                    if (active(i + b) && present(i + b, p, extent))
                        batch[b][p] = load_global_16B(gmem + p * kPanelBytes);
                }
                gmem += next_row(rows, row + (i + b) * kRowStep, kRowStep);
            }
#pragma unroll
            for (int b = 0; b < kBatchPasses; ++b)
#pragma unroll
                for (int p = 0; p < kPanels; ++p)
                    if (active(i + b)) store_shared_16B(target(tile, i + b, p), batch[b][p]);
        }
    }

    template <class Rows>
    FS_DEVICE void shared_to_global(char* gmem, uint32_t tile, Rows rows, TileExtent extent) const {
        gmem += first_byte(rows);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
#pragma unroll
            for (int p = 0; p < kPanels; ++p)
                if (active(i) && present(i, p, extent))
                    store_global_16B(gmem + p * kPanelBytes, load_shared_16B(target(tile, i, p)));
            gmem += next_row(rows, row + i * kRowStep, kRowStep);
        }
    }
};

// Copies `kRows` rows of a tile, starting at `first_row`, with `kThreads` threads. `gmem` is the
// address of the tile's first row, even if that row does not exist.
template <class Layout, int kRows, int kThreads, bool kPredicated>
struct TileCopy {
    using Wide = PanelCopy<Layout, false, kRows, kThreads, kPredicated>;
    using Narrow = PanelCopy<Layout, true, kRows, kThreads, kPredicated>;
    int thread, first_row;

    FS_DEVICE explicit TileCopy(int thread, int first_row = 0)
        : thread(thread), first_row(first_row) {}

    // Issues the tile's cp.async; the caller commits and waits.
    template <class Rows>
    FS_DEVICE void global_to_shared_async(uint32_t tile, const char* gmem, Rows rows,
                                          TileExtent extent) const {
        if constexpr (Layout::kWidePanels > 0)
            Wide(thread, first_row).global_to_shared_async(tile, gmem, rows, extent);
        if constexpr (Layout::kHasNarrowPanel)
            Narrow(thread, first_row).global_to_shared_async(tile, gmem, rows, extent);
    }
    template <class Rows>
    FS_DEVICE void global_to_shared(uint32_t tile, const char* gmem, Rows rows,
                                    TileExtent extent) const {
        if constexpr (Layout::kWidePanels > 0)
            Wide(thread, first_row).global_to_shared(tile, gmem, rows, extent);
        if constexpr (Layout::kHasNarrowPanel)
            Narrow(thread, first_row).global_to_shared(tile, gmem, rows, extent);
    }
    template <class Rows>
    FS_DEVICE void shared_to_global(char* gmem, uint32_t tile, Rows rows, TileExtent extent) const {
        if constexpr (Layout::kWidePanels > 0)
            Wide(thread, first_row).shared_to_global(gmem, tile, rows, extent);
        if constexpr (Layout::kHasNarrowPanel)
            Narrow(thread, first_row).shared_to_global(gmem, tile, rows, extent);
    }
};

}  // namespace flashsmith
