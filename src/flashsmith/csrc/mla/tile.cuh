// A tile: rows of one sequence (its query heads, token after token), and the part of the keys that
// a CTA computes for them. `Kernel` defines B_r, the rows of a tile; B_c, the keys of a block; and
// the number of blocks that parts keep together.
#pragma once

#include "common/key_mask.cuh"
#include "mla/args.cuh"

namespace flashsmith {

template <class Kernel>
struct MlaTile {
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    const MlaKernelArgs& args;
    int batch, first_row, row_end;  // rows of the sequence
    int q_first, q_count, k_count;
    BlockRange blocks{};     // blocks that some rows see
    int parts = 0;           // number of parts in which the blocks are computed
    int64_t first_part_row;  // row of the workspace where the first part begins

    FS_DEVICE MlaTile(const MlaKernelArgs& args, uint32_t tile) : args(args) {
        batch = static_cast<int>(tile / args.tiles);
        const SequenceRows q =
            sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        q_first = static_cast<int>(q.first);
        q_count = q.count;
        // Lengths are clamped, so that none can address keys outside the cache.
        const int appended = args.new_rows == nullptr ? 0 : q_count;
        const int before = min(max(args.cache_lens[batch], 0), args.capacity);
        k_count = min(before + appended, args.capacity);
        first_row = static_cast<int>(tile % args.tiles) * Kernel::B_r;
        row_end = min(first_row + Kernel::B_r, q_count * args.heads);
        first_part_row = int64_t{tile} * args.most_parts * Kernel::B_r;
        if (!exists()) return;
        const KeyRange top = keys(first_row), bottom = keys(row_end - 1);
        blocks = {
            .begin = top.first / Kernel::B_c,
            .end =
                bottom.last < top.first ? top.first / Kernel::B_c : bottom.last / Kernel::B_c + 1,
            .full_begin = (bottom.first + Kernel::B_c - 1) / Kernel::B_c,
            .full_end = (top.last + 1) / Kernel::B_c,
        };
        const int count = max(blocks.end - blocks.begin, 0);
        parts = min(max(count * Kernel::B_c / Kernel::CFG.min_keys, 1), args.most_parts);
    }

    FS_DEVICE bool exists() const { return first_row < row_end; }
    FS_DEVICE bool is_split() const { return parts > 1; }

    // The blocks of a part, which begins with a group of blocks.
    FS_DEVICE BlockRange of_part(int part) const {
        constexpr int kGroup = Kernel::grouped_blocks;
        const int groups = (max(blocks.end - blocks.begin, 0) + kGroup - 1) / kGroup;
        const auto boundary = [&](int i) {
            return blocks.begin + kGroup * static_cast<int>(int64_t{groups} * i / parts);
        };
        return {boundary(part), min(boundary(part + 1), blocks.end), blocks.full_begin,
                blocks.full_end};
    }

    FS_DEVICE int token(int row) const { return row / args.heads; }
    FS_DEVICE int head(int row) const { return row % args.heads; }
    // The keys that a row sees.
    FS_DEVICE KeyRange keys(int row) const {
        return visible_range<SEMANTICS>(args, token(row) + k_count - q_count, k_count);
    }
    // The address of a row's log-sum-exp.
    FS_DEVICE float* lse(int row) const {
        return args.lse + batch * args.lse_batch_stride + head(row) * args.lse_head_stride +
               q_first + token(row);
    }
    // The element of q or o at which a row begins.
    FS_DEVICE int64_t element(const MlaStrides& strides, int row) const {
        return batch * strides.batch + int64_t{q_first + token(row)} * strides.row +
               head(row) * strides.head;
    }
};

}  // namespace flashsmith
