// A consumer warpgroup: attention for 64 rows of Q of one tile after the other.
#pragma once

#include "wgmma/output.cuh"
#include "wgmma/row_softmax.cuh"
#include "wgmma/turns.cuh"

namespace flashsmith {

template <class Kernel>
struct Consumer {
    static_assert(Kernel::valid_config());
    static constexpr HopperForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    const HopperForwardKernelArgs& args;
    const ForwardKernelArgs& problem;
    const uint32_t smem;
    const int warpgroup, warp, lane;
    const Turns<Kernel> turns;

    RingPlace<CFG.q_buffers> buffer;
    TileRing<CFG.kv_stages, Kernel::KV_tile_bytes, CFG.cluster_size> K, V;
    OutputStore<Kernel> output;
    WorkTile tile;

    RowSoftmax<CFG.rescale_threshold != 0, CFG.exp2_fma_share, CFG.stale_max> softmax;
    typename Kernel::S_t S;
    typename Kernel::P_t P;
    typename Kernel::O_t O;
    bool O_is_begun;

    FS_DEVICE Consumer(const HopperForwardKernelArgs& args, uint32_t smem, int warpgroup)
        : args(args),
          problem(args.problem),
          smem(smem),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpLanes % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          turns{warpgroup},
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          output{args, warp, lane},
          softmax(problem.scale_log2) {}

    // ---- the algorithm ----

    FS_DEVICE void run() {
        turns.open();
        while (receive_tile()) {
            const BlockRange mine = blocks_of_warpgroup();
            const int later = tile.block_end - mine.end;  // blocks that only others see
            const bool owes_turn = Kernel::last_rows_first && later > 0;
            // Every warpgroup takes as many turns as the tile has blocks after the first.
            pass_by(later, later - owes_turn);
            if (mine.begin < mine.end)
                attend(mine, owes_turn);
            else
                see_nothing();
            pass_by(mine.begin - tile.block_begin, tile.n_blocks() - 1);
            finish_tile();
        }
        output.finish();
    }

    // Last block first: masks and ragged ends mostly concern the last blocks of a row. A turn that
    // is owed is skipped when the first scores are done, not before: who is next does not need it
    // sooner.
    FS_DEVICE void attend(const BlockRange& blocks, bool owes_turn) {
        int block = blocks.end - 1;
        O_is_begun = false;
        K.wait_full();
        start_QK();
        finish_QK<0>();
        K.release(warp, lane);
        output.drain();
        score<true>(block, blocks);
        pack_P();
        if (owes_turn) turns.skip();

#pragma unroll 1
        while (--block >= blocks.begin) {
            K.wait_full();
            V.wait_full();
            turns.template wait<PingPong::gemm>();
            if constexpr (CFG.overlap) {
                start_QK();
                start_PV();
                turns.template pass_on<PingPong::gemm>();
                finish_QK<1>();
                if constexpr (!CFG.stale_max) K.release(warp, lane);
                score<false>(block, blocks);
                if constexpr (CFG.early_exp) end_block_after(S);
                finish_PV();
            } else {
                start_PV();
                finish_PV();
                start_QK();
                turns.template pass_on<PingPong::gemm>();
                finish_QK<0>();
                if constexpr (!CFG.stale_max) K.release(warp, lane);
                score<false>(block, blocks);
            }
            if constexpr (CFG.stale_max)
                settle();
            else
                pack_P();
            if (O_is_stale) softmax.rescale(O, factors);
        }
        V.wait_full();
        start_PV();
        conclude();
        finish_PV();
    }

    // ---- products ----

    // S = Q K^T.
    FS_DEVICE void start_QK() {
        using Panel = typename Kernel::Panel;
        const uint64_t q = Panel::descriptor(Q_tile()), k = Panel::descriptor(K.tile());
        wgmma_fence(S);
#pragma unroll
        for (int step = 0; step < Kernel::QK_steps; ++step)
            Kernel::QK::run(S, q + Panel::template column_step<kWarpgroupRows>(step),
                            k + Panel::template column_step<Kernel::B_c>(step), step > 0);
        wgmma_commit();
    }
    template <int kPending>
    FS_DEVICE void finish_QK() {
        wgmma_wait<kPending>(S);
    }

    // O += P V.
    FS_DEVICE void start_PV() {
        using Panel = typename Kernel::Panel;
        const uint64_t v = Panel::descriptor(V.tile(), Kernel::KV_panel_bytes);
        wgmma_fence(O, P);
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            Kernel::PV::run(O, P[step], v + Panel::row_step(step), step > 0 || O_is_begun);
        wgmma_commit();
        O_is_begun = true;
    }
    FS_DEVICE void finish_PV() {
        wgmma_wait<0>(O);
        V.release(warp, lane);
    }

    // ---- between the products ----

    // ptxas moves exponentials below a wait for products, but not beyond the end of a basic block:
    // a branch that it cannot know to be never taken, on a NaN that no exponential is.
    FS_DEVICE static void end_block_after(typename Kernel::S_t& S) {
        pin(S);
        if (__float_as_uint(S[0][Kernel::B_c / 8 - 1][3]) == 0x7fc12345u)
            asm volatile("nanosleep.u32 20;" ::: "memory");
    }

    bool O_is_stale;
    float factors[2];  // of O, where it is

    // Scores become probabilities.
    template <bool kFirst>
    FS_DEVICE void score(int block, const BlockRange& blocks) {
        if constexpr (SEMANTICS.softcap) tanh_scaled(S, problem.softcap_scale_2log2e);
        // Without a mask a row sees all keys: only the last, in the first block, may be missing.
        if constexpr (Kernel::masked && (kFirst || SEMANTICS.mask != MaskKind::none))
            if (blocks.needs_mask(block)) mask(block);
        // Whoever wants the maxima gets every row's.
        const float threshold = problem.row_max == nullptr ? CFG.rescale_threshold : 0;
        const bool up_to_date = kFirst || !CFG.stale_max || wants_maximum(block, blocks);
        if (up_to_date)
            O_is_stale = softmax.template raise_maximum<kFirst>(S, factors, threshold);
        else
            O_is_stale = false;
        turns.template wait<kFirst ? PingPong::none : PingPong::exp>();
        added = softmax.exponentiate(S);
        turns.template pass_on<kFirst ? PingPong::none : PingPong::exp>();
        if constexpr (CFG.stale_max && !kFirst)
            holds = up_to_date || softmax.holds(added, 1 << CFG.rescale_threshold);
        else
            softmax.template add<kFirst>(added);
    }

    // Whether row_max is to be brought up to date before this block's scores are exponentiated: as
    // long as rows may have met nothing yet, and for the first two blocks that all rows see, where
    // maxima still grow too much.
    FS_DEVICE bool wants_maximum(int block, const BlockRange& blocks) const {
        if (problem.row_max != nullptr) return true;  // every row's own
        if constexpr (!Kernel::masked) return block + 2 >= problem.n_KV_blocks;
        return blocks.needs_mask(block) || blocks.needs_mask(block + 2);
    }

    bool holds;  // the maximum, whether it was brought up to date or not
    typename decltype(softmax)::Added added;

    // stale_max: P, from probabilities whose maximum may be out of date.
    FS_DEVICE void settle() {
        if (!any_lane(!holds)) {
            pack_P();
        } else if (!softmax.overflown(added)) {
            O_is_stale = softmax.catch_up(S, added, factors, CFG.rescale_threshold);
            pack_P();
        } else {
            score_again();
        }
        softmax.template add<false>(added);
        K.release(warp, lane);
    }

    // Scores too far above row_max are lost: P from Q and K once more, by this warp alone, the
    // maximum first. 16 keys at a time take fewer registers than S did.
    FS_DEVICE void score_again() {
        float scores[1][2][4];
        float seen[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
        for (int step = 0; step < Kernel::PV_steps; ++step) {
            score_step(scores, step);
#pragma unroll
            for (int r = 0; r < 2; ++r) seen[r] = fmaxf(seen[r], softmax.largest(scores, r));
        }
        O_is_stale = softmax.template raise_to<false>(seen, factors, 0);
        added = {};
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step) {
            score_step(scores, step);
            const auto more = softmax.exponentiate(scores);
            added.sum[0] += more.sum[0];
            added.sum[1] += more.sum[1];
            pack_step(P[step], scores[0][0], scores[0][1]);
        }
        __syncwarp();  // every lane has read K, which one releases
    }
    FS_DEVICE void score_step(float (&scores)[1][2][4], int step) const {
        using Panel = typename Kernel::Panel;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[0][n][e] = 0.0f;
        const int row = warp * kWarpRows + lane % 16, key = step * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll 1
        for (int column = 0; column < Kernel::d_head; column += 16) {
            const int panel = column / Panel::kColumns, chunk = column % Panel::kColumns / 8;
            uint32_t q[4], k[4];
            ldmatrix_x4(q, Q_tile() + panel * Kernel::Q_panel_bytes +
                               Panel::offset(row, chunk + lane / 16));
            ldmatrix_x4(k, K.tile() + panel * Kernel::KV_panel_bytes +
                               Panel::offset(key, chunk + lane / 8 % 2));
            mma_m16n8k16<typename Kernel::value_t>(scores[0][0], q, {k[0], k[1]});
            mma_m16n8k16<typename Kernel::value_t>(scores[0][1], q, {k[2], k[3]});
        }
        if constexpr (SEMANTICS.softcap) tanh_scaled(scores, problem.softcap_scale_2log2e);
    }

    // The accumulator of two neighbouring 16x8 tiles is, rounded and packed, the A operand of a
    // step of 16 keys.
    FS_DEVICE void pack_P() {
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            pack_step(P[step], S[0][2 * step], S[0][2 * step + 1]);
    }
    FS_DEVICE static void pack_step(uint32_t (&p)[4], const float (&left)[4],
                                    const float (&right)[4]) {
        using value_t = typename Kernel::value_t;
        p[0] = pack_16bit<value_t>(left[0], left[1]);
        p[1] = pack_16bit<value_t>(left[2], left[3]);
        p[2] = pack_16bit<value_t>(right[0], right[1]);
        p[3] = pack_16bit<value_t>(right[2], right[3]);
    }

    // Scores of keys that a row may not see become -inf.
    FS_DEVICE void mask(int block) {
        const VisibleKeys<SEMANTICS> visible(problem, tile.q_count, tile.k_count);
        const int first_column = block * Kernel::B_c + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange keys =
                visible.keys(tile.first_row + warp * kWarpRows + 8 * r + lane / 4);
            const KeyRange columns{keys.first - first_column, keys.last - first_column};
#pragma unroll
            for (int n = 0; n < Kernel::B_c / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e > columns.last ||
                        (SEMANTICS.mask == MaskKind::window && 8 * n + e < columns.first))
                        S[0][n][2 * r + e] = -INFINITY;
        }
    }

    // ---- tiles ----

    FS_DEVICE int slot() const { return buffer.stage() * Kernel::n_warpgroups + warpgroup; }
    FS_DEVICE uint32_t Q_tile() const {
        return smem + Kernel::Q_offset + slot() * Kernel::Q_tile_bytes;
    }
    FS_DEVICE RingBarriers Q_barriers() const { return {smem + Kernel::Q_barriers}; }

    // Waits for the next tile's Q; false after the last.
    FS_DEVICE bool receive_tile() {
        mbarrier_wait(Q_barriers().full(slot()), buffer.parity());
        read_notice();
        return tile.exists();
    }
    FS_DEVICE void read_notice() {
        tile = WorkTile::load<Kernel::tells_q_count>(
            smem + Kernel::notices + slot() * Kernel::notice_bytes, problem.seq_q);
    }

    // Of the tile's blocks those that this warpgroup's rows see.
    FS_DEVICE BlockRange blocks_of_warpgroup() const {
        if (tile.first_row >= tile.row_end) return {tile.block_end, tile.block_end, 0, 0};
        if constexpr (!Kernel::masked) return {tile.block_begin, tile.block_end, 0, 0};
        BlockRange blocks = VisibleKeys<SEMANTICS>(problem, tile.q_count, tile.k_count)
                                .blocks(tile.first_row, kWarpgroupRows, Kernel::B_c);
        if (blocks.begin >= blocks.end) return {tile.block_end, tile.block_end, 0, 0};
        return blocks;
    }

    // Blocks that only other warpgroups need.
    FS_DEVICE void pass_by(int blocks, int turns_at_most) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            K.wait_full();
            K.release(warp, lane);
            V.wait_full();
            V.release(warp, lane);
            if (i < turns_at_most) turns.skip();
        }
    }

    // What is left to do once all scores are known, but for O itself: the last product with V runs
    // beside it.
    FS_DEVICE void conclude() {
        read_notice();  // again, instead of holding it in registers all the while
        if constexpr (kFreesQ) {
            __syncwarp();  // every lane has read the tile's notice
            if (lane == 0) mbarrier_arrive(Q_barriers().empty(slot()));
        }
        const float* sinks = problem.sinks;
        softmax.conclude(weights, sinks == nullptr ? nullptr : sinks + tile.head);
        store_statistics();
    }
    // Whether O does not need Q's place.
    static constexpr bool kFreesQ = CFG.separate_O || CFG.direct_O;
    float weights[1][2];  // that O's rows are multiplied by in the end

    FS_DEVICE void finish_tile() {
        output.drain();
        softmax.normalise(O, weights);
        const uint32_t slot_empty = Q_barriers().empty(slot());
        if constexpr (CFG.direct_O) {
            output.store_directly(O, tile, tile.first_row);
        } else if constexpr (CFG.separate_O) {
            output.start(O, smem + Kernel::O_offset + warpgroup * Kernel::Q_tile_bytes, slot_empty,
                         tile, tile.first_row);
        } else {
            turns.gather_warpgroup();  // no warp's products read Q any more
            output.start(O, Q_tile(), slot_empty, tile, tile.first_row);
            if constexpr (CFG.q_buffers == 1) output.drain();
        }
        buffer.advance();
    }

    FS_DEVICE void see_nothing() {
#pragma unroll
        for (int n = 0; n < Kernel::d_head / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[0][n][e] = 0.0f;
        softmax = decltype(softmax)(problem.scale_log2);
        conclude();
    }

    FS_DEVICE void store_statistics() const {
        if ((problem.lse == nullptr && problem.row_max == nullptr) || lane % 4 != 0) return;
        const int64_t head = tile.batch * problem.lse_batch_stride +
                             tile.head * problem.lse_head_stride + tile.q_first;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile.first_row + warp * kWarpRows + 8 * r + lane / 4;
            if (row >= tile.row_end) continue;
            if (problem.lse != nullptr) problem.lse[head + row] = softmax.row_sum[0][r];
            if (problem.row_max != nullptr) problem.row_max[head + row] = softmax.row_max[0][r];
        }
    }
};

}  // namespace flashsmith
