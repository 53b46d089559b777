// Sums of the gradients of scores: P (dP - D), times the slope of a program.
//
// A CTA visits tiles of 64 queries by 64 keys one after the other and adds them to one tile of sums
// in registers. All elements of the tiles that are added in the same register have the same
// coordinate. For sums along rows the CTA keeps its queries, along keys it keeps its keys, along
// distances it follows a diagonal, and for elements it visits one tile of all sequences or heads.
// At the end it adds up the rows, columns or diagonals of the tile of sums. So the order is fixed,
// and nothing is added in memory.
#pragma once

#include <type_traits>

#include "backward/key_mask.cuh"
#include "backward/program_scores.cuh"
#include "backward/rows_kernels.cuh"
#include "common/barrier.cuh"
#include "common/tile_copy.cuh"
#include "common/warp_mma.cuh"
#include "score_sums/config.cuh"

namespace flashsmith {

template <ScoreSumsKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticScoreSumsConfig {
    static constexpr ScoreSumsKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    using PrepareArgs = std::conditional_t<prepare_takes_program(SEMANTICS), BackwardProgramArgs,
                                           BackwardKernelArgs>;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr int d_head = CFG.d_head;
    static constexpr int d_steps = d_head / 16;
    static constexpr bool clears_dq_sums = false;  // there are none
    static constexpr bool always_sums_dq = false;
    static constexpr bool has_dq_counters = false;

    static constexpr int tile = ScoreSumsKernelConfig::kTile;
    static constexpr int n_threads = CFG.n_threads();
    using Layout = SmemLayout<tile, d_head, true>;
    using Copy = TileCopy<Layout, tile, n_threads, SEMANTICS.uneven>;
    static constexpr int Q_offset = 0;
    static constexpr int do_offset = Layout::kBytes;
    static constexpr int K_offset = 2 * Layout::kBytes;
    static constexpr int V_offset = 3 * Layout::kBytes;
    static_assert(4 * Layout::kBytes <= CFG.smem_bytes());
    static_assert(kStatisticsRows % tile == 0, "statistics come in whole tiles");
};

template <class Kernel>
struct ScoreSumsBlock {
    using value_t = typename Kernel::value_t;
    using Layout = typename Kernel::Layout;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kTile = Kernel::tile, kColumnTiles = kTile / 8;
    using Scores = float[1][kColumnTiles][4];

    // A tile of a head.
    struct Tile {
        int batch, head, q, k;
    };

    const ScoreSumsArgs& args;
    const uint32_t smem;
    const int warp, lane;
    Scores sums = {};
    float lse_log2[2], D[2];  // for rows lane / 4 and lane / 4 + 8 of the warp

    FS_DEVICE ScoreSumsBlock(const ScoreSumsArgs& args, uint32_t smem)
        : args(args),
          smem(smem),
          warp(thread_index() / kWarpSize),
          lane(thread_index() % kWarpSize) {}

    FS_DEVICE static int tiles(int length) { return (length + kTile - 1) / kTile; }

    FS_DEVICE void run() {
        const Tile first = first_tile();
        Tile loaded{-1, -1, -1, -1};
        for (Tile at = first; exists(at); advance(at, first)) visit(at, loaded);
        __syncthreads();  // all warps have read the tiles
        store(first);
    }

    // ---- the tiles of a CTA ----

    FS_DEVICE Tile first_tile() const {
        uint32_t number = block_index();
        const auto next = [&](int count) {
            const auto place = static_cast<int>(number % count);
            number /= count;
            return place;
        };
        const int q_tiles = tiles(args.seq_q), k_tiles = tiles(args.seq_k);
        Tile at{};
        switch (args.to.axis) {
            case SumsAxis::rows:
                at.q = next(q_tiles);
                break;
            case SumsAxis::keys:
                at.k = next(k_tiles);
                break;
            case SumsAxis::distances: {
                const int offset = next(q_tiles + k_tiles - 1) - (q_tiles - 1);
                at.q = max(-offset, 0);
                at.k = max(offset, 0);
                break;
            }
            default:
                at.k = next(k_tiles), at.q = next(q_tiles);
        }
        at.head = next(args.to.heads);
        at.batch = static_cast<int>(number);
        return at;
    }
    FS_DEVICE bool exists(const Tile& at) const {
        return at.q < tiles(args.seq_q) && at.k < tiles(args.seq_k) && at.batch < args.batch;
    }
    FS_DEVICE void advance(Tile& at, const Tile& first) const {
        switch (args.to.axis) {
            case SumsAxis::rows:
                ++at.k;
                break;
            case SumsAxis::keys:
                ++at.q;
                break;
            case SumsAxis::distances:
                ++at.q, ++at.k;
                break;
            default:
                if (args.to.heads == 1 && ++at.head < args.heads_q) return;
                at.head = first.head;
                // If each sequence has its own sums, the next one does not exist.
                at.batch = args.to.batch == 1 ? at.batch + 1 : args.batch;
        }
    }

    // ---- a tile ----

    FS_DEVICE void visit(const Tile& at, Tile& loaded) {
        constexpr bool kPacked = SEMANTICS.packed;
        const SequenceRows q =
            sequence_rows<kPacked>(args.cu_seqlens_q, at.batch, args.seq_q, args.total_q);
        const SequenceRows k =
            sequence_rows<kPacked>(args.cu_seqlens_k, at.batch, args.seq_k, args.total_k);
        const int first_row = at.q * kTile, first_key = at.k * kTile;
        if (first_row >= q.count || first_key >= k.count) return;
        const BackwardKeyMask<SEMANTICS> key_mask(args, q.count, k.count);
        const BlockRange visible = key_mask.key_blocks(first_row, kTile, kTile);
        if (at.k < visible.begin || at.k >= visible.end) return;
        load(at, loaded, q, k);

        Scores S, dP;
        zero(S);
        multiply<value_t, Kernel::d_steps>(S, rows(Kernel::Q_offset), keys(Kernel::K_offset));
        zero(dP);
        multiply<value_t, Kernel::d_steps>(dP, rows(Kernel::do_offset), keys(Kernel::V_offset));
        change_scores<SEMANTICS>(S, args.score_argument);
        const BackwardProgram<SEMANTICS> program{args.program, at.batch, at.head, q.count, k.count};
        const int row = first_row + 16 * warp + lane / 4, key = first_key + lane % 4 * 2;
        const auto query_of_lane = [&](int, int, int e) { return program::Place{row, e / 2 * 8}; };
        const auto key_of_lane = [&](int, int n, int e) {
            return program::Place{key, 8 * n + e % 2};
        };
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dP[0][n][e] = gradient(program, S[0][n][e], dP[0][n][e], e / 2,
                                       query_of_lane(0, n, e), key_of_lane(0, n, e));
        // A masked element's gradient is undefined and may be NaN.
        if (Kernel::masked && visible.needs_mask(at.k)) {
            const auto seen = [&](int, int r) { return key_mask.keys(row + 8 * r); };
            mask_keys<SEMANTICS>(dP, lane, first_key, seen, 0.0f);
        }
        program.hide(dP, query_of_lane, key_of_lane);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[0][n][e] += dP[0][n][e];
    }

    // The value of an element. `score` is raw, or the tanh of a softcap. If P is 0, as in rows that
    // do not exist or see no key, the rest may be infinite or NaN.
    FS_DEVICE float gradient(const BackwardProgram<SEMANTICS>& of, float score, float dP, int r,
                             program::Place q, program::Place k) const {
        float changed = score, slope = 1.0f;
        if constexpr (SEMANTICS.program_scores) {
            using Program = ProgramOf<SEMANTICS>;
            changed = Program::change(of.args, score, of.batch, of.head, q, k, of.seq_q, of.seq_k);
            if constexpr (!kSlopeIsOne<SEMANTICS>)
                slope = Program::slope(of.args, score, of.batch, of.head, q, k, of.seq_q, of.seq_k);
        } else {
            slope = times_slope<SEMANTICS>(1.0f, score);
        }
        if (lse_log2[r] == INFINITY) return 0.0f;
        const float P = exp2_approx(fmaf(changed, args.scale_log2, -lse_log2[r]));
        return P == 0.0f ? 0.0f : P * (dP - D[r]) * slope;
    }

    using RowsOfTile = RowsA<Layout, 1>;
    FS_DEVICE RowsOfTile rows(int offset) const {
        return RowsOfTile(smem + offset, lane, 16 * warp);
    }
    FS_DEVICE RowsB<Layout> keys(int offset) const { return RowsB<Layout>(smem + offset, lane); }

    // ---- copies ----

    // Loads the operands that the previous tile did not use.
    FS_DEVICE void load(const Tile& at, Tile& loaded, const SequenceRows& q,
                        const SequenceRows& k) {
        const int head_k = at.head / (args.heads_q / args.heads_k);
        const int row = at.q * kTile, key = at.k * kTile;
        const bool is_head = at.batch == loaded.batch && at.head == loaded.head;
        const bool needs_rows = !is_head || at.q != loaded.q;
        const bool needs_keys = !is_head || at.k != loaded.k;
        __syncthreads();  // all warps have read the previous tiles
        if (needs_rows) {
            copy(Kernel::Q_offset, args.q,
                 at.batch * args.q_batch_stride + at.head * args.q_head_stride, q, row,
                 args.q_seq_stride);
            copy(Kernel::do_offset, args.d_o,
                 at.batch * args.do_batch_stride + at.head * args.do_head_stride, q, row,
                 args.do_seq_stride);
            const int64_t statistic = first_statistic<SEMANTICS>(args, at.batch, at.head, q.first) +
                                      row + 16 * warp + lane / 4;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                lse_log2[r] = args.lse_log2[statistic + 8 * r];
                D[r] = args.D[statistic + 8 * r];
            }
        }
        if (needs_keys) {
            copy(Kernel::K_offset, args.k,
                 at.batch * args.k_batch_stride + head_k * args.k_head_stride, k, key,
                 args.k_seq_stride);
            copy(Kernel::V_offset, args.v,
                 at.batch * args.v_batch_stride + head_k * args.v_head_stride, k, key,
                 args.v_seq_stride);
        }
        loaded = at;
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // the tiles have arrived
    }
    FS_DEVICE void copy(int offset, const void* tensor, int64_t origin, const SequenceRows& rows,
                        int first, int64_t seq_stride) const {
        typename Kernel::Copy(thread_index())
            .global_to_shared_async(
                smem + offset, row_address<value_t>(tensor, origin, rows.first + first, seq_stride),
                seq_stride * int64_t{sizeof(value_t)},
                TileExtent{rows.count - first, args.d / kChunkElements});
    }

    // ---- the end ----

    FS_DEVICE uint32_t place(int row, int column) const {
        return smem + (row * ScoreSumsKernelConfig::kSumsStride + column) * 4;
    }
    // Stores the sums of the CTA whose first tile this is.
    FS_DEVICE void store(const Tile& first) const {
        const int row = 16 * warp + lane / 4, column = lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                store_shared_4B(place(row + e / 2 * 8, column + 8 * n + e % 2),
                                __float_as_uint(sums[0][n][e]));
        __syncthreads();
        float* const to =
            args.to.sums + first.batch * args.to.batch_stride + first.head * args.to.head_stride;
        const int thread = thread_index();
        if (args.to.axis == SumsAxis::elements) {
            for (int i = thread; i < kTile * kTile; i += Kernel::n_threads) {
                const int q = first.q * kTile + i / kTile, k = first.k * kTile + i % kTile;
                if (q < args.to.rows && k < args.to.columns)
                    to[q * args.to.row_stride + k] = load_shared_float(place(i / kTile, i % kTile));
            }
        } else if (args.to.axis == SumsAxis::distances) {
            // Thread 63 has the diagonal.
            const int strip = first.k - first.q + tiles(args.seq_q) - 1,
                      shift = thread - (kTile - 1);
            float sum = 0.0f;
            for (int i = max(-shift, 0); i < min(kTile, kTile - shift); ++i)
                sum += load_shared_float(place(i, i + shift));
            to[strip * args.to.row_stride + thread] = sum;
        } else if (thread < kTile) {
            const bool by_rows = args.to.axis == SumsAxis::rows;
            const int coordinate = (by_rows ? first.q : first.k) * kTile + thread;
            float sum = 0.0f;
            for (int i = 0; i < kTile; ++i)
                sum += load_shared_float(by_rows ? place(thread, i) : place(i, thread));
            if (coordinate < args.to.columns) to[coordinate] = sum;
        }
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads) score_sums_kernel(const ScoreSumsArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    ScoreSumsBlock<Kernel>(args, shared_address(shared_memory)).run();
}

}  // namespace flashsmith
