// ordered_dq: the order in which blocks of keys add to dq of a block of queries.
//
// Without it, CTAs add to the fp32 sums in the order in which they happen to run. With it, each
// part of the dq of a block has a counter in global memory, which says whose turn it is. Blocks of
// keys have their turns in the order of launch, so that a CTA waits only for CTAs that were
// launched before it, however few are resident.
//
// If blocks of keys were in ascending order under a causal mask, all would begin with the same
// queries, and each would wait for the one before. If the last blocks come first and queries begin
// at the diagonal, each block of keys reaches a block of queries later than the block of keys
// before it. But in this order the longest CTA of a head is the last one. So the last heads of a
// launch begin with the first keys. So do heads that share keys, which have the longest CTAs.
//
// Reading the turn from the L2, and moving the sums there, takes longer than the consumer's work
// that could overlap it. So an extra warp waits for each turn of a part, a step before the
// consumers need it. When the sums have arrived, it passes the turn on. Consumers use only barriers
// of their CTA.
#pragma once

#include "sm90/pipeline.cuh"
#include "wgmma_backward/listed_steps.cuh"

namespace flashsmith {

FS_DEVICE uint32_t load_acquire(const uint32_t* gmem) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}
FS_DEVICE uint32_t load_relaxed(const uint32_t* gmem) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}
FS_DEVICE void store_relaxed(uint32_t* gmem, uint32_t x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}
FS_DEVICE void fence_acq_rel() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// The barriers between the warp that keeps turns and the warpgroups that add to dq. Each warpgroup
// has its own barrier for turns, because a warpgroup that has every third turn must not observe the
// other warpgroups' turns. Each part has a barrier for its sums.
//
// With split roles, a part is one half of the columns of each warpgroup. The two halves are added
// half a step apart. If both halves shared one turn, only the time from the second half of a step
// to the first half of the next would be left to pass it on and to wait for it. With shared_dq,
// each warpgroup adds one half of its CTA's columns, and pairs of blocks of keys have turns.
template <class Kernel>
struct dQOrder {
    static constexpr bool kOrdered = Kernel::CFG.ordered_dq;
    static constexpr bool kAddTogether = Kernel::CFG.split_roles && !Kernel::CFG.shared_dq;
    static constexpr int kAddingWarps =
        kWarpsPerWarpgroup * (kAddTogether ? Kernel::n_warpgroups : 1);
    uint32_t smem;

    FS_DEVICE uint32_t granted(int warpgroup) const {
        return smem + Kernel::order_barriers + 16 * warpgroup;
    }
    FS_DEVICE uint32_t added(int part) const {
        return smem + Kernel::order_barriers + 16 * part + 8;
    }

    FS_DEVICE void init() const {
        if constexpr (kOrdered) {
            for (int warpgroup = 0; warpgroup < Kernel::n_warpgroups; ++warpgroup)
                mbarrier_init(granted(warpgroup), 1);
            for (int part = 0; part < Kernel::dq_parts; ++part)
                mbarrier_init(added(part), kAddingWarps);
        }
    }
    // For a consumer: waits until its next sums may be added. `odd`: whether the number of turns so
    // far is odd.
    FS_DEVICE void wait(int warpgroup, uint32_t& odd) const {
        if constexpr (kOrdered) {
            mbarrier_wait(granted(warpgroup), odd);
            odd ^= 1;
        }
    }
    // Signals that this warp has added its sums.
    FS_DEVICE void advance(int part, int lane) const {
        if constexpr (kOrdered) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(added(part));
        }
    }
};

// A thread that keeps the turns for a part of dQ.
template <class Kernel>
struct dQTurns {
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;

    const typename Kernel::Args& args;
    const uint32_t smem;
    const int part;
    const dQOrder<Kernel> order;
    TilePipeline<1, Kernel::K_tile_bytes> K;
    uint32_t odd = 0;

    FS_DEVICE dQTurns(const typename Kernel::Args& args, uint32_t smem, int part)
        : args(args),
          smem(smem),
          part(part),
          order{smem},
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers) {}

    FS_DEVICE void run() {
        if constexpr (!CFG.persistent) {
            keep(key_block_of_cta<Kernel>());
        } else {
            while (true) {
                K.consumer_wait();
                const uint32_t number = load_shared_16B(smem + Kernel::number_offset).x;
                if (number == kNoKeyBlock) return;
                K.consumer_release(0, 0);
                keep(number);
            }
        }
    }

  private:
    FS_DEVICE void keep(uint32_t number) {
        if constexpr (Kernel::has_lists) return keep_listed(number);
        const KeyBlock<Kernel> keys(args.problem, number);
        int n_steps = keys.n_steps();
        if (n_steps == 0) return;
        // `turn`: how many of the sequence's blocks of keys come before this one. The last one of
        // those also adds to the blocks of queries in `shared`. For all other blocks of queries,
        // this block of keys is the first to add.
        constexpr int kKeys = Kernel::cluster_keys;
        const int place = keys.first_key / kKeys;
        const uint32_t turn = keys.direction < 0 ? place : (keys.k.count - 1) / kKeys - place;
        const int first_key = CFG.shared_dq ? place * kKeys : keys.first_key;  // of the cluster
        BlockRange shared{};
        if (turn > 0)
            shared = BackwardKeyMask<Kernel::SEMANTICS>(args.problem, keys.q.count, keys.k.count)
                         .query_blocks(first_key + keys.direction * kKeys, kKeys, Kernel::B_r);
        // Advances to the next step as KeyBlock does, but uses fewer registers.
        const auto first = keys.first_step();
        const int n_heads = keys.n_heads;
        const int64_t head_sums = Kernel::first_dq_sum(args.problem.statistics_head_stride);
        int block = first.block, head = 0, warpgroup = part;
        uint32_t* counter = counter_of(keys.statistic(args.problem, first));
        bool ours = !is_in(shared, block);
#pragma unroll 1
        while (true) {
            if (!ours)
                while (load_acquire(counter) != turn) continue;
            mbarrier_arrive(order.granted(warpgroup));
            if (Kernel::alternates_dq && ++warpgroup == Kernel::n_warpgroups) warpgroup = 0;
            uint32_t* const done = counter;
            counter += head_sums;
            if (++head == n_heads) {
                head = 0;
                block += keys.direction;
                counter += keys.direction * Kernel::dq_block_floats - n_heads * head_sums;
            }
            mbarrier_wait(order.added(part), odd);
            odd ^= 1;
            // One fence releases these sums and, if it is their turn, acquires the next ones.
            const bool is_last = --n_steps == 0;
            ours = is_last || !is_in(shared, block) || load_relaxed(counter) == turn;
            fence_acq_rel();
            store_relaxed(done, turn + 1);
            if (is_last) return;
        }
    }
    FS_DEVICE void keep_listed(uint32_t number) {
        const KeyBlock<Kernel> keys(args.problem, number);
        ListedSteps<Kernel> steps(args, keys);
        int n_steps = steps.n_steps(), warpgroup = part;
        if (n_steps == 0) return;
        const int64_t first = first_statistic<Kernel::SEMANTICS>(args.problem, keys.batch,
                                                                 keys.first_head, keys.q.first);
        steps.begin();
#pragma unroll 1
        for (; n_steps > 0; --n_steps) {
            uint32_t* const counter =
                counter_of(first + steps.now.head * args.problem.statistics_head_stride +
                           steps.now.entry.block() * Kernel::B_r);
            const uint32_t turn = steps.turn();
            while (load_acquire(counter) != turn) continue;
            mbarrier_arrive(order.granted(warpgroup));
            if (Kernel::alternates_dq && ++warpgroup == Kernel::n_warpgroups) warpgroup = 0;
            if (n_steps > 1) steps.advance();
            mbarrier_wait(order.added(part), odd);
            odd ^= 1;
            fence_acq_rel();
            store_relaxed(counter, turn + 1);
        }
    }
    FS_DEVICE static bool is_in(const BlockRange& range, int block) {
        return range.begin <= block && block < range.end;
    }
    // The counter follows the sums of a block of queries. With shared_dq, both CTAs have counters.
    FS_DEVICE uint32_t* counter_of(int64_t statistic) const {
        return reinterpret_cast<uint32_t*>(args.problem.dq_sums + Kernel::first_dq_sum(statistic) +
                                           Kernel::B_r * Kernel::dq_sum_columns) +
               (CFG.shared_dq ? block_index() % 2 * Kernel::dq_parts : 0) + part;
    }
};

}  // namespace flashsmith
