// The order in which blocks of keys add to the dq of a block of queries.
//
// Without it fp32 sums come together as CTAs run. With `ordered_dq` each part of a block's dq has a
// counter in global memory that says whose turn it is. Blocks of keys go from the last one to the
// first, in launch order: a CTA waits only for CTAs that were launched before, however few are
// resident, and under a causal mask or a window a block of keys is the first to add to the first
// queries that see it, and from there on one step behind the block before it: nobody waits long.
#pragma once

#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

FS_DEVICE uint32_t load_acquire(const uint32_t* gmem) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}
FS_DEVICE void store_release(uint32_t* gmem, uint32_t x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

// Hardware barriers of each warpgroup alone, behind those of the consumers.
constexpr int kdQOrderBarrier = 5;

template <class Kernel>
struct dQOrder {
    static constexpr bool kOrdered = Kernel::CFG.ordered_dq;

    int turn;         // of this block of keys: how many of its sequence come before it
    int first_block;  // of queries that the block of keys before this one adds to; those before it
                      // have no other to wait for

    FS_DEVICE void begin(const BackwardKernelArgs& args, const KeyBlock<Kernel>& keys) {
        if constexpr (kOrdered) {
            const int next_key = keys.first_key + Kernel::B_c;
            turn = (keys.k.count - keys.first_key - 1) / Kernel::B_c;
            first_block = 0x7fffffff;
            if (turn == 0) return;
            const BlockRange blocks =
                Visibility<Kernel::SEMANTICS>(args, keys.q.count, keys.k.count)
                    .query_blocks(next_key, Kernel::B_c, Kernel::B_r);
            if (blocks.begin < blocks.end) first_block = blocks.begin;
        }
    }
    // Until all that came before have added to a block. All threads of the warpgroup wait, since
    // each of them adds.
    FS_DEVICE void wait(int block, const uint32_t* counter) const {
        if constexpr (kOrdered) {
            if (block < first_block) return;
            while (load_acquire(counter) != static_cast<uint32_t>(turn)) continue;
        }
    }
    // All threads of the warpgroup have added.
    FS_DEVICE void advance(int warpgroup, uint32_t* counter) const {
        if constexpr (kOrdered) {
            named_barrier_wait(kdQOrderBarrier + warpgroup, kWarpgroupThreads);
            if (thread_index() % kWarpgroupThreads == 0) store_release(counter, turn + 1);
        }
    }
};

}  // namespace flashsmith
