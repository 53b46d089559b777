// The producer: one thread that copies K and V once, and Q and do with their rows' statistics step
// by step.
#pragma once

#include "wgmma/pipeline.cuh"
#include "wgmma/tma.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

// `bytes` that lie side by side, counted by an mbarrier.
FS_DEVICE void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(smem),
        "l"(gmem), "r"(bytes), "r"(barrier)
        : "memory");
}

template <class Kernel>
struct BackwardProducer {
    static constexpr HopperBackwardKernelConfig CFG = Kernel::CFG;
    static constexpr bool kPacked = Kernel::SEMANTICS.packed;

    const HopperBackwardKernelArgs& args;
    const uint32_t smem;
    const KeyBlock<Kernel>& keys;
    TilePipeline<CFG.q_stages, Kernel::Q_tile_bytes> Q;
    TilePipeline<CFG.do_stages, Kernel::Q_tile_bytes> d_o;

    FS_DEVICE BackwardProducer(const HopperBackwardKernelArgs& args, uint32_t smem,
                               const KeyBlock<Kernel>& keys)
        : args(args),
          smem(smem),
          keys(keys),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          d_o(smem + Kernel::do_offset, smem + Kernel::do_barriers) {}

    FS_DEVICE void run() {
        const int n_steps = keys.n_steps();
        if (n_steps == 0) return;
        load_keys(Kernel::K_offset, &args.k, smem + Kernel::K_barrier);
        auto step = keys.first_step();
        for (int i = 0; i < n_steps; ++i) {
            load_queries(Q, &args.q, step, Kernel::lse_offset, args.problem.lse_log2);
            if (i == 0) load_keys(Kernel::V_offset, &args.v, smem + Kernel::V_barrier);
            load_queries(d_o, &args.d_o, step, Kernel::D_offset, args.problem.D);
            keys.advance(step);
        }
    }

  private:
    FS_DEVICE void load_keys(int offset, const TensorMap* map, uint32_t barrier) {
        mbarrier_arrive_expect(barrier, Kernel::KV_tile_bytes);
        load_panels<true>(smem + offset, map,
                          box_of_rows<kPacked>(keys.first_key, keys.k.first, keys.k.count,
                                               keys.head_k, keys.batch),
                          barrier);
    }

    template <class Pipeline, class Step>
    FS_DEVICE void load_queries(Pipeline& pipeline, const TensorMap* map, const Step& step,
                                int statistics_offset, const float* statistics) {
        pipeline.producer_wait();
        const uint32_t full = pipeline.full();
        mbarrier_arrive_expect(full, Kernel::Q_tile_bytes + Kernel::statistics_bytes);
        load_panels<false>(pipeline.tile(), map,
                           box_of_rows<kPacked>(step.block * Kernel::B_r, keys.q.first,
                                                keys.q.count, step.head, keys.batch),
                           full);
        bulk_load(smem + statistics_offset + pipeline.state.stage() * Kernel::statistics_bytes,
                  statistics + keys.statistic(args.problem, step), Kernel::statistics_bytes, full);
        pipeline.state.advance();
    }

    template <bool kOfKeys>
    FS_DEVICE void load_panels(uint32_t tile, const TensorMap* map, TmaBox<kPacked> box,
                               uint32_t full) {
#pragma unroll
        for (int p = 0; p < Kernel::n_panels; ++p) {
            box.column = p * Kernel::Panel::kColumns;
            tma_load(tile + (kOfKeys ? Kernel::place_of_panel(p) * Kernel::KV_panel_bytes
                                     : p * Kernel::Q_panel_bytes),
                     map, box, full);
        }
    }
};

}  // namespace flashsmith
