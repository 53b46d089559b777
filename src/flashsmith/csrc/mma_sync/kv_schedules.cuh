// In which order a CTA copies, multiplies and waits as it walks its K/V blocks. All walk from the
// last block to the first: masks and ragged ends mostly concern the last blocks of a row.
//
// `b` is the CTA's ForwardBlock. A step is compiled twice where masks are trimmed: once for blocks
// that some rows do not see in whole, where each warp looks whether it sees anything, and once for
// all others, free of both questions.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// A tile's place in a ring of `kSlots`, as its distance from the first one in bytes.
template <int kSlots, int kTileBytes>
struct RingSlot {
    uint32_t bytes = 0;
    FS_DEVICE void advance() {
        bytes = bytes == (kSlots - 1) * kTileBytes ? 0 : bytes + kTileBytes;
    }
};

// One K and one V tile, two barriers a block. Eager, each copy is issued as soon as its tile is
// free and runs under the other product; otherwise where its data is wanted, and waited for at
// once.
template <class Kernel>
struct TwoTiles {
    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        int block = blocks.end - 1;
        b.start_Q();
        b.commit_copies();
        if constexpr (Kernel::eager_load_blocks) b.start_K(block), b.commit_copies();
        if constexpr (Kernel::Q_t::kWhole) {
            b.template finish_copies<Kernel::eager_load_blocks ? 1 : 0>();
            b.Q.load(0);
        }
        if constexpr (Kernel::optimized_softmax) step<true, true>(b, block--, blocks);
        for (; block >= blocks.begin; --block) {
            if (Kernel::trim_masks && !blocks.needs_mask(block))
                step<false, false>(b, block, blocks);
            else
                step<true, false>(b, block, blocks);
        }
    }

  private:
    template <bool kMask, bool kFirst, class Block, class Range>
    FS_DEVICE static void step(Block& b, int block, const Range& blocks) {
        const bool seen = !Kernel::trim_masks || !kMask || b.sees(block);
        if constexpr (!Kernel::eager_load_blocks) b.start_K(block), b.commit_copies();
        b.finish_copies();  // K is here; every warp has left the last V
        if constexpr (Kernel::eager_load_blocks) b.start_V(block), b.commit_copies();

        typename Kernel::S_accum_t S;
        if (seen) b.multiply_QK(S);

        if constexpr (!Kernel::eager_load_blocks) b.start_V(block), b.commit_copies();
        b.finish_copies();  // V is here; every warp has left K
        if constexpr (Kernel::eager_load_blocks)
            if (block > blocks.begin) b.start_K(block - 1), b.commit_copies();

        if (!seen) return;
        typename Kernel::P_t P;
        b.template attend<kMask, kFirst>(P, S, block, blocks);
        b.multiply_PV(P);
    }
};

// A ring of K/V pairs and one barrier a block: a pair's copies have all of kv_stages - 1 blocks to
// arrive.
template <class Kernel>
struct PairRing {
    using Slot = RingSlot<Kernel::kv_stages, Kernel::KVLayout::kBytes>;
    static constexpr int kAhead = Kernel::kv_stages - 1;

    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        int block = blocks.end - 1;
        Slot now, filled;
        b.start_Q();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) fill(b, block - i, blocks, filled);
        if constexpr (Kernel::Q_t::kWhole) {
            b.template finish_copies<kAhead - 1>();
            b.Q.load(0);
        }
        for (; block >= blocks.begin; --block) {
            b.template finish_copies<kAhead - 1>();   // this pair is here; every warp has left the
            fill(b, block - kAhead, blocks, filled);  // last one, whose place is filled anew
            if (Kernel::trim_masks && !blocks.needs_mask(block))
                step<false>(b, block, blocks, now);
            else if (!Kernel::trim_masks || b.sees(block))
                step<true>(b, block, blocks, now);
            now.advance();
        }
    }

  private:
    template <bool kMask, class Block, class Range>
    FS_DEVICE static void step(Block& b, int block, const Range& blocks, const Slot& slot) {
        typename Kernel::S_accum_t S;
        typename Kernel::P_t P;
        b.multiply_QK(S, slot.bytes);
        b.template attend<kMask, false>(P, S, block, blocks);
        b.multiply_PV(P, slot.bytes);
    }
    template <class Block, class Range>
    FS_DEVICE static void fill(Block& b, int block, const Range& blocks, Slot& slot) {
        if (block >= blocks.begin) {
            b.start_K(block, slot.bytes);
            b.start_V(block, slot.bytes);
        }
        b.commit_copies();
        slot.advance();
    }
};

// Two halves of the warps, each with one warp on every scheduler of an SM, half a block apart: one
// half's softmax runs beside the other's products. Left alone they drift into step, and the tensor
// cores idle while both look for maxima.
//
// A turn covers P V alone. A half gives it away there and goes on with the next block's Q K^T
// beside the other's P V, since one warp alone, waiting for its ldmatrix, does not fill a tensor
// core. Giving a turn also says: my copies of the next V and the K after it are here, and I have
// left the last V. K may still be read by the other half then, so that a ring of kv_stages tiles is
// filled kv_stages - 2 blocks ahead.
template <class Kernel>
struct TakingTurns {
    using Slot = RingSlot<Kernel::kv_stages, Kernel::KVLayout::kBytes>;
    static constexpr int kAhead = Kernel::kv_stages - 2;

    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        const int half = thread_index() / (Kernel::n_threads / 2);
        int block = blocks.end - 1;
        Slot now, filled;
        b.start_Q();
        b.start_K(block);
        b.commit_copies();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) fill(b, block - i, blocks, filled);
        b.template finish_copies<kAhead>();
        if constexpr (Kernel::Q_t::kWhole) b.Q.load(0);
        typename Kernel::S_accum_t S;
        if (!Kernel::trim_masks || b.sees(block)) b.multiply_QK(S);
        b.template wait_for_copies<kAhead - 1>();
        if (half == 1) give_turn(half);

        for (; block > blocks.begin; --block) {
            if (Kernel::trim_masks && !blocks.needs_mask(block) && !blocks.needs_mask(block - 1))
                step<false, false>(b, S, half, block, blocks, now, filled);
            else
                step<true, false>(b, S, half, block, blocks, now, filled);
        }
        step<true, true>(b, S, half, block, blocks, now, filled);
    }

  private:
    // From the scores of a block to its share of O, and the scores of the next.
    template <bool kMask, bool kLast, class Block, class Range>
    FS_DEVICE static void step(Block& b, typename Kernel::S_accum_t& S, int half, int block,
                               const Range& blocks, Slot& now, Slot& filled) {
        const bool seen = !Kernel::trim_masks || !kMask || b.sees(block);
        typename Kernel::P_t P;
        if (seen) b.template attend<kMask, false>(P, S, block, blocks);

        take_turn(half);
        if constexpr (!kLast) fill(b, block - kAhead, blocks, filled);
        if (seen) b.multiply_PV(P, now.bytes);
        b.template wait_for_copies<kAhead - 1>();
        if (!kLast || half == 0) give_turn(half);  // nobody waits for the other half's last

        now.advance();
        if constexpr (!kLast)
            if (!Kernel::trim_masks || !kMask || b.sees(block - 1)) b.multiply_QK(S, now.bytes);
    }
    // V of `block`, and K of the one after it.
    template <class Block, class Range>
    FS_DEVICE static void fill(Block& b, int block, const Range& blocks, Slot& slot) {
        if (block >= blocks.begin) b.start_V(block, slot.bytes);
        slot.advance();
        if (block > blocks.begin) b.start_K(block - 1, slot.bytes);
        b.commit_copies();
    }
    // Barrier 1 opens for half 0 once half 1 has arrived there, barrier 2 the other way round.
    FS_DEVICE static void take_turn(int half) {
        if (half == 0)
            named_barrier_wait<1, Kernel::n_threads>();
        else
            named_barrier_wait<2, Kernel::n_threads>();
    }
    FS_DEVICE static void give_turn(int half) {
        if (half == 0)
            named_barrier_arrive<2, Kernel::n_threads>();
        else
            named_barrier_arrive<1, Kernel::n_threads>();
    }
};

}  // namespace flashsmith
