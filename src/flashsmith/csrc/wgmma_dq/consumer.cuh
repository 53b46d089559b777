// A consumer warpgroup: computes dq of its 64 queries.
//
// Scores are queries by keys. After rounding, the registers of dS are the operand of dq += dS K.
// Only Q, do, K and V go through shared memory. dq is summed in registers, in the order of the
// keys.
#pragma once

#include "backward/program_scores.cuh"
#include "backward/store_gradient.cuh"
#include "common/accumulators.cuh"
#include "common/opaque.cuh"
#include "common/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/warpgroup_order.cuh"
#include "wgmma_dq/query_block.cuh"

namespace flashsmith {

template <class Kernel>
struct DqConsumer : ProgramOfLaunch<Kernel::has_program> {
    static_assert(Kernel::valid_config());
    static constexpr WgmmaDqKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using value_t = typename Kernel::value_t;
    using Panel = typename Kernel::Panel;

    // ---- state ----

    const BackwardKernelArgs& args;
    const uint32_t smem;
    const QueryBlock<Kernel>& tile;
    const int warpgroup, warp, lane;
    const int row;     // this lane's first row in the sequence; its second is row + 8
    int block;         // current block of keys
    BlockEntry entry;  // with lists: its entry

    TilePipeline<CFG.k_stages, Kernel::K_tile_bytes> K;
    TilePipeline<CFG.v_stages, Kernel::V_tile_bytes> V;

    float lse[2], D[2];
    typename Kernel::Scores S, dP;
    typename Kernel::Rounded dS;
    typename Kernel::dQ_t dq;

    FS_DEVICE DqConsumer(const typename Kernel::Args& args, uint32_t smem,
                         const QueryBlock<Kernel>& tile, int warpgroup)
        : ProgramOfLaunch<Kernel::has_program>(args),
          args(args.problem),
          smem(smem),
          tile(tile),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          row(tile.first_row + warpgroup * kWarpgroupRows + warp * kWarpRows + lane / 4),
          block(tile.blocks.begin),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers) {}

    // ---- the algorithm ----

    FS_DEVICE void run() {
        zero(dq);
        const int n_steps = tile.n_steps();
        if constexpr (Kernel::has_program) lse[0] = lse[1] = 0.0f;
        if (n_steps > 0) {
            order().init();
            load_statistics();
            mbarrier_wait(smem + Kernel::Q_barrier, 0);
            if constexpr (CFG.late_dq)
                steps_with_late_dq(n_steps);
            else
                steps(n_steps);
        }
        store();
    }

    // Computes S and dP, then dS, then dq. This order needs the fewest registers.
    FS_DEVICE void steps(int n_steps) {
        mbarrier_wait(smem + Kernel::do_barrier, 0);
#pragma unroll 1
        for (; n_steps > 0; --n_steps) {
            await_keys();
            V.consumer_wait();
            order().wait();
            start_scores<Kernel::d_steps>(S, Kernel::Q_offset, K.tile());
            start_scores<Kernel::d_v_steps>(dP, Kernel::do_offset, V.tile());
            order().arrive();
            wgmma_wait<1>(S);
            exponentiate();
            wgmma_wait<0>(dP);
            V.consumer_release(warp, lane);
            compute_dS();
            order().wait();
            start_dq(K.tile());
            order().arrive();
            wgmma_wait<0>(dq, dS);
            K.consumer_release(warp, lane);
            advance_block();
        }
    }

    // In this order, the dq of a step overlaps the scores of the next step. No GEMM may be running
    // where the loop begins, because ptxas would then serialise all of them.
    FS_DEVICE void steps_with_late_dq(int n_steps) {
        await_keys();
        order().wait();
        start_scores<Kernel::d_steps>(S, Kernel::Q_offset, K.tile());
        mbarrier_wait(smem + Kernel::do_barrier, 0);
        V.consumer_wait();
        start_scores<Kernel::d_v_steps>(dP, Kernel::do_offset, V.tile());
        order().arrive();
        wgmma_wait<1>(S);
        exponentiate();
        wgmma_wait<0>(dP);
        V.consumer_release(warp, lane);
        compute_dS();
#pragma unroll 1
        while (--n_steps > 0) {
            const uint32_t last_K = K.tile(), last_empty = K.barriers.empty(K.state.stage());
            K.state.advance();
            advance_block();
            await_keys();
            V.consumer_wait();
            order().wait();
            start_scores<Kernel::d_steps>(S, Kernel::Q_offset, K.tile());
            start_dq(last_K);
            start_scores<Kernel::d_v_steps>(dP, Kernel::do_offset, V.tile());
            order().arrive();
            wgmma_wait<2>(S);
            exponentiate();
            wgmma_wait<1>(dq, dS);
            if (lane == 0) mbarrier_arrive(last_empty);
            wgmma_wait<0>(dP);
            V.consumer_release(warp, lane);
            compute_dS();
        }
        order().wait();
        start_dq(K.tile());
        order().arrive();
        wgmma_wait<0>(dq, dS);
    }

    // Waits until the next block of K has arrived.
    FS_DEVICE void await_keys() {
        K.consumer_wait();
        if constexpr (Kernel::has_lists) {
            // Only one lane reads the entry, so that it may release the stage afterwards.
            const int bits =
                lane == 0 ? load_shared_4B(smem + Kernel::K_entries + 4 * K.state.stage()) : 0;
            entry.bits = __shfl_sync(0xffffffffu, bits, 0);
            block = entry.block();
        }
    }
    FS_DEVICE void advance_block() {
        if constexpr (!Kernel::has_lists) ++block;  // otherwise it arrives with K
    }
    // Whether any element of the current block is masked.
    FS_DEVICE bool needs_mask() const {
        if constexpr (Kernel::has_lists) return !entry.is_full(2 * warpgroup);
        return tile.blocks.needs_mask(block);
    }

    FS_DEVICE WarpgroupOrder<CFG.n_warpgroups, CFG.pingpong> order() const { return {warpgroup}; }

    // ---- products ----

    // Multiplies this warpgroup's rows of Q or do by a tile of keys.
    template <int kSteps>
    FS_DEVICE void start_scores(typename Kernel::Scores& scores, int offset, uint32_t keys) {
        const uint64_t a = Panel::descriptor(opaque(smem) + offset +
                                             warpgroup * kWarpgroupRows * Panel::kRowBytes);
        const uint64_t b = Panel::descriptor(opaque(keys));
        wgmma_fence(scores);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Kernel::ScoresGemm::run(scores, a + Panel::template column_step<Kernel::B_r>(step),
                                    b + Panel::template column_step<Kernel::B_c>(step), step > 0);
        wgmma_commit();
    }

    // dq += dS K.
    FS_DEVICE void start_dq(uint32_t keys) {
        const uint64_t b = Panel::descriptor(opaque(keys), Kernel::KV_panel_bytes);
        wgmma_fence(dq, dS);
#pragma unroll
        for (int step = 0; step < Kernel::key_steps; ++step)
            Kernel::dQGemm::run(dq, dS[step], b + Panel::row_step(step), 1);
        wgmma_commit();
    }

    // ---- between the products ----

    // Rows past the last one have P = 0.
    FS_DEVICE void load_statistics() {
        const int64_t first = first_statistic<SEMANTICS>(args, tile.batch, tile.head, tile.q.first);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = !SEMANTICS.uneven || row + 8 * r < tile.q.count;
            lse[r] = exists ? args.lse_log2[first + row + 8 * r] : INFINITY;
            D[r] = exists ? args.D[first + row + 8 * r] : 0.0f;
        }
    }

    // S becomes P. With a softcap it becomes P times 1 - tanh^2, the gradient of the cap, and with
    // a score function also times its slope.
    FS_DEVICE void exponentiate() {
        change_scores<SEMANTICS>(S, args.score_argument);
#pragma unroll
        for (int n = 0; n < Kernel::B_c / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float score = S[0][n][e];
                // With a score function S becomes the function's slope.
                if constexpr (Kernel::has_program)
                    score = program().change(S[0][n][e], query_of_lane()(0, n, e),
                                             key_of_lane()(0, n, e));
                const float p = exp2_approx(fmaf(score, args.scale_log2, -lse[e / 2]));
                S[0][n][e] = BackwardProgram<SEMANTICS>::gradient(p, S[0][n][e]);
            }
    }

    FS_DEVICE BackwardProgram<SEMANTICS> program() const {
        return {this->program_args, tile.batch, tile.head, tile.q.count, tile.k.count};
    }
    FS_DEVICE auto query_of_lane() const {
        return [first = row](int, int, int e) { return program::Place{first, 8 * (e / 2)}; };
    }
    FS_DEVICE auto key_of_lane() const {
        const int first = block * Kernel::B_c + lane % 4 * 2;
        return [first](int, int n, int e) { return program::Place{first, 8 * n + e % 2}; };
    }

    // dS = P (dP - D), rounded. Masked elements of P and dP are undefined and may be NaN.
    FS_DEVICE void compute_dS() {
#pragma unroll
        for (int n = 0; n < Kernel::B_c / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dP[0][n][e] = S[0][n][e] * (dP[0][n][e] - D[e / 2]);
        if constexpr (Kernel::masked)
            if (needs_mask()) mask();
        if constexpr (SEMANTICS.program_masks)
            if (entry.needs_function(2 * warpgroup))
                program().hide(dP, query_of_lane(), key_of_lane());
#pragma unroll
        for (int step = 0; step < Kernel::key_steps; ++step)
            pack_fragment<value_t>(dS[step], dP[0][2 * step], dP[0][2 * step + 1]);
    }

    // Sets dS of keys that the row does not see to zero.
    FS_DEVICE void mask() {
        const auto seen = [&](int, int r) { return tile.key_mask.keys(row + 8 * r); };
        mask_keys<SEMANTICS>(dP, lane, block * Kernel::B_c, seen, 0.0f);
    }

    // ---- the end ----

    FS_DEVICE void store() {
        // If a key is NaN, the sums of rows that see no key are 0 times NaN, so they are replaced.
        const int unseeing = tile.key_mask.first_attending_row();
#pragma unroll
        for (int n = 0; n < Kernel::d_head / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if ((Kernel::has_program && lse[e / 2] == INFINITY) || row + e / 2 * 8 < unseeing)
                    dq[0][n][e] = 0.0f;
        const int first = row - lane / 4;
        const int64_t element = tile.batch * args.dq_batch_stride +
                                tile.head * args.dq_head_stride +
                                (tile.q.first + first) * args.dq_seq_stride;
        store_gradient<value_t>(static_cast<char*>(args.dq) + element * (args.grads_fp32 ? 4 : 2),
                                args.dq_seq_stride, tile.q.count - first, d_of_qk<Kernel>(args),
                                args.grads_fp32, dq, args.scale);
    }
};

}  // namespace flashsmith
