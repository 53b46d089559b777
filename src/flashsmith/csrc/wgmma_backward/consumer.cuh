// A consumer warpgroup: computes dk and dv of its 64 keys, and its part of dq for every block of
// queries.
//
// Scores are transposed: keys by queries. After rounding, the registers of P^T and dS^T are
// operands of dv += P^T do and dk += dS^T q. Only dS goes through shared memory, for dQ = dS K over
// all keys of the CTA. Each warpgroup adds its part of dQ to fp32 sums in global memory.
#pragma once

#include "wgmma_backward/dv_first.cuh"
#include "wgmma_backward/scores_together.cuh"

namespace flashsmith {

template <class Kernel>
struct BackwardConsumer : dQPart<Kernel> {
    using Base = dQPart<Kernel>;
    using Base::args, Base::begin, Base::dk, Base::dq, Base::dv, Base::K, Base::kSumsBesideScores,
        Base::lane, Base::order, Base::smem, Base::store, Base::warp;
    using typename Base::Keys;
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;

    using Base::Base;

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

    // Computes dk and dv for a block of keys.
    FS_DEVICE void compute(uint32_t number) {
        const int n_steps = begin(number);
        zero(dk);
        zero(dv);
        if constexpr (kSumsBesideScores && !CFG.without_dq) zero(dq);
        if (n_steps == 0) return;
        if constexpr (!CFG.persistent) K.consumer_wait();
        if constexpr (CFG.order == StepOrder::scores_together)
            ScoresTogether<Kernel>::steps(*this, n_steps);
        else if constexpr (CFG.order == StepOrder::dv_first)
            StepsWithDvFirst<Kernel, DvFirst>::steps(*this, n_steps);
        else if constexpr (CFG.order == StepOrder::late_dq)
            StepsWithDvFirst<Kernel, LateDq>::steps(*this, n_steps);
        else
            StepsWithDvFirst<Kernel, ScoresAhead>::steps(*this, n_steps);
    }

    FS_DEVICE void store_gradients(uint32_t number) const {
        const Keys keys(args, number);
        this->template store<false>(
            args.dk, dk, args.scale,
            keys.batch * args.dk_batch_stride + keys.head_k * args.dk_head_stride,
            args.dk_seq_stride, keys);
        this->template store<true>(
            args.dv, dv, 1.0f,
            keys.batch * args.dv_batch_stride + keys.head_k * args.dv_head_stride,
            args.dv_seq_stride, keys);
    }
};

}  // namespace flashsmith
