// Derives types and constants from a config and its semantics: everything about the kernels that is
// fixed at compile time.
#pragma once

#include <type_traits>

#include "backward/key_mask.cuh"
#include "common/constants.cuh"
#include "common/program_scores.cuh"
#include "common/softmax.cuh"
#include "common/tile_copy.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_backward/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

template <FlashBackwardKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticBackwardKernelConfig {
    static constexpr FlashBackwardKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr bool adds_dq = CFG.dq == DqMode::atomics;

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int element_bytes = CFG.element_bytes();

    static constexpr bool has_program = SEMANTICS.has_program();
    // Whether CTAs visit the blocks of a list instead of a range. A list has one group: the whole
    // CTA.
    static constexpr bool has_lists = SEMANTICS.program_masks;
    static constexpr int key_groups = 1, query_groups = 1;
    // Whether more than the exponential lies between the scores and P.
    static constexpr bool changes_scores = SEMANTICS.changes_scores || !kSlopeIsOne<SEMANTICS>;
    using PrepareArgs = std::conditional_t<prepare_takes_program(SEMANTICS), BackwardProgramArgs,
                                           BackwardKernelArgs>;
    using Args = std::conditional_t<has_program, BackwardProgramArgs, BackwardKernelArgs>;

    static constexpr int d_head = CFG.d_head;   // of Q, K, dq and dk
    static constexpr int d_v = CFG.d_head_v();  // of V, do and dv
    static constexpr bool is_pair = CFG.d_v > 0;
    static constexpr int B_r = CFG.B_r;
    static constexpr bool clears_dq_sums = adds_dq;
    static constexpr bool always_sums_dq = false;  // no sums exist if dq is not requested
    static constexpr bool has_dq_counters = false;
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_warps = CFG.n_warps;
    static constexpr int n_threads = kWarpSize * n_warps;
    static constexpr int stages = CFG.stages;

    // --- a CTA that keeps keys ---
    //
    // A warp computes its rows of S^T and dP^T (keys by queries) and, of their columns, one of
    // column_warps contiguous parts. In dk and dv it has the same rows, and every column_warps-th
    // group of 16 columns, of which the last one may be shared.
    static constexpr int column_warps = CFG.column_warps;
    static constexpr int key_warps = n_warps / column_warps;
    static constexpr int keys_per_warp = B_c / key_warps;
    static constexpr int key_tiles = keys_per_warp / 16;
    static constexpr int queries_per_warp = B_r / column_warps;
    static constexpr int query_tiles = queries_per_warp / 8;
    static constexpr int column_tiles = tiles_each(d_head, column_warps);
    static constexpr int column_tiles_v = tiles_each(d_v, column_warps);
    static constexpr int d_steps = (d_head + 15) / 16;  // 72 is padded with 8 zero columns
    static constexpr int d_v_steps = (d_v + 15) / 16;
    static constexpr int query_steps = B_r / 16;
    static constexpr int key_steps = B_c / 16;
    // If a warp has all queries of its keys, the registers of P^T and dS^T are operands.
    static constexpr bool in_registers = column_warps == 1;
    static constexpr bool stores_P = !in_registers;
    static constexpr int dS_tiles = CFG.dS_tiles();

    // A warp computes every dq_row_warps-th group of 16 rows of dQ = dS K, and every
    // dq_column_warps-th group of 16 columns. The division with the fewest reads is used.
    static constexpr bool can_share_dq(int row_warps) {
        const int columns = n_warps / row_warps;
        return B_r % (16 * row_warps) == 0 && (row_warps < 4 || B_r % 64 == 0) &&
               (columns < 4 || d_head % 64 == 0) && row_warps <= 4 && columns <= 4;
    }
    static constexpr int best_dq_row_warps() {
        int best = adds_dq ? 0 : 1, least = 1 << 30;
        for (int rows = 1; rows <= n_warps; rows *= 2) {
            const int read = B_r / rows + d_head * rows / n_warps;
            if (can_share_dq(rows) && read < least) best = rows, least = read;
        }
        return best;
    }
    static constexpr int dq_row_warps = best_dq_row_warps();
    static_assert(dq_row_warps > 0, "dq: its tile cannot be divided among the warps");
    static constexpr int dq_column_warps = n_warps / dq_row_warps;
    static constexpr int dq_row_tiles = B_r / dq_row_warps / 16;
    static constexpr int dq_sum_columns = CFG.dq_sum_columns();
    static constexpr int dq_column_tiles = dq_sum_columns / dq_column_warps / 8;
    static constexpr int dq_elements = dq_row_tiles * dq_column_tiles * 4;  // per lane
    // All rows of wide tiles would not fit next to dk and dv, so their groups are computed one at a
    // time.
    static constexpr int dq_passes = d_head > 256 ? dq_row_tiles : 1;
    static_assert(dq_passes == 1 || B_r <= 64, "a pass begins within a panel of dS");

    static constexpr int tile_d = tile_columns(d_head), tile_d_v = tile_columns(d_v);
    using KeysLayout = SmemLayout<B_c, tile_d, true>;  // of K
    using ValuesLayout = SmemLayout<B_c, tile_d_v, true>;
    using QueriesLayout = SmemLayout<B_r, tile_d, true>;  // of Q
    using doLayout = SmemLayout<B_r, tile_d_v, true>;
    using ScoresLayout = SmemLayout<B_c, B_r, true>;  // layout of P^T and dS^T

    // The layout of shared memory, as byte offsets from its beginning.
    static constexpr int K_offset = 0;
    static constexpr int V_offset = K_offset + KeysLayout::kBytes;
    static constexpr int Q_offset = V_offset + ValuesLayout::kBytes;
    static constexpr int do_offset = Q_offset + stages * QueriesLayout::kBytes;
    static constexpr int dS_offset = do_offset + stages * doLayout::kBytes;
    static constexpr int P_offset = dS_offset + dS_tiles * ScoresLayout::kBytes;
    static constexpr int statistics_offset = P_offset + (stores_P ? ScoresLayout::kBytes : 0);
    static constexpr int statistics_bytes = 2 * B_r * 4;  // per stage: log2(e) lse, then D
    static_assert(statistics_offset + stages * statistics_bytes == CFG.keys_smem_bytes());

    static constexpr bool has_extent = SEMANTICS.uneven || tile_d > d_head;
    using CopyKeys = TileCopy<KeysLayout, B_c, n_threads, has_extent>;
    using CopyValues = TileCopy<ValuesLayout, B_c, n_threads, has_extent>;
    using CopyDo = TileCopy<doLayout, B_r, n_threads, has_extent>;
    using CopyQueries = TileCopy<QueriesLayout, B_r, n_threads, has_extent>;

    // --- a CTA that keeps queries, 16 per warp, and has B_r keys per step ---
    static constexpr int dq_rows = CFG.dq_rows();
    static constexpr int step_keys = B_r;
    using ResidentLayout = SmemLayout<dq_rows, tile_d, true>;    // of Q
    using StreamedLayout = SmemLayout<step_keys, tile_d, true>;  // of K
    using ResidentDoLayout = SmemLayout<dq_rows, tile_d_v, true>;
    using StreamedValuesLayout = SmemLayout<step_keys, tile_d_v, true>;
    static constexpr int resident_Q_offset = 0;
    static constexpr int resident_do_offset = resident_Q_offset + ResidentLayout::kBytes;
    static constexpr int streamed_K_offset = resident_do_offset + ResidentDoLayout::kBytes;
    static constexpr int streamed_V_offset = streamed_K_offset + stages * StreamedLayout::kBytes;
    static_assert(streamed_V_offset + stages * StreamedValuesLayout::kBytes ==
                  CFG.queries_smem_bytes());

    using CopyResident = TileCopy<ResidentLayout, dq_rows, n_threads, has_extent>;
    using CopyResidentDo = TileCopy<ResidentDoLayout, dq_rows, n_threads, has_extent>;
    using CopyStreamedValues = TileCopy<StreamedValuesLayout, step_keys, n_threads, has_extent>;
    using CopyStreamed = TileCopy<StreamedLayout, step_keys, n_threads, has_extent>;
    using CopydQ = TileCopy<ResidentLayout, 16, kWarpSize, has_extent>;  // by each warp

    // The assumptions of the types above and of the kernels. `flashsmith explain` lists all rules
    // with their reasons.
    static constexpr bool valid_config() {
        static_assert(d_head % 8 == 0 && d_head <= 512, "d_head: a tile of dk has 8 columns");
        static_assert(!is_pair || (d_head % 64 == 0 && d_v % 64 == 0 && d_v <= 256),
                      "d_v: panels of 64 columns");
        static_assert(B_r == 32 || B_r == 64 || B_r == 128, "B_r: 32, 64 or 128");
        static_assert(n_warps % column_warps == 0 && B_c % (16 * key_warps) == 0,
                      "B_c: a warp's products have 16 keys");
        static_assert(column_warps == 1 || column_warps == 2 || column_warps == 4,
                      "column_warps: 1, 2 or 4");
        static_assert(queries_per_warp >= 16, "B_r: a warp needs at least 16 queries");
        static_assert(column_warps < 4 || d_head % 64 == 0,
                      "column_warps: 4 needs a d_head of whole 64-column panels");
        static_assert(stages == 1 || stages == 2, "stages: 1 or 2");
        static_assert(kStatisticsRows % B_r == 0 && kStatisticsRows % dq_rows == 0,
                      "statistics come in whole tiles");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        return true;
    }
};

}  // namespace flashsmith
