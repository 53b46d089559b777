// The order scores_together of a step.
#pragma once

#include "wgmma_backward/dq_part.cuh"

namespace flashsmith {

// S and dP, P and dS, then dv, dk and dq. It needs the fewest registers.
template <class Kernel>
struct ScoresTogether {
    using Consumer = dQPart<Kernel>;

    FS_DEVICE static void steps(Consumer& c, int n_steps) {
        c.V.consumer_wait();
        if constexpr (Consumer::CFG.lagged_dq) {
            step<false>(c);
            --n_steps;
        }
#pragma unroll 1
        for (; n_steps > 0; --n_steps) step<!Consumer::CFG.without_dq>(c);
        if constexpr (Consumer::CFG.persistent) c.V.consumer_release(c.warp, c.lane);
        if constexpr (Consumer::kAddsBetween) c.add_dq();
        if constexpr (Consumer::CFG.lagged_dq) {
            if constexpr (Kernel::alternates_dq) {
                c.alternate_dq();
            } else {
                c.compute_dq();
            }
        }
    }

    template <bool kWithdQ>
    FS_DEVICE static void step(Consumer& c) {
        constexpr bool kBeside = kWithdQ && !Kernel::alternates_dq;
        c.await_queries();
        c.d_o.consumer_wait();
        typename Consumer::RowPairs lse, D;
        if constexpr (Consumer::kTilesFirst > 0)
            c.template load_rows<0, Consumer::kTilesFirst>(lse, Kernel::lse_offset,
                                                           c.Q.state.stage());
        if constexpr (Consumer::kLoadsDFirst) c.load_rows(D, Kernel::D_offset, c.d_o.state.stage());
        c.order.wait();
        c.begin_S();
        if constexpr (Consumer::kAddsBetween) c.add_dq();
        c.begin_dP();
        c.order.arrive();
        if constexpr (Consumer::kLoadsRowsEarly)
            c.template load_rows<Consumer::kTilesFirst>(lse, Kernel::lse_offset, c.Q.state.stage());
        wgmma_wait<1>(c.S);
        if constexpr (!Consumer::kLoadsRowsEarly)
            c.template load_rows<Consumer::kTilesFirst>(lse, Kernel::lse_offset, c.Q.state.stage());
        c.exponentiate(lse);
        if constexpr (Consumer::CFG.early_exp) c.pin_exponentials();
        if constexpr (Consumer::kLoadsRowsEarly && !Consumer::kLoadsDFirst)
            c.load_rows(D, Kernel::D_offset, c.d_o.state.stage());
        wgmma_wait<0>(c.dP);
        if constexpr (!Consumer::kLoadsRowsEarly && !Consumer::kLoadsDFirst)
            c.load_rows(D, Kernel::D_offset, c.d_o.state.stage());
        c.compute_dS(D);
        c.store_dS();
        c.order.wait();
        c.start_gradient(c.dv, c.P, c.d_o.tile());
        if constexpr (kBeside && Consumer::kdQBeforedk) c.start_dq();
        c.start_gradient(c.dk, c.dS, c.Q.tile());
        c.order.arrive();
        c.stages.commit(c.lane);
        if constexpr (kBeside && !Consumer::kdQBeforedk) c.start_dq();
        wgmma_wait<kBeside ? 2 : 1>(c.dv, c.P);
        c.d_o.consumer_release(c.warp, c.lane);
        if constexpr (kBeside && Consumer::kdQBeforedk) c.template finish_dq<1>();
        wgmma_wait<kBeside && !Consumer::kdQBeforedk ? 1 : 0>(c.dk, c.dS);
        c.Q.consumer_release(c.warp, c.lane);
        if constexpr (kBeside && !Consumer::kdQBeforedk) c.finish_dq();
        if constexpr (kWithdQ && Kernel::alternates_dq) c.alternate_dq();
        c.advance_block();
    }
};

}  // namespace flashsmith
