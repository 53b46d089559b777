// Two consumer warpgroups share 64 keys, if the head is so wide that one would have too few
// registers. The first one sums dv, the second one dk.
//
// The first one computes S and P, and passes P to the second in fp32, lane by lane. The second one
// computes dP and dS. (If dS were computed from a 16-bit P, it would be rounded twice.) Each
// computes one half of the columns of dQ = dS K.
//
// With shared_dq, two CTAs of a cluster have neighbouring keys, and half of the columns of dQ each,
// to which both blocks of keys contribute. So half as many numbers are added in global memory. Each
// CTA sends its dS to the other one; see dSSender. The first warpgroup computes the first half of
// the CTA's columns, and the second one the other half.
//
// With cta_pair, two CTAs do this for the same keys, each with half of the columns. S and dP are
// sums over all columns, so the CTAs exchange their parts; see PeerScores.
#pragma once

#include "wgmma_backward/dq_part.cuh"
#include "wgmma_backward/peer_scores.cuh"

namespace flashsmith {

template <class Kernel>
struct SplitBackwardConsumer : dQPart<Kernel> {
    using Base = dQPart<Kernel>;
    using value_t = typename Kernel::value_t;
    using Base::advance_block, Base::args, Base::d_o, Base::dP, Base::dS, Base::lane, Base::P,
        Base::Q, Base::S, Base::smem, Base::warp, Base::warpgroup;

    using Base::Base;
    static constexpr bool kShared = Base::CFG.shared_dq;

    FS_DEVICE static void init(uint32_t smem) {
        const PipelineBarriers barriers{smem + Kernel::P_barriers};
        mbarrier_init(barriers.full(0), kWarpsPerWarpgroup);
        mbarrier_init(barriers.empty(0), kWarpsPerWarpgroup);
        if constexpr (Base::CFG.cta_pair) PeerScores<Kernel>::init(smem);
        if constexpr (Kernel::zeroes_rows)
            mbarrier_init(smem + Kernel::rows_barrier, Kernel::consumer_threads);
    }
    FS_DEVICE PipelineBarriers P_barriers() const { return {smem + Kernel::P_barriers}; }

    // dv and dk share one accumulator: with two, the compiler would keep both live where the code
    // of the two roles joins.
    FS_DEVICE typename Kernel::Gradient& gradient() { return this->dk; }
    FS_DEVICE typename Kernel::GradientOfV& gradient_of_v() {
        return reinterpret_cast<typename Kernel::GradientOfV&>(this->dk);
    }
    template <bool kOfV>
    FS_DEVICE auto& gradient_of_role() {
        if constexpr (kOfV && Kernel::is_pair)
            return gradient_of_v();
        else
            return gradient();
    }

    // ---- the algorithm ----

    FS_DEVICE void run() {
        const int n_steps = this->begin(key_block_of_cta<Kernel>());
        zero(gradient());
        if (n_steps > 0) {
            this->K.consumer_wait();
            if (warpgroup == 0) {
                compute<true>(n_steps);
            } else {
                this->V.consumer_wait();
                compute<false>(n_steps);
            }
        }
        // Computed again, and not kept in registers.
        const typename Base::Keys keys(args, key_block_of_cta<Kernel>());
        if (warpgroup == 0)
            this->template store<true>(
                args.dv, gradient_of_role<true>(), 1.0f,
                keys.batch * args.dv_batch_stride + keys.head_k * args.dv_head_stride,
                args.dv_seq_stride, keys);
        else
            this->template store<false>(
                args.dk, gradient(), args.scale,
                keys.batch * args.dk_batch_stride + keys.head_k * args.dk_head_stride,
                args.dk_seq_stride, keys);
    }

    // Both roles use this order. Adding to the sums of dq in global memory takes as long as all
    // GEMMs of a step. So each half of a warpgroup's columns is added during another GEMM. The dq
    // that is added is the previous step's, so that no warpgroup waits for dS. No GEMM may be
    // running where the loop begins; see dv_first.cuh.
    template <bool kOfV>
    FS_DEVICE void compute(int n_steps) {
        step<kOfV, false>();
#pragma unroll 1
        while (--n_steps > 0) {
            advance_block();
            step<kOfV, !Base::CFG.without_dq>();
        }
        if constexpr (kShared) {
            start_shared_dq<kOfV>();
            finish_dq<kOfV ? 0 : 1, 0>();
        } else if constexpr (!Base::CFG.without_dq) {
            start_dq<0>();
            finish_dq<0, 0>();
            start_dq<1>();
            finish_dq<1, 0>();
        }
    }

    // With shared_dq, the other CTA's dS has nearly a step to arrive.
    template <bool kOfV, bool kWithdQ>
    FS_DEVICE void step() {
        constexpr bool kWithHalf = kWithdQ && !kShared;
        if constexpr (kWithHalf) start_dq<0>();
        this->await_queries();
        if constexpr (!kOfV) d_o.consumer_wait();
        typename Base::RowPairs rows;
        if constexpr (Base::CFG.early_rows) load_rows<kOfV>(rows);
        if constexpr (kOfV) {
            this->begin_S();
        } else {
            this->begin_dP();
        }
        if constexpr (kWithHalf) finish_dq<0, 1>();
        if constexpr (kOfV) {
            wgmma_wait<0>(S);
            add_peer_scores<kOfV>(S);
            if constexpr (!Base::CFG.early_rows) load_rows<kOfV>(rows);
            this->exponentiate(rows);
            __syncwarp();  // all lanes have read their rows' statistics
            Q.consumer_release(warp, lane);
            send_P();
            d_o.consumer_wait();
            add_product<kOfV, kWithdQ>(P, d_o);
        } else {
            wgmma_wait<0>(dP);
            add_peer_scores<kOfV>(dP);
            receive_P();
            if constexpr (!Base::CFG.early_rows) load_rows<kOfV>(rows);
            this->finish_dS(rows);
            add_product<kOfV, kWithdQ>(dS, Q);
        }
    }

    // Loads the lse or the D of the rows of a step.
    template <bool kOfV>
    FS_DEVICE void load_rows(typename Base::RowPairs& rows) const {
        if constexpr (kOfV)
            Base::load_rows(rows, Kernel::lse_offset, Q.state.stage());
        else
            Base::load_rows(rows, Kernel::D_offset, d_o.state.stage());
    }

    // dv += P^T do, or dk += dS^T q.
    template <bool kOfV, bool kWithdQ, class Pipeline>
    FS_DEVICE void add_product(typename Kernel::Rounded& a, Pipeline& tiles) {
        constexpr int kHalf = kShared && kOfV ? 0 : 1;
        if constexpr (kWithdQ && kShared) start_shared_dq<kOfV>();
        if constexpr (kWithdQ && !kShared) start_dq<1>();
        this->start_gradient(gradient_of_role<kOfV>(), a, tiles.tile());
        if constexpr (!kOfV) this->stages.commit(lane);
        if constexpr (kWithdQ) finish_dq<kHalf, 1>();
        wgmma_wait<0>(gradient_of_role<kOfV>(), a);
        tiles.consumer_release(warp, lane);
    }

    // ---- dQ ----

    // The columns of a warpgroup: one panel, followed by the columns after it, in the order in
    // which sums are stored.
    static constexpr int kColumns[2] = {Kernel::Panel::kColumns,
                                        Kernel::dq_columns - Kernel::Panel::kColumns};
    float dq_0[1][kColumns[0] / 8][4], dq_1[1][kColumns[1] / 8][4];

    template <int kHalf>
    FS_DEVICE auto& half() {
        if constexpr (kHalf == 0)
            return dq_0;
        else
            return dq_1;
    }

    template <int kHalf>
    FS_DEVICE void start_dq() {
        using Panel = typename Kernel::Panel;
        using KeysPanel = typename Kernel::KeysPanel;
        constexpr int kPanels = Kernel::dq_columns / kColumns[0];
        if constexpr (kHalf == 0) this->advance_dq_sums();
        const uint32_t tile =
            kHalf == 0 ? this->stages.wait() : this->stages.tile(this->stages.read.stage());
        if constexpr (Kernel::has_lists && kHalf == 0) this->find_dq_sums();
        uint32_t keys = opaque(smem) + Kernel::K_offset;
        if constexpr (Kernel::halves_a_panel && kHalf == 1)
            keys += 2 * Kernel::KV_panel_bytes + warpgroup * Panel::kRowBytes / 2;
        else
            keys += (warpgroup * kPanels + kHalf) * Kernel::KV_panel_bytes;
        const uint64_t a = KeysPanel::descriptor(opaque(tile)), b = Panel::descriptor(keys);
        wgmma_fence(half<kHalf>());
#pragma unroll
        for (int k = 0; k < Kernel::key_steps; ++k)
            Wgmma<value_t, kColumns[kHalf], true>::run(
                half<kHalf>(), a + KeysPanel::template column_step<Kernel::B_r>(k),
                b + Panel::row_step(k), k > 0);
        wgmma_commit();
    }
    // With shared_dq: the columns of a warpgroup, for the keys of both CTAs.
    template <bool kOfV>
    FS_DEVICE void start_shared_dq() {
        using Panel = typename Kernel::Panel;
        using KeysPanel = typename Kernel::KeysPanel;
        constexpr int kHalf = kOfV ? 0 : 1;
        constexpr bool kHalvesPanel = Kernel::halves_a_panel && kHalf == 1;
        this->advance_dq_sums();
        const int rank = this->part();
        const uint32_t tile = opaque(this->stages.wait());
        const uint32_t in_panel = kHalvesPanel ? rank * Panel::kRowBytes / 2 : 0;
        const uint32_t keys = opaque(smem) + in_panel;
        wgmma_fence(half<kHalf>());
#pragma unroll
        for (int of_peer = 0; of_peer < 2; ++of_peer) {
            const int panel = Kernel::place_of_panel(Kernel::dq_panel(rank, kHalf));
            const uint64_t a = KeysPanel::descriptor(tile + of_peer * Kernel::dS_panel_bytes);
            const uint64_t b = Panel::descriptor(
                keys + (of_peer ? Kernel::peer_K_offset + kHalf * Kernel::KV_panel_bytes
                                : Kernel::K_offset + panel * Kernel::KV_panel_bytes));
#pragma unroll
            for (int k = 0; k < Kernel::key_steps; ++k)
                Wgmma<value_t, kColumns[kHalf], true>::run(
                    half<kHalf>(), a + KeysPanel::template column_step<Kernel::B_r>(k),
                    b + Panel::row_step(k), of_peer + k > 0);
        }
        wgmma_commit();
    }
    // `kBehind` is how many later GEMMs are still running.
    template <int kHalf, int kBehind>
    FS_DEVICE void finish_dq() {
        wgmma_wait<kBehind>(half<kHalf>());
        if constexpr (kHalf == 1 || kShared) this->stages.release(lane);
        float* const sums = this->dq_sums + kHalf * kColumns[0] / 8 * kWarpgroupThreads * 4;
        const dQOrder<Kernel> dq_order{smem};
        // Each half has a turn in each step; the parity is the same.
        uint32_t odd_turns = this->odd_turns;
        dq_order.wait(kHalf, odd_turns);
        if constexpr (kHalf == 1 || kShared) this->odd_turns = odd_turns;
#pragma unroll
        for (int n = 0; n < kColumns[kHalf] / 8; ++n) {
            const auto& x = half<kHalf>()[0][n];
            add_global(sums + n * kWarpgroupThreads * 4, float4{x[0], x[1], x[2], x[3]});
        }
        dq_order.advance(kHalf, lane);
    }

    // ---- scores of the other CTA's columns ----

    template <bool kOfV>
    FS_DEVICE void add_peer_scores(typename Kernel::Scores& scores) const {
        if constexpr (Base::CFG.cta_pair)
            PeerScores<Kernel>{smem, kOfV ? 0 : 1, P_phase()}.exchange(scores, warp, lane);
    }

    // ---- P from one warpgroup to the other ----

    FS_DEVICE uint32_t address_of_P(int n) const {
        return smem + Kernel::P_offset + (n * kWarpgroupThreads + warp * kWarpSize + lane) * 16;
    }
    // Whether the number of finished steps is odd. It is derived from the pipeline of do, because
    // ptxas has no register left.
    FS_DEVICE uint32_t P_phase() const {
        return (d_o.state.phase() * Base::CFG.do_stages + d_o.state.stage()) % 2;
    }
    // Sends the contents of S. With a softcap S is not P; see exponentiate().
    FS_DEVICE void send_P() {
        mbarrier_wait(P_barriers().empty(0), P_phase() ^ 1);
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n)
            store_shared_16B(address_of_P(n),
                             uint4{__float_as_uint(S[0][n][0]), __float_as_uint(S[0][n][1]),
                                   __float_as_uint(S[0][n][2]), __float_as_uint(S[0][n][3])});
        __syncwarp();
        if (lane == 0) mbarrier_arrive(P_barriers().full(0));
    }
    FS_DEVICE void receive_P() {
        mbarrier_wait(P_barriers().full(0), P_phase());
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n) {
            const uint4 x = load_shared_16B(address_of_P(n));
            S[0][n][0] = __uint_as_float(x.x);
            S[0][n][1] = __uint_as_float(x.y);
            S[0][n][2] = __uint_as_float(x.z);
            S[0][n][3] = __uint_as_float(x.w);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(P_barriers().empty(0));
    }
};

}  // namespace flashsmith
