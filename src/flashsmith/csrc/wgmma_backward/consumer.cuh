// A consumer warpgroup: dk and dv of its 64 keys, and its part of every block's dq.
//
// Scores are computed transposed, keys by queries: P^T and dS^T, rounded, are then the operands of
// dv += P^T do and dk += dS^T q as they lie in registers. Only dS goes through shared memory, for
// dQ = dS K over all keys of the CTA, whose parts the warpgroups add to fp32 sums in global memory.
#pragma once

#include "backward/store_gradient.cuh"
#include "common/opaque.cuh"
#include "common/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup_order.cuh"
#include "wgmma_backward/dq_order.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

// Four 8x8 matrices of 16-bit elements, each transposed; lane l gives the address of row l % 8 of
// what matrix l / 8 is in memory.
FS_DEVICE void stmatrix_x4_transposed(uint32_t smem, const uint32_t (&d)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
        "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
        : "memory");
}

// Sums of fp32 in shared memory, added to those in global memory.
FS_DEVICE void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
        "r"(smem), "r"(bytes)
        : "memory");
}
// All of this thread's are added.
FS_DEVICE void bulk_sums_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The stages of dS: full when all warpgroups have stored their keys, empty when dQ is computed.
template <class Kernel>
struct dSStages {
    static constexpr int kStages = Kernel::CFG.ds_stages;
    // Warps that arrive at a full barrier, and at an empty one.
    static constexpr int kWriters = Kernel::key_groups * kWarpsPerWarpgroup;
    static constexpr int kReaders = Kernel::dq_parts * kWarpsPerWarpgroup;

    uint32_t smem;
    PipelineState<kStages> written, read;

    FS_DEVICE static void init(uint32_t smem) {
        const PipelineBarriers barriers{smem + Kernel::dS_barriers};
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(barriers.full(stage), kWriters);
            mbarrier_init(barriers.empty(stage), kReaders);
        }
    }
    FS_DEVICE PipelineBarriers barriers() const { return {smem + Kernel::dS_barriers}; }
    FS_DEVICE uint32_t tile(int stage) const {
        return smem + Kernel::dS_offset + stage * Kernel::dS_tile_bytes;
    }

    FS_DEVICE uint32_t acquire() const {
        mbarrier_wait(barriers().empty(written.stage()), written.phase() ^ 1);
        return tile(written.stage());
    }
    // What the warp has stored is to be seen by wgmma.
    FS_DEVICE void commit(int lane) {
        if constexpr (Kernel::CFG.without_dq) return __syncwarp();
        tma_store_fence();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barriers().full(written.stage()));
        written.advance();
    }
    FS_DEVICE uint32_t wait() const {
        mbarrier_wait(barriers().full(read.stage()), read.phase());
        return tile(read.stage());
    }
    FS_DEVICE void release(int lane) {
        if (lane == 0) mbarrier_arrive(barriers().empty(read.stage()));
        read.advance();
    }
};

// Hardware barriers: 0 is __syncthreads', then one for rows that are cleared, and those of the
// warpgroups' order.
constexpr int kRowsBarrier = 1, kFirstOrderBarrier = 2;

template <class Kernel>
struct BackwardConsumer {
    static_assert(Kernel::valid_config());
    static constexpr HopperBackwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using value_t = typename Kernel::value_t;
    using Panel = typename Kernel::Panel;
    using Keys = KeyBlock<Kernel>;
    // The statistics of the two queries that a lane has in each tile of scores.
    using RowPairs = float2[Kernel::B_r / 8];

    // Whether sums of dq are under way between products of the scores; whether dq's product comes
    // before dk's.
    static constexpr bool kSumsBesideScores = CFG.dq_sums == DqSums::beside_scores;
    static constexpr bool kdQBeforedk = CFG.dq_sums == DqSums::sums_under_dk;
    // Whether a step adds its dq, or the last one's, between its products: not in turns.
    static constexpr bool kAddsBetween =
        kSumsBesideScores && !Kernel::takes_turns && !CFG.without_dq;

    // ---- state ----

    const BackwardKernelArgs& args;
    const uint32_t smem;
    const int warpgroup, warp, lane;
    int first_key;  // of this warpgroup
    BlockRange blocks;
    Visibility<SEMANTICS> visibility;
    int block;     // of queries
    int turn;      // steps until this warpgroup computes dq, where they take turns
    int dq_block;  // that of the last dq, and where this lane's part of it belongs
    float* dq_sums;
    // With ordered_dq a block's heads follow one another: of how many, which one is next, and which
    // one the last dq is of; then nobody needs dq_block.
    int n_heads, head, dq_head, direction;
    uint32_t odd_turns = 0;  // of this warpgroup in that order

    TilePipeline<1, Kernel::KV_tile_bytes> K, V;
    TilePipeline<CFG.q_stages, Kernel::Q_tile_bytes> Q;
    TilePipeline<CFG.do_stages, Kernel::Q_tile_bytes> d_o;
    dSStages<Kernel> stages;
    const WarpgroupOrder<CFG.n_warpgroups, CFG.pingpong, kFirstOrderBarrier> order;

    typename Kernel::Scores S, dP;
    typename Kernel::Rounded P, dS;
    typename Kernel::Gradient dk, dv;
    typename Kernel::dQ_t dq;

    FS_DEVICE BackwardConsumer(const BackwardKernelArgs& args, uint32_t smem, int warpgroup)
        : args(args),
          smem(smem),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          visibility(args, 0, 0),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          d_o(smem + Kernel::do_offset, smem + Kernel::do_barriers),
          stages{smem},
          order{warpgroup} {}

    // This warpgroup's first key, of the CTA's.
    FS_DEVICE int first_row() const { return CFG.split_roles ? 0 : warpgroup * kWarpgroupRows; }

    // ---- the algorithm ----

    FS_DEVICE void run() {
        order.init();
        if constexpr (!CFG.persistent) {
            compute(block_index());
            store_gradients(block_index());
        } else {
            for (K.consumer_wait(); number() != kNoKeyBlock; K.consumer_wait()) {
                compute(number());
                const uint32_t done = number();  // again, rather than keep it in a register
                __syncwarp();
                K.consumer_release(warp, lane);
                store_gradients(done);
            }
        }
        if constexpr (CFG.bulk_sums)
            if (lane == 0) bulk_sums_wait();
    }
    FS_DEVICE uint32_t number() const {
        return __shfl_sync(0xffffffffu, load_shared_16B(smem + Kernel::number_offset).x, 0);
    }

    // Its first step; how many there are.
    FS_DEVICE int begin(uint32_t number) {
        const Keys keys(args, number);
        first_key = keys.first_key + first_row();
        blocks = keys.blocks;
        visibility = Visibility<SEMANTICS>(args, keys.q.count, keys.k.count);
        block = keys.first_step().block;
        dq_block = blocks.begin - 1;
        n_heads = keys.n_heads;
        direction = keys.direction;
        head = 0;
        dq_head = -1;
        turn = warpgroup;
        if constexpr (!CFG.without_dq) dq_sums = first_dq_sums(keys);
        return keys.n_steps();
    }

    // dk and dv of a block of keys.
    FS_DEVICE void compute(uint32_t number) {
        const int n_steps = begin(number);
        zero(dk);
        zero(dv);
        if constexpr (kSumsBesideScores && !CFG.without_dq) zero(dq);
        if (n_steps == 0) return;
        if constexpr (!CFG.persistent) K.consumer_wait();
        if constexpr (CFG.order == StepOrder::scores_together)
            steps_with_scores_together(n_steps);
        else
            steps_with_dv_first(n_steps);
    }

    FS_DEVICE void store_gradients(uint32_t number) const {
        const Keys keys(args, number);
        store(args.dk, dk, args.scale,
              keys.batch * args.dk_batch_stride + keys.head_k * args.dk_head_stride,
              args.dk_seq_stride, keys);
        store(args.dv, dv, 1.0f,
              keys.batch * args.dv_batch_stride + keys.head_k * args.dv_head_stride,
              args.dv_seq_stride, keys);
    }

    // S, P, then dv and dP, dS, then dk and dq. No product is in flight where the loop begins:
    // ptxas would serialise them all.
    FS_DEVICE void steps_with_dv_first(int n_steps) {
        await_queries();
        begin_S();
        wgmma_wait<0>(S);
        exponentiate();
        V.consumer_wait();
        compute_dv_and_dP();
        const bool skips_dq = CFG.lagged_dq && n_steps > 1;
        if (skips_dq) {
            step_with_dv_first<false>();
            --n_steps;
        }
#pragma unroll 1
        while (--n_steps > 0) step_with_dv_first<true>();
        if constexpr (CFG.persistent) V.consumer_release(warp, lane);
        compute_dS();
        order.wait();
        start_gradient(dk, dS, Q.tile());
        order.arrive();
        stages.commit(lane);
        if constexpr (CFG.lagged_dq) {
            wgmma_wait<0>(dk, dS);
            if (skips_dq) compute_dq();
        }
        compute_dq();
        wgmma_wait<0>(dk, dS);
        if constexpr (CFG.persistent) Q.consumer_release(warp, lane);
    }

    // From dP to the next step's dP.
    template <bool kWithdQ>
    FS_DEVICE void step_with_dv_first() {
        compute_dS();
        if constexpr (CFG.order == StepOrder::dv_first) {
            order.wait();
            start_gradient(dk, dS, Q.tile());
            order.arrive();
            stages.commit(lane);
            if constexpr (kWithdQ) start_dq();
            wgmma_wait<kWithdQ ? 1 : 0>(dk, dS);
            Q.consumer_release(warp, lane);
            if constexpr (kWithdQ) finish_dq();
            advance_block();
            await_queries();
            begin_S();
            wgmma_wait<0>(S);
            exponentiate();
        } else {
            const uint32_t last_Q = Q.tile();
            advance_block();
            Q.state.advance();
            await_queries();
            order.wait();
            if constexpr (CFG.order == StepOrder::scores_ahead) {
                begin_S();
                if constexpr (kWithdQ && kdQBeforedk) start_dq();
                start_gradient(dk, dS, last_Q);
                order.arrive();
                stages.commit(lane);
                if constexpr (kWithdQ && !kdQBeforedk) start_dq();
                wgmma_wait<kWithdQ ? 2 : 1>(S);
                exponentiate();
                if constexpr (CFG.early_exp) end_basic_block();
                if constexpr (kWithdQ && kdQBeforedk) finish_dq<1>();
                wgmma_wait<kWithdQ && !kdQBeforedk ? 1 : 0>(dk, dS);
                release_last_Q();
            } else {
                start_gradient(dk, dS, last_Q);
                begin_S();
                order.arrive();
                stages.commit(lane);
                if constexpr (kWithdQ) start_dq();
                wgmma_wait<kWithdQ ? 1 : 0>(S, dk, dS);
                release_last_Q();
                exponentiate();
                if constexpr (CFG.early_exp) end_basic_block();
            }
            if constexpr (kWithdQ && !kdQBeforedk) finish_dq();
        }
        compute_dv_and_dP();
    }

    // S and dP, P and dS, then dv, dk and dq: the least registers.
    FS_DEVICE void steps_with_scores_together(int n_steps) {
        V.consumer_wait();
        if constexpr (CFG.lagged_dq) {
            step_with_scores_together<false>();
            --n_steps;
        }
#pragma unroll 1
        for (; n_steps > 0; --n_steps) step_with_scores_together<!CFG.without_dq>();
        if constexpr (CFG.persistent) V.consumer_release(warp, lane);
        if constexpr (kAddsBetween) add_dq();
        if constexpr (CFG.lagged_dq) {
            if constexpr (Kernel::takes_turns) {
                take_turn();
            } else {
                compute_dq();
            }
        }
    }

    template <bool kWithdQ>
    FS_DEVICE void step_with_scores_together() {
        constexpr bool kBeside = kWithdQ && !Kernel::takes_turns;
        await_queries();
        d_o.consumer_wait();
        RowPairs lse, D;
        if constexpr (kTilesFirst > 0)
            load_rows<0, kTilesFirst>(lse, Kernel::lse_offset, Q.state.stage());
        if constexpr (kLoadsDFirst) load_rows(D, Kernel::D_offset, d_o.state.stage());
        order.wait();
        begin_S();
        if constexpr (kAddsBetween) add_dq();
        begin_dP();
        order.arrive();
        if constexpr (kLoadsRowsEarly)
            load_rows<kTilesFirst>(lse, Kernel::lse_offset, Q.state.stage());
        wgmma_wait<1>(S);
        if constexpr (!kLoadsRowsEarly)
            load_rows<kTilesFirst>(lse, Kernel::lse_offset, Q.state.stage());
        exponentiate(lse);
        if constexpr (CFG.early_exp) end_basic_block();
        if constexpr (kLoadsRowsEarly && !kLoadsDFirst)
            load_rows(D, Kernel::D_offset, d_o.state.stage());
        wgmma_wait<0>(dP);
        if constexpr (!kLoadsRowsEarly && !kLoadsDFirst)
            load_rows(D, Kernel::D_offset, d_o.state.stage());
        differentiate(D);
        store_dS();
        order.wait();
        start_gradient(dv, P, d_o.tile());
        if constexpr (kBeside && kdQBeforedk) start_dq();
        start_gradient(dk, dS, Q.tile());
        order.arrive();
        stages.commit(lane);
        if constexpr (kBeside && !kdQBeforedk) start_dq();
        wgmma_wait<kBeside ? 2 : 1>(dv, P);
        d_o.consumer_release(warp, lane);
        if constexpr (kBeside && kdQBeforedk) finish_dq<1>();
        wgmma_wait<kBeside && !kdQBeforedk ? 1 : 0>(dk, dS);
        Q.consumer_release(warp, lane);
        if constexpr (kBeside && !kdQBeforedk) finish_dq();
        if constexpr (kWithdQ && Kernel::takes_turns) take_turn();
        advance_block();
    }

    // All of the next dq, if it is this warpgroup's turn.
    FS_DEVICE void take_turn() {
        if (turn == 0) {
            compute_dq();
        } else {
            stages.read.advance();
            advance_dq_sums();
        }
        turn = turn == 0 ? Kernel::n_warpgroups - 1 : turn - 1;
    }

    // Until the next block's queries are here.
    FS_DEVICE void await_queries() {
        Q.consumer_wait();
        clear_unseeing();
    }
    FS_DEVICE void begin_S() { start_scores(S, Kernel::K_offset, Q.tile()); }
    FS_DEVICE void begin_dP() { start_scores(dP, Kernel::V_offset, d_o.tile()); }

    // From P to dv, and dP. dv's product comes first: P's registers are free for dS once dP is
    // here.
    FS_DEVICE void compute_dv_and_dP() {
        d_o.consumer_wait();
        order.wait();
        start_gradient(dv, P, d_o.tile());
        if constexpr (kSumsBesideScores) add_dq();
        begin_dP();
        order.arrive();
        wgmma_wait<0>(dP, dv, P);
    }

    FS_DEVICE void compute_dS() {
        RowPairs D;
        load_rows(D, Kernel::D_offset, d_o.state.stage());
        compute_dS(D);
    }
    FS_DEVICE void compute_dS(const RowPairs& D) {
        differentiate(D);
        __syncwarp();  // all lanes have read their rows' statistics
        d_o.consumer_release(warp, lane);
        store_dS();
    }

    FS_DEVICE void advance_block() {
        if constexpr (CFG.ordered_dq) {
            if (++head == n_heads) head = 0, block += direction;
        } else {
            if (++block == blocks.end) block = blocks.begin;
        }
    }

    // ---- products ----

    // Of this warpgroup's keys, of K or V, with a tile of queries.
    FS_DEVICE void start_scores(typename Kernel::Scores& scores, int offset, uint32_t tile) {
        const uint64_t a =
            Panel::descriptor(opaque(smem) + offset + first_row() * Panel::kRowBytes);
        const uint64_t b = Panel::descriptor(opaque(tile));
        wgmma_fence(scores);
#pragma unroll
        for (int step = 0; step < Kernel::d_steps; ++step)
            Kernel::ScoresGemm::run(
                scores, a + Panel::template column_step<Kernel::B_c>(Kernel::keys_step(step)),
                b + Panel::template column_step<Kernel::B_r>(step), step > 0);
        wgmma_commit();
    }

    // gradient += P^T do, or dS^T q.
    FS_DEVICE void start_gradient(typename Kernel::Gradient& gradient, typename Kernel::Rounded& a,
                                  uint32_t tile) {
        const uint64_t b = Panel::descriptor(opaque(tile), Kernel::Q_panel_bytes);
        wgmma_fence(gradient, a);
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step)
            Kernel::GradientGemm::run(gradient, a[step], b + Panel::row_step(step), 1);
        wgmma_commit();
    }

    // This warpgroup's part of dQ = dS K.
    FS_DEVICE int part() const { return Kernel::takes_turns ? 0 : warpgroup; }
    FS_DEVICE void start_dq() {
        const int part = this->part();
        using KeysPanel = typename Kernel::KeysPanel;
        const uint32_t tile = stages.wait();
        const int row = Kernel::shares_rows ? part * kWarpgroupRows : 0;
        const uint64_t a = KeysPanel::descriptor(opaque(tile) + row * KeysPanel::kRowBytes);
        const uint64_t b = dq_columns_of_K(part);
        // What the first instruction is told to ignore; nothing of it lives from step to step.
        if constexpr (!kSumsBesideScores) zero(dq);
        wgmma_fence(dq);
#pragma unroll
        for (int step = 0; step < Kernel::key_steps; ++step)
            Kernel::dQGemm::run(dq, a + KeysPanel::template column_step<Kernel::B_r>(step),
                                b + Panel::row_step(step), step > 0);
        wgmma_commit();
    }
    // K's columns of a part.
    FS_DEVICE uint64_t dq_columns_of_K(int part) const {
        const uint32_t K = opaque(smem) + Kernel::K_offset;
        constexpr int kPanel = Kernel::KV_panel_bytes;
        if constexpr (Kernel::halves_a_panel)
            return Panel::descriptor(K + part * kPanel,
                                     part == 0 ? 2 * kPanel : kPanel + Panel::kRowBytes / 2);
        const int column = Kernel::shares_rows ? 0 : part * Kernel::dq_columns;
        return Panel::descriptor(
            K + column / Panel::kColumns * kPanel + column % Panel::kColumns * kElementBytes,
            kPanel);
    }
    // With so many products behind it in flight.
    template <int kBehind = 0>
    FS_DEVICE void finish_dq() {
        wgmma_wait<kBehind>(dq);
        stages.release(lane);
        advance_dq_sums();
        if constexpr (!kSumsBesideScores) add_dq();
    }
    FS_DEVICE void compute_dq() {
        start_dq();
        finish_dq();
        if constexpr (kSumsBesideScores) add_dq();
    }
    // Adds the last dq to its sums, if there was one, while another product runs. Without a branch
    // ptxas would move these instructions among the products, and serialise those.
    FS_DEVICE void add_dq() {
        if (CFG.ordered_dq ? dq_head < 0 : dq_block < blocks.begin) return;
        if constexpr (CFG.bulk_sums) return add_dq_by_tma();
        dQOrder<Kernel>{smem}.wait(warpgroup, odd_turns);
#pragma unroll
        for (int n = 0; n < Kernel::dq_columns / 8; ++n)
            add_global(dq_sums + n * Kernel::tile_sums,
                       float4{dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]});
        dQOrder<Kernel>{smem}.advance(part(), lane);
    }
    // A warp's part at once. `red` instructions wait for room in the queue to L2, and no lane goes
    // on before its registers are read.
    FS_DEVICE void add_dq_by_tma() {
        constexpr uint32_t kBytes = Kernel::warp_lanes * 16;
        const uint32_t place =
            smem + Kernel::sums_offset + (warpgroup * kWarpsPerWarpgroup + warp) * kBytes;
        if (lane == 0) tma_store_wait_read();  // for the last block's
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Kernel::dq_columns / 8; ++n)
            store_shared_16B(place + (n * kWarpSize + lane) * 16,
                             uint4{__float_as_uint(dq[0][n][0]), __float_as_uint(dq[0][n][1]),
                                   __float_as_uint(dq[0][n][2]), __float_as_uint(dq[0][n][3])});
        tma_store_fence();
        __syncwarp();
        if (lane != 0) return;
        bulk_add(dq_sums, place, kBytes);
        tma_store_commit();
    }

    // The sums of a block lie part by part: a warp adds 512 neighbouring bytes. They are one step
    // ahead.
    FS_DEVICE float* first_dq_sums(const Keys& keys) const {
        const int part = this->part();
        const int64_t step = CFG.ordered_dq ? args.statistics_head_stride : Kernel::B_r;
        return args.dq_sums + Kernel::first_dq_sum(keys.statistic(args, keys.first_step()) - step) +
               part * Kernel::part_sums + (warp * Kernel::warp_lanes + lane) * 4;
    }
    FS_DEVICE void advance_dq_sums() {
        constexpr int kBlock = Kernel::dq_block_floats;
        if constexpr (CFG.ordered_dq) {
            const int64_t head_sums = Kernel::first_dq_sum(args.statistics_head_stride);
            dq_sums += head_sums;
            if (++dq_head < n_heads) return;
            dq_head = 0;
            dq_sums += direction * kBlock - n_heads * head_sums;
            return;
        }
        dq_sums += kBlock;
        if (++dq_block < blocks.end) return;
        dq_block = blocks.begin;
        dq_sums += Kernel::first_dq_sum(args.statistics_head_stride) -
                   (blocks.end - blocks.begin) * int64_t{kBlock};
    }

    // Q of the step before.
    FS_DEVICE void release_last_Q() {
        const int stage = (Q.state.stage() + CFG.q_stages - 1) % CFG.q_stages;
        if (lane == 0) mbarrier_arrive(Q.barriers.empty(stage));
    }

    // ---- between the products ----

    // Where registers are left, the statistics are loaded under the product that is waited for. Its
    // instructions are in the queue before theirs, though: with early_rows those of so many tiles
    // of S come first, and with still more registers D's too.
    // A softcap leaves none: P lives beside S, and tanh takes some.
    static constexpr bool kRowsMayWait = kSumsBesideScores || !SEMANTICS.softcap;
    static constexpr bool kLoadsRowsEarly =
        kRowsMayWait &&
        Kernel::d_head + Kernel::B_r + Kernel::B_r / 4 + 24 <= CFG.consumer_registers;
    static constexpr int kTilesFirst = CFG.early_rows && kRowsMayWait ? 8 : 0;
    static constexpr bool kLoadsDFirst =
        CFG.early_rows && kRowsMayWait &&
        Kernel::d_head + Kernel::B_r + Kernel::B_r / 2 + 16 <= CFG.consumer_registers;
    template <int kBegin = 0, int kEnd = Kernel::B_r / 8>
    FS_DEVICE void load_rows(RowPairs& pairs, int offset, int stage) const {
#pragma unroll
        for (int n = kBegin; n < kEnd; ++n)
            pairs[n] = load_shared_float2(smem + offset + stage * Kernel::statistics_bytes +
                                          (8 * n + lane % 4 * 2) * 4);
    }

    // With a softcap S is no P any more.
    static constexpr bool kRoundsPEarly =
        CFG.order != StepOrder::scores_together || SEMANTICS.softcap;

    // S becomes P, with a softcap times 1 - tanh^2, the cap's own gradient; where a query does not
    // see a key, P is 0.
    FS_DEVICE void exponentiate() {
        RowPairs lse;
        load_rows(lse, Kernel::lse_offset, Q.state.stage());
        exponentiate(lse);
    }
    FS_DEVICE void exponentiate(const RowPairs& lse) {
        if constexpr (SEMANTICS.softcap) tanh_scaled(S, args.softcap_scale_2log2e);
        typename Kernel::Scores p;
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[0][n][e] = exp2_approx(
                    fmaf(S[0][n][e], args.scale_log2, e % 2 == 0 ? -lse[n].x : -lse[n].y));
        }
        if constexpr (Kernel::masked)
            if (blocks.needs_mask(block)) mask(p);
        if constexpr (kRoundsPEarly) round(P, p);
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                S[0][n][e] = SEMANTICS.softcap ? p[0][n][e] * fmaf(-S[0][n][e], S[0][n][e], 1.0f)
                                               : p[0][n][e];
    }

    // ptxas moves exponentials below a wait for wgmma, but not beyond the end of a basic block: a
    // branch that it cannot know to be never taken, on a NaN that no exponential is.
    FS_DEVICE void end_basic_block() {
        pin(S);
        if (__float_as_uint(S[0][Kernel::B_r / 8 - 1][3]) == 0x7fc12345u)
            asm volatile("nanosleep.u32 20;" ::: "memory");
    }

    // dP becomes dS = P (dP - D).
    FS_DEVICE void differentiate(const RowPairs& D) {
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dP[0][n][e] = S[0][n][e] * (dP[0][n][e] - (e % 2 == 0 ? D[n].x : D[n].y));
        }
        // Out of sight dP may be anything, NaN too.
        if constexpr (Kernel::masked)
            if (blocks.needs_mask(block)) mask(dP);
        if constexpr (!kRoundsPEarly) round(P, S);
        round(dS, dP);
    }

    FS_DEVICE static void round(typename Kernel::Rounded& rounded,
                                const typename Kernel::Scores& x) {
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step)
            pack_fragment<value_t>(rounded[step], x[0][2 * step], x[0][2 * step + 1]);
    }

    // Elements of keys that a query does not see, or of queries that there are not, become 0.
    FS_DEVICE void mask(typename Kernel::Scores& x) const {
        const int key = first_key + warp * kWarpRows + lane / 4;
        const int query = block * Kernel::B_r + lane % 4 * 2;
        if constexpr (SEMANTICS.mask != MaskKind::window) {
            // One comparison for an element, or two, with what follows from its place in the tile.
            constexpr int kFar = 1 << 30;
            int ahead[2];  // of the key in row r: how far the first query's last key is
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                ahead[r] = SEMANTICS.mask == MaskKind::causal
                               ? query + visibility.seq_k - visibility.seq_q - key - 8 * r
                               : kFar;
                if (SEMANTICS.uneven && key + 8 * r >= visibility.seq_k) ahead[r] = -kFar;
            }
            const int left = visibility.seq_q - query;
#pragma unroll
            for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = 8 * n + e % 2;
                    if (ahead[e / 2] < -i || (SEMANTICS.uneven && left <= i)) x[0][n][e] = 0.0f;
                }
            return;
        }
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                KeyRange seen = visibility.keys(query + 8 * n + i);
                if (SEMANTICS.uneven && query + 8 * n + i >= visibility.seq_q) seen.last = -1;
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (!seen.contains(key + 8 * r)) x[0][n][2 * r + i] = 0.0f;
            }
    }

    // This warpgroup's keys of dS, queries by keys, for all to read once committed: the fence takes
    // its time, and the next products need not wait for it.
    FS_DEVICE void store_dS() {
        if constexpr (!CFG.without_dq) {
            using KeysPanel = typename Kernel::KeysPanel;
            const uint32_t panel =
                stages.acquire() + first_row() / kWarpgroupRows * Kernel::dS_panel_bytes;
            const int query = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
            const uint32_t place = panel + KeysPanel::offset(query, chunk);
#pragma unroll
            for (int step = 0; step < Kernel::query_steps; ++step)
                stmatrix_x4_transposed(place + 16 * step * KeysPanel::kRowBytes, dS[step]);
        }
    }

    // Rows that see no key have no part in anything, whatever they hold: 0 times NaN were NaN.
    FS_DEVICE void clear_unseeing() const {
        if constexpr (SEMANTICS.mask == MaskKind::none) return;
        const int rows = min(visibility.first_seeing_row() - block * Kernel::B_r, Kernel::B_r);
        if (rows <= 0) return;
        mbarrier_wait(d_o.full(), d_o.state.phase());
        constexpr int kChunks = Kernel::d_head / 8;
        const int first = warpgroup * kWarpgroupThreads + warp * kWarpSize + lane;
        for (int i = first; i < rows * kChunks; i += Kernel::consumer_threads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const uint32_t place = chunk / Panel::kChunks * Kernel::Q_panel_bytes +
                                   Panel::offset(row, chunk % Panel::kChunks);
            store_shared_16B(Q.tile() + place, uint4{0, 0, 0, 0});
            store_shared_16B(d_o.tile() + place, uint4{0, 0, 0, 0});
        }
        tma_store_fence();
        // Roles have code of their own: two instructions, which PTX does not promise to be one
        // numbered barrier.
        if constexpr (CFG.split_roles)
            mbarrier_arrive_and_wait(smem + Kernel::rows_barrier);
        else
            named_barrier_wait(kRowsBarrier, Kernel::consumer_threads);
    }

    // ---- the end ----

    FS_DEVICE void store(void* gradient, const typename Kernel::Gradient& acc, float scale,
                         int64_t origin, int64_t seq_stride, const Keys& keys) const {
        if (gradient == nullptr) return;
        const int key = keys.first_key + first_row() + warp * kWarpRows;
        const int64_t element = origin + (keys.k.first + key) * seq_stride;
        store_gradient<value_t, CFG.wide_stores>(
            static_cast<char*>(gradient) + element * (args.grads_fp32 ? 4 : 2), seq_stride,
            keys.k.count - key, args.d, args.grads_fp32, acc, scale);
    }
};

}  // namespace flashsmith
