// The producer: one thread that copies K and V once, and in every step Q and do with the statistics
// of their rows.
#pragma once

#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "wgmma_backward/listed_steps.cuh"

namespace flashsmith {

// Copies `bytes` contiguous bytes; an mbarrier counts them.
FS_DEVICE void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(smem),
        "l"(gmem), "r"(bytes), "r"(barrier)
        : "memory");
}

template <class Kernel>
struct BackwardProducer {
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;
    static constexpr bool kPacked = Kernel::SEMANTICS.packed;

    const typename Kernel::Args& args;
    const uint32_t smem;
    TilePipeline<1, Kernel::K_tile_bytes> K;
    TilePipeline<1, Kernel::V_tile_bytes> V;
    typename Kernel::QPipeline Q;
    typename Kernel::DoPipeline d_o;

    FS_DEVICE BackwardProducer(const typename Kernel::Args& args, uint32_t smem)
        : args(args),
          smem(smem),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          d_o(smem + Kernel::do_offset, smem + Kernel::do_barriers) {}

    FS_DEVICE void run() {
        uint32_t number = key_block_of_cta<Kernel>();
        if constexpr (!CFG.persistent) {
            load(number);
        } else {
            while (number < args.n_key_blocks) {
                const uint32_t given = load(number);
                // Each CTA requests blocks until none is left, so n_key_blocks requests are made in
                // total. The last of them resets the counter.
                if (given == args.n_key_blocks - 1) atomicExch(args.key_block_counter, 0);
                number = gridDim.x + given;
            }
            send_number(kNoKeyBlock);
            mbarrier_arrive(K.full());
        }
    }

  private:
    // Loads everything for one block of keys. A persistent CTA also requests its next block here;
    // the result is the value of the counter. The request takes some time, but if it came too
    // early, a CTA could have two blocks while others have none.
    FS_DEVICE uint32_t load(uint32_t number) {
        if constexpr (Kernel::has_lists) return load_listed(number);
        const KeyBlock<Kernel> keys(args.problem, number);
        if (CFG.persistent && !keys.exists()) return request();
        int n_steps = keys.n_steps();
        uint32_t next = 0;
        if (CFG.persistent && n_steps == 0) {
            next = request();
            send_number(number);
            mbarrier_arrive(K.full());
            K.state.advance();
        }
        if (n_steps == 0) return next;
        auto step = keys.first_step();
        if (n_steps == 1) next = request();
        load_Q(keys, step);
        if constexpr (CFG.persistent) send_number(number);
        load_keys<false>(K, &args.k, keys);
        load_do(keys, step);
        load_keys<true>(V, &args.v, keys);
#pragma unroll 1
        while (--n_steps > 0) {
            keys.advance(step);
            if (n_steps == 1) next = request();
            load_Q(keys, step);
            load_do(keys, step);
        }
        return next;
    }

    // Loads everything for a block of keys whose lists name the blocks of queries to visit.
    FS_DEVICE uint32_t load_listed(uint32_t number) {
        const KeyBlock<Kernel> keys(args.problem, number);
        if (CFG.persistent && !keys.exists()) return request();
        ListedSteps<Kernel> steps(args, keys);
        int n_steps = steps.n_steps();
        uint32_t next = 0;
        if (n_steps == 0) {
            if constexpr (CFG.persistent) {
                next = request();
                send_number(number);
                mbarrier_arrive(K.full());
                K.state.advance();
            }
            return next;
        }
        steps.begin();
        if (n_steps == 1) next = request();
        load_Q(keys, steps.now);
        if constexpr (CFG.persistent) send_number(number);
        load_keys<false>(K, &args.k, keys);
        load_do(keys, steps.now);
        load_keys<true>(V, &args.v, keys);
#pragma unroll 1
        while (--n_steps > 0) {
            steps.advance();
            if (n_steps == 1) next = request();
            load_Q(keys, steps.now);
            load_do(keys, steps.now);
        }
        return next;
    }
    FS_DEVICE void load_Q(const KeyBlock<Kernel>& keys, const ListedStep& step) {
        // The entry is in shared memory before Q's full barrier completes.
        Q.producer_wait();
        step.store(smem + Kernel::Q_entries + 8 * Q.state.stage());
        load_Q(keys, keys.step_of(step));
    }
    FS_DEVICE void load_do(const KeyBlock<Kernel>& keys, const ListedStep& step) {
        load_do(keys, keys.step_of(step));
    }

    FS_DEVICE uint32_t request() const {
        return CFG.persistent ? atomicAdd(args.key_block_counter, 1) : 0;
    }

    template <class Step>
    FS_DEVICE void load_Q(const KeyBlock<Kernel>& keys, const Step& step) {
        load_queries<false>(Q, &args.q, keys, step, Kernel::lse_offset, args.problem.lse_log2);
    }
    template <class Step>
    FS_DEVICE void load_do(const KeyBlock<Kernel>& keys, const Step& step) {
        load_queries<true>(d_o, &args.d_o, keys, step, Kernel::D_offset, args.problem.D);
    }

    // The full barrier of K makes the number visible to the consumers, which read it before they
    // release K.
    FS_DEVICE void send_number(uint32_t number) {
        K.producer_wait();
        store_shared_16B(smem + Kernel::number_offset, {number, 0, 0, 0});
    }

    template <bool kOfV, class Pipeline>
    FS_DEVICE void load_keys(Pipeline& pipeline, const TensorMap* map,
                             const KeyBlock<Kernel>& keys) {
        pipeline.producer_wait();
        mbarrier_arrive_expect(pipeline.full(),
                               Pipeline::kBytes + (kOfV ? 0 : Kernel::peer_K_bytes));
        load_panels<true, kOfV>(pipeline.tile(), map,
                                box_of_rows<kPacked>(keys.first_key, keys.k.first, keys.k.count,
                                                     keys.head_k, keys.batch),
                                pipeline.full());
        if constexpr (CFG.shared_dq && !kOfV) load_peer_keys(keys, pipeline.full());
        pipeline.state.advance();
    }

    // With shared_dq: loads the other CTA's keys, in the panels that have this CTA's columns of dq.
    FS_DEVICE void load_peer_keys(const KeyBlock<Kernel>& keys, uint32_t full) {
        const int rank = block_index() % 2;
        auto box = box_of_rows<kPacked>(keys.first_key + (rank == 0 ? 1 : -1) * Kernel::B_c,
                                        keys.k.first, keys.k.count, keys.head_k, keys.batch);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            box.column = Kernel::dq_panel(rank, p) * Kernel::Panel::kColumns;
            tma_load(smem + Kernel::peer_K_offset + p * Kernel::KV_panel_bytes, &args.k, box, full);
        }
    }

    // With multicast, both CTAs count the bytes of all panels, but each copies every second panel,
    // to both.
    template <bool kOfV, class Pipeline, class Step>
    FS_DEVICE void load_queries(Pipeline& pipeline, const TensorMap* map,
                                const KeyBlock<Kernel>& keys, const Step& step,
                                int statistics_offset, const float* statistics) {
        pipeline.producer_wait();
        const uint32_t full = pipeline.full();
        mbarrier_arrive_expect(full, Pipeline::kBytes + Kernel::statistics_bytes);
        load_panels<false, kOfV>(pipeline.tile(), map,
                                 box_of_rows<kPacked>(step.block * Kernel::B_r, keys.q.first,
                                                      keys.q.count, step.head, keys.batch),
                                 full);
        bulk_load(smem + statistics_offset + pipeline.state.stage() * Kernel::statistics_bytes,
                  statistics + keys.statistic(args.problem, step), Kernel::statistics_bytes, full);
        pipeline.state.advance();
    }

    template <bool kOfKeys, bool kOfV>
    FS_DEVICE void load_panels(uint32_t tile, const TensorMap* map, TmaBox<kPacked> box,
                               uint32_t full) {
#pragma unroll
        for (int p = 0; p < (kOfV ? Kernel::V_panels : Kernel::n_panels); ++p) {
            box.column = first_column<Kernel>() + p * Kernel::Panel::kColumns;
            const int place = kOfV ? Kernel::place_of_V_panel(p) : Kernel::place_of_panel(p);
            const uint32_t panel =
                tile + (kOfKeys ? place * Kernel::KV_panel_bytes : p * Kernel::Q_panel_bytes);
            if constexpr (kOfKeys || Kernel::query_ctas == 1) {
                tma_load(panel, map, box, full);
            } else if (p % 2 == block_index() % 2) {
                tma_load_multicast(panel, map, box, full, 0b11);
            }
        }
    }
};

}  // namespace flashsmith
