// The three orders of GEMMs in a step that compute dv before dk: dv_first, late_dq and
// scores_ahead. They begin and end in the same way. A step goes from one dP to the next.
#pragma once

#include "wgmma_backward/dq_part.cuh"

namespace flashsmith {

// Computes dv from P, and then dP. The GEMM of dv comes first, so that the registers of P are free
// for dS when dP is computed.
template <class Consumer>
FS_DEVICE void compute_dv_and_dP(Consumer& c) {
    c.d_o.consumer_wait();
    c.order.wait();
    c.start_gradient(c.dv, c.P, c.d_o.tile());
    if constexpr (Consumer::kSumsBesideScores) c.add_dq();
    c.begin_dP();
    c.order.arrive();
    wgmma_wait<0>(c.dP, c.dv, c.P);
}

// S, then dv and dP, then dk and dq.
struct DvFirst {
    template <bool kWithdQ, class Consumer>
    FS_DEVICE static void step(Consumer& c) {
        c.finish_dS();
        c.order.wait();
        c.start_gradient(c.dk, c.dS, c.Q.tile());
        c.order.arrive();
        c.stages.commit(c.lane);
        if constexpr (kWithdQ) c.start_dq();
        wgmma_wait<kWithdQ ? 1 : 0>(c.dk, c.dS);
        c.Q.consumer_release(c.warp, c.lane);
        if constexpr (kWithdQ) c.finish_dq();
        c.advance_block();
        c.await_queries();
        c.begin_S();
        wgmma_wait<0>(c.S);
        c.exponentiate();
        compute_dv_and_dP(c);
    }
};

// Like DvFirst, but dq overlaps the exponentials of the next step.
struct LateDq {
    template <bool kWithdQ, class Consumer>
    FS_DEVICE static void step(Consumer& c) {
        c.finish_dS();
        const uint32_t last_Q = c.Q.tile();
        c.advance_block();
        c.Q.state.advance();
        c.await_queries();
        c.order.wait();
        c.start_gradient(c.dk, c.dS, last_Q);
        c.begin_S();
        c.order.arrive();
        c.stages.commit(c.lane);
        if constexpr (kWithdQ) c.start_dq();
        wgmma_wait<kWithdQ ? 1 : 0>(c.S, c.dk, c.dS);
        c.release_last_Q();
        c.exponentiate();
        if constexpr (Consumer::CFG.early_exp) c.pin_exponentials();
        if constexpr (kWithdQ && !Consumer::kdQBeforedk) c.finish_dq();
        compute_dv_and_dP(c);
    }
};

// Like LateDq, but S of the next step also comes before dk.
struct ScoresAhead {
    template <bool kWithdQ, class Consumer>
    FS_DEVICE static void step(Consumer& c) {
        c.finish_dS();
        const uint32_t last_Q = c.Q.tile();
        c.advance_block();
        c.Q.state.advance();
        c.await_queries();
        c.order.wait();
        c.begin_S();
        if constexpr (kWithdQ && Consumer::kdQBeforedk) c.start_dq();
        c.start_gradient(c.dk, c.dS, last_Q);
        c.order.arrive();
        c.stages.commit(c.lane);
        if constexpr (kWithdQ && !Consumer::kdQBeforedk) c.start_dq();
        wgmma_wait<kWithdQ ? 2 : 1>(c.S);
        c.exponentiate();
        if constexpr (Consumer::CFG.early_exp) c.pin_exponentials();
        if constexpr (kWithdQ && Consumer::kdQBeforedk) c.template finish_dq<1>();
        wgmma_wait<kWithdQ && !Consumer::kdQBeforedk ? 1 : 0>(c.dk, c.dS);
        c.release_last_Q();
        if constexpr (kWithdQ && !Consumer::kdQBeforedk) c.finish_dq();
        compute_dv_and_dP(c);
    }
};

template <class Kernel, class Order>
struct StepsWithDvFirst {
    using Consumer = dQPart<Kernel>;

    // S, P, then dv and dP, dS, then dk and dq. No GEMM may be running where the loop begins,
    // because ptxas would then serialise all of them.
    FS_DEVICE static void steps(Consumer& c, int n_steps) {
        c.await_queries();
        c.begin_S();
        wgmma_wait<0>(c.S);
        c.exponentiate();
        c.V.consumer_wait();
        compute_dv_and_dP(c);
        const bool skips_dq = Consumer::CFG.lagged_dq && n_steps > 1;
        if (skips_dq) {
            Order::template step<false>(c);
            --n_steps;
        }
#pragma unroll 1
        while (--n_steps > 0) Order::template step<true>(c);
        if constexpr (Consumer::CFG.persistent) c.V.consumer_release(c.warp, c.lane);
        c.finish_dS();
        c.order.wait();
        c.start_gradient(c.dk, c.dS, c.Q.tile());
        c.order.arrive();
        c.stages.commit(c.lane);
        if constexpr (Consumer::CFG.lagged_dq) {
            wgmma_wait<0>(c.dk, c.dS);
            if (skips_dq) c.compute_dq();
        }
        c.compute_dq();
        wgmma_wait<0>(c.dk, c.dS);
        if constexpr (Consumer::CFG.persistent) c.Q.consumer_release(c.warp, c.lane);
    }
};

}  // namespace flashsmith
