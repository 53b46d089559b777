// The kernel whose CTAs keep a block of keys. A CTA iterates over the queries that see the keys,
// for all heads that share the keys. The CTA computes dk and dv, which are summed in fp32 registers
// and rounded once, and with atomics also its part of dq.
//
// Scores are transposed: keys by queries. After rounding, the registers of P^T and dS^T are
// operands of dv += P^T do and dk += dS^T q. Only dS goes through shared memory, for dQ = dS K. If
// several warps share keys, P goes there too.
#pragma once

#include "backward/listed_steps.cuh"
#include "backward/program_scores.cuh"
#include "backward/unattended_rows.cuh"
#include "common/barrier.cuh"
#include "mma_sync_backward/common_parts.cuh"

namespace flashsmith {

template <class Kernel>
struct KeysBlock {
    static_assert(Kernel::valid_config());
    using value_t = typename Kernel::value_t;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using Scores = float[Kernel::key_tiles][Kernel::query_tiles][4];
    template <int kColumnTiles>
    using Gradient = float[Kernel::key_tiles][kColumnTiles][4];
    using Rounded = InRegisters<Kernel::key_tiles, Kernel::query_tiles / 2>;

    const typename Kernel::Args& args;
    const uint32_t smem;
    const int warp, lane;
    const int batch, head_k, first_key;
    const SequenceRows q, k;
    const BackwardKeyMask<SEMANTICS> key_mask;

    Gradient<Kernel::column_tiles> dk = {};
    Gradient<Kernel::column_tiles_v> dv = {};

    FS_DEVICE KeysBlock(const typename Kernel::Args& args, uint32_t smem, int batch, int head_k,
                        int block, SequenceRows q, SequenceRows k)
        : args(args),
          smem(smem),
          warp(thread_index() / kWarpSize),
          lane(thread_index() % kWarpSize),
          batch(batch),
          head_k(head_k),
          first_key(block * Kernel::B_c),
          q(q),
          k(k),
          key_mask(args, q.count, k.count) {}

    // The warp's first row in S^T, dk and dv, and the warp's index among the warps that have the
    // same rows.
    FS_DEVICE int warp_key() const { return warp / Kernel::column_warps * Kernel::keys_per_warp; }
    FS_DEVICE int turn() const { return warp % Kernel::column_warps; }
    FS_DEVICE int warp_query() const { return turn() * Kernel::queries_per_warp; }

    // ---- steps: one block of queries of one head each ----

    struct Step {
        int head, block;
        int parity = 0;  // parity of the step's number, which selects its stage

        FS_DEVICE int stage() const { return Kernel::stages == 1 ? 0 : parity; }
    };

    // The steps of a range of blocks, for one head after the other.
    struct RangeSteps {
        const BlockRange blocks;

        FS_DEVICE explicit RangeSteps(const KeysBlock& of)
            : blocks(of.key_mask.query_blocks(of.first_key, Kernel::B_c, Kernel::B_r)) {}

        FS_DEVICE bool exist() const { return blocks.begin < blocks.end; }
        FS_DEVICE Step first(int first_head) const { return {first_head, blocks.begin}; }
        FS_DEVICE void advance(Step& next) const {
            if (++next.block == blocks.end) next.block = blocks.begin, ++next.head;
        }
        FS_DEVICE bool needs_mask(const Step& at) const {
            return Kernel::masked && blocks.needs_mask(at.block);
        }
    };

    // The steps of the blocks in lists.
    struct ListsOfKeys {
        const KeysBlock& of;

        FS_DEVICE const int32_t* list_of(int head) const {
            return query_lists<Kernel>(of.args, of.args.program)
                .list(of.batch, of.first_head() + head, of.first_key / Kernel::B_c);
        }
        FS_DEVICE int n_heads() const { return of.n_heads(); }
        FS_DEVICE bool backwards() const { return false; }
    };
    struct ListedSteps {
        ListedQueries<SEMANTICS, ListsOfKeys> queries;
        int left;
        bool is_full = false;  // whether all queries of the preceding step see all keys

        FS_DEVICE explicit ListedSteps(const KeysBlock& of)
            : queries(ListsOfKeys{of}), left(queries.n_steps()) {}

        FS_DEVICE bool exist() const { return left > 0; }
        FS_DEVICE Step first(int) {
            queries.begin();
            return now();
        }
        FS_DEVICE void advance(Step& next) {
            is_full = queries.now.entry.is_full(0);
            next.head = queries.tile.of.end_head();
            if (--left == 0) return;
            queries.advance();
            next = now();
        }
        FS_DEVICE Step now() const {
            return {queries.tile.of.first_head() + queries.now.head, queries.now.entry.block()};
        }
        // Called after advance().
        FS_DEVICE bool needs_mask(const Step&) const { return !is_full; }
    };

    FS_DEVICE int n_heads() const { return args.heads_q / args.heads_k; }
    FS_DEVICE int first_head() const { return head_k * n_heads(); }
    FS_DEVICE int end_head() const { return first_head() + n_heads(); }

    FS_DEVICE void run() {
        std::conditional_t<Kernel::has_lists, ListedSteps, RangeSteps> steps(*this);
        if (steps.exist()) {
            start_keys();
            if (args.dk != nullptr && args.dv != nullptr &&
                (!Kernel::adds_dq || args.dq != nullptr))
                run_steps<true>(steps);
            else
                run_steps<false>(steps);
            cp_async_wait<0>();
            __syncthreads();  // the buffers of K and V are free
        }
        store();
    }

    // kAll: whether dq, dk and dv are all requested. If so, no GEMM is behind a branch, and
    // exponentials and copies overlap with GEMMs.
    template <bool kAll, class Steps>
    FS_DEVICE void run_steps(Steps& steps) {
        const int first_head = this->first_head(), end_head = first_head + n_heads();
        const bool wants_dq = Kernel::adds_dq && (kAll || args.dq != nullptr);
        Step now = steps.first(first_head), before{-1, 0};
        start_queries(now);
        cp_async_commit();
        while (now.head < end_head) {
            Step next = now;
            steps.advance(next);
            next.parity = now.parity ^ 1;

            cp_async_wait<0>();
            __syncthreads();  // the step's tiles have arrived, and the previous step's are free
            const bool needs_mask = steps.needs_mask(now);
            if (needs_mask || SEMANTICS.program_scores) zero_unattended_rows(now);
            // A step's dq is added one step later. At the barrier above, all warps have stored
            // their dS of the previous step, so no other barrier is needed.
            if (wants_dq && before.head >= 0) add_dq(before);
            step<kAll>(now, next, next.head < end_head, needs_mask);
            if constexpr (Kernel::stages == 1) {
                __syncthreads();  // all warps are done with the tiles
                if (next.head < end_head) start_queries(next);
                cp_async_commit();
            }
            before = now;
            now = next;
        }
        if (wants_dq) {
            __syncthreads();
            add_dq(before);
        }
    }

    // ---- copies ----

    FS_DEVICE TileExtent extent(int rows) const {
        return {rows, d_of_qk<Kernel>(args) / kChunkElements};
    }
    FS_DEVICE TileExtent extent_of_v(int rows) const {
        return {rows, d_of_v<Kernel>(args) / kChunkElements};
    }

    FS_DEVICE void start_keys() const {
        const typename Kernel::CopyKeys copy(thread_index());
        const TileExtent present = extent(k.count - first_key);
        copy.global_to_shared_async(
            smem + Kernel::K_offset,
            row_address<value_t>(args.k, batch * args.k_batch_stride + head_k * args.k_head_stride,
                                 k.first + first_key, args.k_seq_stride),
            args.k_seq_stride * int64_t{sizeof(value_t)}, present);
        const auto start_V = [&](const auto& copy, TileExtent present) {
            copy.global_to_shared_async(
                smem + Kernel::V_offset,
                row_address<value_t>(args.v,
                                     batch * args.v_batch_stride + head_k * args.v_head_stride,
                                     k.first + first_key, args.v_seq_stride),
                args.v_seq_stride * int64_t{sizeof(value_t)}, present);
        };
        if constexpr (Kernel::is_pair)
            start_V(typename Kernel::CopyValues(thread_index()), extent_of_v(k.count - first_key));
        else
            start_V(copy, present);
    }

    FS_DEVICE uint32_t Q_tile(int stage) const {
        return smem + Kernel::Q_offset + stage * Kernel::QueriesLayout::kBytes;
    }
    FS_DEVICE uint32_t do_tile(int stage) const {
        return smem + Kernel::do_offset + stage * Kernel::doLayout::kBytes;
    }
    FS_DEVICE uint32_t statistics(int stage) const {
        return smem + Kernel::statistics_offset + stage * Kernel::statistics_bytes;
    }

    FS_DEVICE void start_queries(const Step& at) const {
        const typename Kernel::CopyQueries copy(thread_index());
        const int first_row = at.block * Kernel::B_r;
        const TileExtent present = extent(q.count - first_row);
        copy.global_to_shared_async(
            Q_tile(at.stage()),
            row_address<value_t>(args.q, batch * args.q_batch_stride + at.head * args.q_head_stride,
                                 q.first + first_row, args.q_seq_stride),
            args.q_seq_stride * int64_t{sizeof(value_t)}, present);
        const auto start_do = [&](const auto& copy, TileExtent present) {
            copy.global_to_shared_async(
                do_tile(at.stage()),
                row_address<value_t>(args.d_o,
                                     batch * args.do_batch_stride + at.head * args.do_head_stride,
                                     q.first + first_row, args.do_seq_stride),
                args.do_seq_stride * int64_t{sizeof(value_t)}, present);
        };
        if constexpr (Kernel::is_pair)
            start_do(typename Kernel::CopyDo(thread_index()), extent_of_v(q.count - first_row));
        else
            start_do(copy, present);
        // There are statistics past the last row too.
        constexpr int kChunks = Kernel::B_r / 4;
        static_assert(2 * kChunks <= Kernel::n_threads);
        const int thread = thread_index();
        if (thread < 2 * kChunks) {
            const float* const row = thread < kChunks ? args.lse_log2 : args.D;
            cp_async_16B(statistics(at.stage()) + thread * kChunkBytes,
                         row + statistic(at) + thread % kChunks * 4);
        }
    }

    // The index of the statistics of the first row of a step.
    FS_DEVICE int64_t statistic(const Step& at) const {
        return first_statistic<SEMANTICS>(args, batch, at.head, q.first) + at.block * Kernel::B_r;
    }

    // Sets rows that see no key to zero.
    FS_DEVICE void zero_unattended_rows(const Step& at) const {
        if constexpr (!kHidesKeys<SEMANTICS> && !Kernel::has_program) return;
        const int first_row = at.block * Kernel::B_r;
        const UnattendedRows<SEMANTICS, Kernel::B_r> rows{
            min(key_mask.first_attending_row() - first_row, Kernel::B_r), q.count - first_row,
            statistics(at.stage())};
        if (!rows.any(lane)) return;
        constexpr int kChunks = Kernel::d_head / kChunkElements;
        for (int i = thread_index(); i < rows.end() * kChunks; i += Kernel::n_threads) {
            if (Kernel::has_program && !rows.contains(i / kChunks)) continue;
            const uint32_t place =
                chunk_place<typename Kernel::QueriesLayout>(i / kChunks, i % kChunks);
            store_shared_16B(Q_tile(at.stage()) + place, uint4{0, 0, 0, 0});
            if constexpr (!Kernel::is_pair)
                store_shared_16B(do_tile(at.stage()) + place, uint4{0, 0, 0, 0});
        }
        if constexpr (Kernel::is_pair) {
            constexpr int kChunksOfV = Kernel::d_v / kChunkElements;
            for (int i = thread_index(); i < rows.end() * kChunksOfV; i += Kernel::n_threads) {
                if (Kernel::has_program && !rows.contains(i / kChunksOfV)) continue;
                store_shared_16B(do_tile(at.stage()) + chunk_place<typename Kernel::doLayout>(
                                                           i / kChunksOfV, i % kChunksOfV),
                                 uint4{0, 0, 0, 0});
            }
        }
        __syncthreads();
    }
    template <class Layout>
    FS_DEVICE static uint32_t chunk_place(int row, int chunk) {
        if (chunk / 8 < Layout::kWidePanels)
            return chunk / 8 * Layout::template Panel<false>::kBytes +
                   Layout::template Panel<false>::offset(row, chunk % 8);
        return Layout::kNarrowOffset + Layout::template Panel<true>::offset(row, chunk % 8);
    }

    // ---- the algorithm ----

    template <bool kAll>
    FS_DEVICE void step(const Step& at, const Step& next, bool has_next, bool needs_mask) {
        using Layout = typename Kernel::QueriesLayout;
        using doLayout = typename Kernel::doLayout;
        const ColumnsB<doLayout, Kernel::column_warps> d_o(do_tile(at.stage()), lane, turn());
        const ColumnsB<Layout, Kernel::column_warps> Q(Q_tile(at.stage()), lane, turn());
        const bool wants_dk = kAll || args.dk != nullptr, wants_dv = kAll || args.dv != nullptr;
        Scores S, dP;
        zero(S);
        multiply<value_t, Kernel::d_steps>(S, K_rows(),
                                           RowsB<Layout>(Q_tile(at.stage()), lane, warp_query()));
        // The next step's addresses are computed while the tensor cores are busy.
        if constexpr (Kernel::stages > 1) {
            if (has_next) start_queries(next);
            cp_async_commit();
        }
        // There is no store and no branch between these two calls, so that the GEMMs of the second
        // overlap the exponentials of the first.
        Rounded P, dS;
        exponentiate(P, S, at, needs_mask);
        zero(dP);
        multiply<value_t, Kernel::d_v_steps>(
            dP, V_rows(), RowsB<doLayout>(do_tile(at.stage()), lane, warp_query()));
        compute_dS(dS, P, S, dP, at, needs_mask);

        if constexpr (Kernel::in_registers) {
            if (wants_dv) multiply<value_t, Kernel::query_steps>(dv, P, d_o);
            if constexpr (Kernel::dS_tiles > 0) store_scores(dS_place(at), dS);
            if (wants_dk) multiply<value_t, Kernel::query_steps>(dk, dS, Q);
        } else {
            store_scores(Kernel::P_offset, P);
            store_scores(dS_place(at), dS);
            // The barrier of the warps that share keys.
            named_barrier_wait(1 + warp / Kernel::column_warps, kWarpSize * Kernel::column_warps);
            if (wants_dv)
                multiply<value_t, Kernel::query_steps>(dv, scores_rows(Kernel::P_offset), d_o);
            if (wants_dk) multiply<value_t, Kernel::query_steps>(dk, scores_rows(dS_place(at)), Q);
        }
    }

    FS_DEVICE static int dS_place(const Step& at) {
        const int tile = Kernel::dS_tiles == 2 ? at.parity : 0;
        return Kernel::dS_offset + tile * Kernel::ScoresLayout::kBytes;
    }

    using KeyRows = RowsA<typename Kernel::KeysLayout, Kernel::key_tiles>;
    using ScoresRows = RowsA<typename Kernel::ScoresLayout, Kernel::key_tiles>;
    using ValueRows = RowsA<typename Kernel::ValuesLayout, Kernel::key_tiles>;
    FS_DEVICE KeyRows K_rows() const { return KeyRows(smem + Kernel::K_offset, lane, warp_key()); }
    FS_DEVICE ValueRows V_rows() const {
        return ValueRows(smem + Kernel::V_offset, lane, warp_key());
    }
    FS_DEVICE ScoresRows scores_rows(int offset) const {
        return ScoresRows(smem + offset, lane, warp_key());
    }

    // The statistic of the two queries that this lane has in column n of tiles.
    FS_DEVICE float2 row_statistic(const Step& at, int which, int n) const {
        const int query = warp_query() + 8 * n + lane % 4 * 2;
        return load_shared_float2(statistics(at.stage()) + (which * Kernel::B_r + query) * 4);
    }

    // S becomes P, even for queries that do not see a key. If scores are changed (by a softcap or a
    // score function), P is masked and rounded here, and S becomes P times the change's slope.
    FS_DEVICE void exponentiate(Rounded& rounded, Scores& S, const Step& at, bool needs_mask) {
        change_scores<SEMANTICS>(S, args.score_argument);
        Scores P;
#pragma unroll
        for (int n = 0; n < Kernel::query_tiles; ++n) {
            const float2 lse_log2 = row_statistic(at, 0, n);
#pragma unroll
            for (int m = 0; m < Kernel::key_tiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    P[m][n][e] = exp2_approx(fmaf(changed(S, at, m, n, e), args.scale_log2,
                                                  e % 2 == 0 ? -lse_log2.x : -lse_log2.y));
        }
        if constexpr (Kernel::changes_scores) {
            if constexpr (Kernel::masked)
                if (needs_mask) mask(P, at);
            if (needs_mask) hide_keys(P, at);
            round_to<value_t>(rounded, P);
        }
#pragma unroll
        for (int m = 0; m < Kernel::key_tiles; ++m)
#pragma unroll
            for (int n = 0; n < Kernel::query_tiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    S[m][n][e] = BackwardProgram<SEMANTICS>::gradient(P[m][n][e], S[m][n][e]);
    }

    // The score that enters the softmax. With a score function S becomes the function's slope.
    FS_DEVICE float changed(Scores& S, const Step& at, int m, int n, int e) const {
        if constexpr (Kernel::has_program)
            return program(at).change(S[m][n][e], query_of_lane(at)(m, n, e),
                                      key_of_lane()(m, n, e));
        else
            return S[m][n][e];
    }
    // Zeroes elements of keys that a program hides.
    FS_DEVICE void hide_keys(Scores& x, const Step& at) const {
        if constexpr (SEMANTICS.program_masks)
            program(at).hide(x, query_of_lane(at), key_of_lane());
    }
    FS_DEVICE BackwardProgram<SEMANTICS> program(const Step& at) const {
        return {args.program, batch, at.head, q.count, k.count};
    }
    FS_DEVICE auto query_of_lane(const Step& at) const {
        const int first = at.block * Kernel::B_r + warp_query() + lane % 4 * 2;
        return [first](int, int n, int e) { return program::Place{first, 8 * n + e % 2}; };
    }
    FS_DEVICE auto key_of_lane() const {
        const int first = first_key + warp_key() + lane / 4;
        return [first](int m, int, int e) { return program::Place{first, 16 * m + 8 * (e / 2)}; };
    }

    // dP becomes dS = P (dP - D) and is rounded. Unless scores are changed, P is rounded as well.
    // Both are 0 where a query does not see a key.
    FS_DEVICE void compute_dS(Rounded& rounded, Rounded& rounded_P, Scores& P, Scores& dP,
                              const Step& at, bool needs_mask) {
#pragma unroll
        for (int n = 0; n < Kernel::query_tiles; ++n) {
            const float2 D = row_statistic(at, 1, n);
#pragma unroll
            for (int m = 0; m < Kernel::key_tiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    dP[m][n][e] = P[m][n][e] * (dP[m][n][e] - (e % 2 == 0 ? D.x : D.y));
        }
        // Masked dP is undefined and may be NaN. Where a program hides keys, P is 0.
        if constexpr (Kernel::masked)
            if (needs_mask) {
                mask(dP, at);
                if constexpr (!Kernel::changes_scores) mask(P, at);
            }
        if constexpr (SEMANTICS.program_masks)
            if (needs_mask) {
                if constexpr (!Kernel::changes_scores) hide_keys(P, at);
#pragma unroll
                for (int m = 0; m < Kernel::key_tiles; ++m)
#pragma unroll
                    for (int n = 0; n < Kernel::query_tiles; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (P[m][n][e] == 0.0f) dP[m][n][e] = 0.0f;
            }
        if constexpr (!Kernel::changes_scores) round_to<value_t>(rounded_P, P);
        round_to<value_t>(rounded, dP);
    }

    // Sets elements whose query does not see the key, or does not exist, to zero.
    FS_DEVICE void mask(Scores& x, const Step& at) const {
        const int query = at.block * Kernel::B_r + warp_query() + lane % 4 * 2;
        const auto seen = [&](int n, int i) {
            KeyRange keys = key_mask.keys(query + 8 * n + i);
            if (SEMANTICS.uneven && query + 8 * n + i >= q.count) keys.last = -1;
            return keys;
        };
        mask_queries<SEMANTICS>(x, first_key + warp_key() + lane / 4, seen, 0.0f);
    }

    // Stores this warp's part of P^T or dS^T, which other warps will read.
    FS_DEVICE void store_scores(int offset, const Rounded& x) const {
        using Layout = typename Kernel::ScoresLayout;
        constexpr int kPanel = Layout::kWidePanels > 0 ? 64 : 32;
        const int query = warp_query();
        const typename Layout::Cursor cursor(
            smem + offset + query / kPanel * Layout::template Panel<kPanel == 32>::kBytes,
            warp_key() + lane / 4, query % kPanel / 8, lane % 4 * 4);
#pragma unroll
        for (int s = 0; s < Kernel::query_tiles / 2; ++s)
#pragma unroll
            for (int m = 0; m < Kernel::key_tiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    store_shared_4B(cursor.at(16 * m + i % 2 * 8, 2 * s + i / 2),
                                    x.fragments[s][m][i]);
    }

    // Adds this warp's part of dS K to dq, for one step.
    FS_DEVICE void add_dq(const Step& at) const {
        if constexpr (Kernel::dq_passes == 1) {
            add_dq_rows<Kernel::dq_row_tiles>(at, 0);
        } else {
#pragma unroll 1
            for (int m = 0; m < Kernel::dq_passes; ++m) add_dq_rows<1>(at, m);
        }
    }
    // Adds the products for kTiles of the warp's groups of 16 rows, from group `first` on.
    template <int kTiles>
    FS_DEVICE void add_dq_rows(const Step& at, int first) const {
        float dq[kTiles][Kernel::dq_column_tiles][4] = {};
        using dS_t = ColumnsA<typename Kernel::ScoresLayout, kTiles, Kernel::dq_row_warps>;
        using K_t = ColumnsB<typename Kernel::KeysLayout, Kernel::dq_column_warps>;
        multiply<value_t, Kernel::key_steps>(
            dq,
            dS_t(smem + dS_place(at), lane,
                 warp / Kernel::dq_column_warps + first * Kernel::dq_row_warps),
            K_t(smem + Kernel::K_offset, lane, warp % Kernel::dq_column_warps));
        float* sums = first_dq_sums<Kernel>(args, statistic(at), warp, lane) +
                      first * Kernel::dq_column_tiles * kTileSums;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < Kernel::dq_column_tiles; ++n, sums += kTileSums)
                add_tile(sums, dq[m][n]);
    }

    // ---- the epilogue ----

    FS_DEVICE void store() {
        store<false>(args.dk, dk, args.scale, Kernel::K_offset,
                     batch * args.dk_batch_stride + head_k * args.dk_head_stride,
                     args.dk_seq_stride);
        store<true>(args.dv, dv, 1.0f, Kernel::V_offset,
                    batch * args.dv_batch_stride + head_k * args.dv_head_stride,
                    args.dv_seq_stride);
        __syncthreads();
        copy_out<false>(args.dk, Kernel::K_offset,
                        batch * args.dk_batch_stride + head_k * args.dk_head_stride,
                        args.dk_seq_stride);
        copy_out<true>(args.dv, Kernel::V_offset,
                       batch * args.dv_batch_stride + head_k * args.dv_head_stride,
                       args.dv_seq_stride);
    }

    template <bool kOfV, class Sums>
    FS_DEVICE void store(void* gradient, const Sums& acc, float scale, int offset, int64_t origin,
                         int64_t seq_stride) const {
        using Layout =
            std::conditional_t<kOfV, typename Kernel::ValuesLayout, typename Kernel::KeysLayout>;
        if (gradient == nullptr) return;
        if (args.grads_fp32) {
            float* const first =
                static_cast<float*>(gradient) + origin + (k.first + first_key) * seq_stride;
            store_fp32_gradient<Kernel::column_warps>(
                first, seq_stride, k.count - first_key,
                kOfV ? d_of_v<Kernel>(args) : d_of_qk<Kernel>(args), acc, scale, warp_key(), turn(),
                lane);
        } else {
            stage_gradient<Layout, value_t, Kernel::column_warps>(smem + offset, acc, scale,
                                                                  warp_key(), turn(), lane);
        }
    }

    template <bool kOfV>
    FS_DEVICE void copy_out(void* gradient, int offset, int64_t origin, int64_t seq_stride) const {
        using Copy =
            std::conditional_t<kOfV, typename Kernel::CopyValues, typename Kernel::CopyKeys>;
        if (gradient == nullptr || args.grads_fp32) return;
        char* const first = const_cast<char*>(
            row_address<value_t>(gradient, origin, k.first + first_key, seq_stride));
        Copy(thread_index())
            .shared_to_global(
                first, smem + offset, seq_stride * int64_t{sizeof(value_t)},
                kOfV ? extent_of_v(k.count - first_key) : extent(k.count - first_key));
    }
};

// The number of CTAs at the end of a causal launch that are sorted together, the longest first. It
// is about twice what a GPU with 130 SMs holds, so that the first of these CTAs are finished when
// the last begin.
constexpr uint32_t kLastCtas = 256;

// The main kernel of all configs.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads)
    flash_backward_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const uint32_t n_blocks = (args.seq_k + Kernel::B_c - 1) / Kernel::B_c;
    uint32_t sequence = block_index() / n_blocks;
    int block = block_index() % n_blocks;
    // Heads run one after the other, so that their sums of dq stay in the L2. Each head begins with
    // its first keys, which the most queries see. The last heads run together, the longest blocks
    // first, so that no SM has a long CTA at the end.
    if constexpr (kTriangular<Kernel::SEMANTICS>) {
        const uint32_t n_sequences = gridDim.x / n_blocks;
        const uint32_t together = min((kLastCtas + n_blocks - 1) / n_blocks, n_sequences);
        const uint32_t alone = n_sequences - together;
        if (sequence >= alone) {
            const uint32_t number = block_index() - alone * n_blocks;
            sequence = alone + number % together;
            block = number / together;
        }
    }
    const int batch = sequence / args.heads_k, head_k = sequence % args.heads_k;
    constexpr bool kPacked = Kernel::SEMANTICS.packed;
    const SequenceRows q =
        sequence_rows<kPacked>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
    const SequenceRows k =
        sequence_rows<kPacked>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
    // In a packed batch, each sequence has as many blocks as the longest one needs.
    if (kPacked && block * Kernel::B_c >= k.count) return;
    KeysBlock<Kernel>(args, shared_address(shared_memory), batch, head_k, block, q, k).run();
}

}  // namespace flashsmith
