// A tile of rows over the keys of a run: which keys it has, and which of them are visible.
#pragma once

#include "common/softmax.cuh"
#include "mma_sync_decode/cache_scales.cuh"
#include "mma_sync_decode/run_info.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct RunTile {
    static_assert(Kernel::valid_config());
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using Softmax = OnlineSoftmax<Kernel::row_tiles, true, false>;
    using Sums = float[Kernel::row_tiles][Kernel::column_tiles][4];

    const DecodeKernelArgs& args;
    const DecodeItem& item;
    const uint32_t smem, ring;
    const int warp, lane;
    const int first_row, rows;    // the tile's rows among the rows of the K/V head
    int run_begin;                // first key of the run
    int begin, end;               // keys of the run that some row of the tile sees
    int seen_begin, seen_end;     // keys of the run that some row of the warp sees
    int full_begin, full_end;     // keys that all of these rows see
    const char *k_head, *v_head;  // the head's rows in block 0; dense: in the sequence's block

    FS_DEVICE RunTile(const DecodeKernelArgs& args, const DecodeItem& item, uint32_t smem)
        : args(args),
          item(item),
          smem(smem),
          ring(smem + Kernel::ring_offset + thread_index() / kWarpSize * Kernel::ring_bytes),
          warp(thread_index() / kWarpSize),
          lane(lane_index()),
          first_row(item.tile * Kernel::B_r),
          rows(min(Kernel::B_r, item.sequence.queries * args.heads_per_group - first_row)) {
        const DecodeSequence& s = item.sequence;
        run_begin = s.begin + item.first_part * s.chunk;
        const KeyRange top = keys_of_row(0), bottom = keys_of_row(rows - 1);
        begin = max(run_begin, top.first);
        // The last part ends with the sequence's last key.
        end = bottom.last + 1;
        if (item.end_part < s.parts) end = min(end, s.begin + item.end_part * s.chunk);
        seen_begin = begin;
        seen_end = end;
        full_begin = bottom.first;
        full_end = top.last + 1;
        if constexpr (Kernel::own_rows) limit_to_warp_rows();
        const int64_t block = kPaged ? 0 : item.batch;
        k_head = static_cast<const char*>(args.k_cache) +
                 (block * args.k_cache_strides.batch + item.head_k * args.k_cache_strides.head) *
                     Kernel::cache_bytes;
        v_head = static_cast<const char*>(args.v_cache) +
                 (block * args.v_cache_strides.batch + item.head_k * args.v_cache_strides.head) *
                     Kernel::cache_bytes;
    }

    // The factor that turns a score into base-2 logits, and the one that makes it the argument of
    // Score::change(). The keys' scale is multiplied into the factor that is applied to Q K^T,
    // which is one of these two or a program's scale.
    FS_DEVICE float scale_log2() const {
        if constexpr (Kernel::has_scales && !SEMANTICS.changes_scores && !SEMANTICS.program_scores)
            return scaled_by_k(args, args.scale_log2, item.head_k);
        return args.scale_log2;
    }
    FS_DEVICE float score_argument() const {
        if constexpr (Kernel::has_scales && SEMANTICS.changes_scores)
            return scaled_by_k(args, args.score_argument, item.head_k);
        return args.score_argument;
    }

    FS_DEVICE int query_of_row(int row) const { return args.by_group.divide(first_row + row); }

    // The keys visible to a row of the tile.
    FS_DEVICE KeyRange keys_of_row(int row) const {
        const DecodeSequence& s = item.sequence;
        const int position = query_of_row(row) + s.keys - s.queries;
        return visible_range<SEMANTICS>(args, position, s.keys);
    }

    // The warp's first row in the tile.
    FS_DEVICE int warp_row() const { return Kernel::own_rows ? 16 * warp : 0; }

    // Stores a row of the K/V head, fully merged over keys.
    FS_DEVICE void store_merged(const RunInfo& run, const RowState& state, int of_head,
                                int column) const {
        const int query = args.by_group.divide(of_head);
        const int head = run.head_k * args.heads_per_group + of_head - query * args.heads_per_group;
        store_row<Kernel>(args, state, row_end<Kernel>(args, state, head, run.head_k), run.batch,
                          run.first_query, query, head, column);
    }

    FS_DEVICE PartStates<Kernel> states(const RunInfo& run) const {
        return PartStates<Kernel>(args, run.batch, run.head_k, run.rows, run.parts);
    }

  private:
    // For warps with their own rows. A warp skips steps whose keys none of its rows sees. Warps
    // without rows skip all steps.
    FS_DEVICE void limit_to_warp_rows() {
        const int own_rows = min(rows - warp_row(), 16);
        if (own_rows <= 0) {
            seen_end = seen_begin;
            return;
        }
        const KeyRange top = keys_of_row(warp_row()),
                       bottom = keys_of_row(warp_row() + own_rows - 1);
        seen_begin = max(begin, top.first);
        seen_end = min(end, bottom.last + 1);
        full_begin = bottom.first;
        full_end = top.last + 1;
    }
};

}  // namespace flashsmith
