// The copies of blocks of keys from a latent cache, dense or in pages, to shared memory.
#pragma once

#include "mla/tile.cuh"
#include "mma_sync_mla/static_kernel_configuration.cuh"

namespace flashsmith {

// What a thread copies: 16 bytes of each panel in every 16th row of a block, or in every 32nd row
// if elements are 8-bit floats.
template <class Kernel>
struct MlaBlockCopies {
    using element_t = typename Kernel::element_t;
    using Panel = typename Kernel::Panel;
    static constexpr int kElements = kChunkBytes / sizeof(element_t);  // of a chunk
    static constexpr int kRowStep = kMmaSyncMlaThreads / Panel::kChunks;
    static constexpr int kRows = Kernel::B_c / kRowStep;  // of a thread
    static_assert(kRowStep % 8 == 0, "whole periods of the swizzle");

    const MlaTile<Kernel>& tile;
    const MlaKernelArgs& args;
    const BlockRange blocks;
    const int row, chunk;
    const uint32_t to;
    // Where the rows of the next block to copy are: the blocks of the cache and the slots in them.
    // The page table is read a block ahead, and nothing waits for these page indices before they
    // are used.
    int cache_blocks[kRows], slots[kRows];

    FS_DEVICE MlaBlockCopies(const MlaTile<Kernel>& tile, const BlockRange& blocks, uint32_t smem)
        : tile(tile),
          args(tile.args),
          blocks(blocks),
          row(thread_index() / Panel::kChunks),
          chunk(thread_index() % Panel::kChunks),
          to(smem + Kernel::K_offset + Panel::offset(row, chunk)) {
        locate(blocks.begin);
    }

    // Starts the copies of the part's i-th block, if it exists. Blocks must be
    // started in order.
    FS_DEVICE void start(int i) {
        const int block = blocks.begin + i;
        if (block < blocks.end) {
            copy(block, to + i % Kernel::stages * Kernel::Layout::kBytes);
            locate(block + 1);
        }
        cp_async_commit();
    }

  private:
    FS_DEVICE int key_of(int block, int i) const {
        return block * Kernel::B_c + row + i * kRowStep;
    }

    FS_DEVICE void locate(int block) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int key = key_of(block, i);
            cache_blocks[i] = tile.batch;
            slots[i] = key;
            if (args.page_table == nullptr || key >= tile.k_count) continue;
            cache_blocks[i] =
                args.page_table[tile.batch * args.page_table_stride + key / args.slots];
            slots[i] = key % args.slots;
        }
    }

    // Rows beyond the sequence may hold anything in the cache, and become zeros. Page indices are
    // clamped, so an invalid index still refers to a page of the cache.
    FS_DEVICE void copy(int block, uint32_t stage) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const bool exists = key_of(block, i) < tile.k_count;
            const int cache_block = min(max(cache_blocks[i], 0), args.blocks - 1);
            const auto* from = static_cast<const element_t*>(args.cache_rows) +
                               cache_block * args.cache_strides.batch +
                               slots[i] * args.cache_strides.row + chunk * kElements;
#pragma unroll
            for (int p = 0; p < Kernel::n_panels; ++p)
                cp_async_16B_or_zeros(stage + p * Panel::kBytes + i * kRowStep * Panel::kRowBytes,
                                      from + p * Kernel::panel_columns, exists);
        }
    }
};

}  // namespace flashsmith
