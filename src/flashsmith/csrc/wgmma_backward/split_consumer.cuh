// Consumer warpgroups that share 64 keys of a wide head, for which one has too few registers: the
// first keeps dv, the second dk.
//
// The first computes S and P, which it passes on in 16 bits, lane by lane; the second dP and dS.
// dQ = dS K is computed by both, half of its columns each. One buffer of P is enough, and one of
// dS: a step's P is stored when dQ of the step before is done, which waited for dS and so for P.
#pragma once

#include "wgmma_backward/consumer.cuh"

namespace flashsmith {

template <class Kernel>
struct SplitBackwardConsumer : BackwardConsumer<Kernel> {
    using Base = BackwardConsumer<Kernel>;
    using value_t = typename Kernel::value_t;
    using Base::advance_block, Base::args, Base::d_o, Base::dk, Base::dP, Base::dS, Base::dv,
        Base::lane, Base::P, Base::Q, Base::S, Base::smem, Base::warp;

    int P_phase = 0;

    using Base::Base;

    // ---- the algorithm ----

    FS_DEVICE void run() {
        const int n_steps = this->begin(block_index());
        if (this->warpgroup == 0)
            run_dv(n_steps);
        else
            run_dk(n_steps);
    }

    // No product is in flight where a loop begins, see BackwardConsumer.
    FS_DEVICE void run_dv(int n_steps) {
        zero(dv);
        if (n_steps > 0) {
            this->K.consumer_wait();
            compute_S();
#pragma unroll 1
            while (true) {
                this->exponentiate();
                Q.consumer_release(warp, lane);
                pass_P();
                d_o.consumer_wait();
                this->start_gradient(dv, P, d_o.tile());
                this->start_dq();
                wgmma_wait<1>(dv, P);
                d_o.consumer_release(warp, lane);
                this->finish_dq();
                this->add_dq();
                if (--n_steps == 0) break;
                advance_block();
                compute_S();
            }
        }
        // Again, rather than keep it in registers.
        const typename Base::Keys keys(args, block_index());
        this->store(args.dv, dv, 1.0f,
                    keys.batch * args.dv_batch_stride + keys.head_k * args.dv_head_stride,
                    args.dv_seq_stride, keys);
    }

    FS_DEVICE void run_dk(int n_steps) {
        zero(dk);
        if (n_steps > 0) {
            this->V.consumer_wait();
            this->K.consumer_wait();
            compute_dP();
#pragma unroll 1
            while (true) {
                take_P();
                this->compute_dS();
                this->stages.commit(lane);
                this->start_gradient(dk, dS, Q.tile());
                this->start_dq();
                wgmma_wait<1>(dk, dS);
                Q.consumer_release(warp, lane);
                this->finish_dq();
                this->add_dq();
                if (--n_steps == 0) break;
                advance_block();
                compute_dP();
            }
        }
        const typename Base::Keys keys(args, block_index());
        this->store(args.dk, dk, args.scale,
                    keys.batch * args.dk_batch_stride + keys.head_k * args.dk_head_stride,
                    args.dk_seq_stride, keys);
    }

    FS_DEVICE void compute_S() {
        this->await_queries();
        this->begin_S();
        wgmma_wait<0>(S);
    }
    // Q is waited for here: rows that see no key are cleared in it too.
    FS_DEVICE void compute_dP() {
        this->await_queries();
        d_o.consumer_wait();
        this->begin_dP();
        wgmma_wait<0>(dP);
    }

    // ---- P from one warpgroup to the other ----

    FS_DEVICE uint32_t place_of_P() const {
        return smem + Kernel::P_offset + (warp * kWarpSize + lane) * 16;
    }
    // What S holds now: with a softcap that is not P, see exponentiate().
    FS_DEVICE void pass_P() {
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step) {
            uint32_t capped[4];
            if constexpr (Base::SEMANTICS.softcap)
                pack_fragment<value_t>(capped, S[0][2 * step], S[0][2 * step + 1]);
            const auto& x = Base::SEMANTICS.softcap ? capped : P[step];
            store_shared_16B(place_of_P() + step * kWarpgroupThreads * 16,
                             uint4{x[0], x[1], x[2], x[3]});
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem + Kernel::P_barrier);
    }
    FS_DEVICE void take_P() {
        mbarrier_wait(smem + Kernel::P_barrier, P_phase);
        P_phase ^= 1;
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step) {
            const uint4 x = load_shared_16B(place_of_P() + step * kWarpgroupThreads * 16);
            const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = unpacked<value_t>(pairs[i]);
                S[0][2 * step + i / 2][i % 2 * 2] = p.x;
                S[0][2 * step + i / 2][i % 2 * 2 + 1] = p.y;
            }
        }
    }
};

}  // namespace flashsmith
