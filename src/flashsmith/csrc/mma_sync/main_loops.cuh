// Main loops: the order of copies, GEMMs and waits while a CTA goes through its K/V blocks. All but
// the canonical loop begin with the last block, because masks and ragged ends mostly concern a
// row's last blocks.
//
// `b` is the CTA's ForwardBlock. With trimmed masks a step is compiled twice. One version is for
// partly masked blocks, where each warp checks whether it sees any key. The other has neither mask
// nor check.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// The next of `kStages` tiles, as its distance in bytes from the first one.
template <int kStages, int kTileBytes>
struct StageOffset {
    uint32_t bytes = 0;
    FS_DEVICE void advance() {
        bytes = bytes == (kStages - 1) * kTileBytes ? 0 : bytes + kTileBytes;
    }
};

// One K and one V tile, with two barriers per block. With eager loads, each copy is issued as soon
// as its tile is free, so that it overlaps the other tile's GEMM. Otherwise a copy is issued where
// its data are needed and waited for immediately.
template <class Kernel>
struct SingleStageLoop {
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
            if (Kernel::trim_masks && !b.needs_mask(block, blocks))
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
        b.finish_copies();  // K has arrived; every warp is done with the previous V
        if constexpr (Kernel::eager_load_blocks) b.start_V(block), b.commit_copies();

        typename Kernel::S_accum_t S;
        if (seen) b.QK_gemm(S);

        if constexpr (!Kernel::eager_load_blocks) b.start_V(block), b.commit_copies();
        b.finish_copies();  // V has arrived; every warp is done with K
        if constexpr (Kernel::eager_load_blocks)
            if (block > blocks.begin) b.start_K(block - 1), b.commit_copies();

        if (!seen) return;
        typename Kernel::P_t P;
        b.template compute_probabilities<kMask, kFirst>(S, block, blocks);
        b.pack_P(P, S);
        b.PV_gemm(P);
    }
};

// A ring of K/V pairs with one barrier per block. The copies of a pair have the time of kv_stages -
// 1 blocks to arrive.
template <class Kernel>
struct MultiStageLoop {
    using Stage = StageOffset<Kernel::kv_stages, Kernel::stage_bytes>;
    static constexpr int kAhead = Kernel::kv_stages - 1;

    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        int block = blocks.end - 1;
        Stage now, filled;
        b.start_Q();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) start_copies(b, block - i, blocks, filled);
        if constexpr (Kernel::Q_t::kWhole) {
            b.template finish_copies<kAhead - 1>();
            b.Q.load(0);
        }
        for (; block >= blocks.begin; --block) {
            b.template finish_copies<kAhead - 1>();  // the pair has arrived, and all
            start_copies(b, block - kAhead, blocks,
                         filled);  // warps are done with the previous one, whose stage is refilled
            if (Kernel::trim_masks && !b.needs_mask(block, blocks))
                step<false>(b, block, blocks, now);
            else if (!Kernel::trim_masks || b.sees(block))
                step<true>(b, block, blocks, now);
            now.advance();
        }
    }

  private:
    template <bool kMask, class Block, class Range>
    FS_DEVICE static void step(Block& b, int block, const Range& blocks, const Stage& stage) {
        typename Kernel::S_accum_t S;
        typename Kernel::P_t P;
        b.QK_gemm(S, stage.bytes);
        b.template compute_probabilities<kMask, false>(S, block, blocks);
        b.pack_P(P, S);
        b.PV_gemm(P, stage.bytes);
    }
    template <class Block, class Range>
    FS_DEVICE static void start_copies(Block& b, int block, const Range& blocks, Stage& stage) {
        if (block >= blocks.begin) {
            b.start_K(block, stage.bytes);
            b.start_V(block, stage.bytes);
        }
        b.commit_copies();
        stage.advance();
    }
};

// canonical: the same ring, but from the first block on and chunk by chunk (docs/bits.md). A
// chunk's result is merged with the state of earlier chunks, which is kept in shared memory.
template <class Kernel>
struct CanonicalLoop {
    using Stage = StageOffset<Kernel::kv_tiles, Kernel::stage_bytes>;
    // Without a ring, the loop waits for each pair immediately after its copies are issued.
    static constexpr int kAhead = Kernel::kv_tiles - 1;
    static constexpr int kChunkBlocks = kCanonicalChunk / Kernel::B_c;

    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        Stage now, filled;
        b.start_Q();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) start_copies(b, blocks.begin + i, blocks, filled);
        if constexpr (Kernel::Q_t::kWhole) {
            if constexpr (kAhead == 0) b.commit_copies();
            b.template finish_copies<kAhead == 0 ? 0 : kAhead - 1>();
            b.Q.load(0);
        }
        const int second_chunk = (blocks.begin / kChunkBlocks + 1) * kChunkBlocks;
        // With lists, block numbers are positions in a list, and a chunk has any number of them.
        [[maybe_unused]] int chunk = chunk_of(b, blocks.begin);
        [[maybe_unused]] bool merges = false;
        for (int block = blocks.begin; block < blocks.end; ++block) {
            if constexpr (Kernel::has_lists) {
                const int next = chunk_of(b, block);
                if (next != chunk) {
                    next_chunk(b, merges);
                    merges = true;
                    chunk = next;
                }
            } else if (block >= second_chunk && block % kChunkBlocks == 0) {
                next_chunk(b, block > second_chunk);
            }
            if constexpr (kAhead == 0) {
                __syncthreads();  // every warp is done with the previous pair
                start_copies(b, block, blocks, filled);
                b.template finish_copies<0>();
            } else {
                b.template finish_copies<kAhead - 1>();
                start_copies(b, block + kAhead, blocks, filled);
            }
            if (Kernel::trim_masks && !b.needs_mask(block, blocks))
                step<false>(b, block, blocks, now);
            else if (!Kernel::trim_masks || b.sees(block))
                step<true>(b, block, blocks, now);
            now.advance();
        }
        b.finish_chunk(Kernel::has_lists ? merges : blocks.end > second_chunk);
    }

  private:
    template <class Block>
    FS_DEVICE static int chunk_of(const Block& b, int position) {
        return Kernel::has_lists ? b.block_at(position) / kChunkBlocks : 0;
    }
    template <class Block>
    FS_DEVICE static void next_chunk(Block& b, bool merges) {
        b.finish_chunk(merges);
        b.save_state();
        b.start_chunk();
    }
    template <bool kMask, class Block, class Range>
    FS_DEVICE static void step(Block& b, int block, const Range& blocks, const Stage& stage) {
        typename Kernel::S_accum_t S;
        typename Kernel::P_t P;
        b.QK_gemm(S, stage.bytes);
        b.template compute_probabilities<kMask, false>(S, block, blocks);
        b.pack_P(P, S);
        b.PV_gemm(P, stage.bytes);
    }
    template <class Block, class Range>
    FS_DEVICE static void start_copies(Block& b, int block, const Range& blocks, Stage& stage) {
        if (block < blocks.end) {
            b.start_K(block, stage.bytes);
            b.start_V(block, stage.bytes);
        }
        b.commit_copies();
        stage.advance();
    }
};

// Two halves of the warps, each with one warp per scheduler of an SM, run half a block apart: one
// half's softmax overlaps the other's GEMMs. Without this order the two halves would drift into
// lockstep, and the tensor cores would idle while both compute maxima.
//
// The order covers only the PV GEMM. After it, a half continues with the next block's QK GEMM while
// the other half runs its PV GEMM. One warp alone does not fill a tensor core, because it waits for
// its ldmatrix. An arrival also means that this half's copies of the next V and the K after it have
// arrived and that it has read the previous V. The other half may still read K then, so kv_stages
// tiles are filled only kv_stages - 2 blocks ahead.
template <class Kernel>
struct PingPongLoop {
    using Stage = StageOffset<Kernel::kv_stages, Kernel::stage_bytes>;
    static constexpr int kAhead = Kernel::kv_stages - 2;

    template <class Block, class Range>
    FS_DEVICE static void run(Block& b, const Range& blocks) {
        const int half = thread_index() / (Kernel::n_threads / 2);
        int block = blocks.end - 1;
        Stage now, filled;
        b.start_Q();
        b.start_K(block);
        b.commit_copies();
#pragma unroll
        for (int i = 0; i < kAhead; ++i) start_copies(b, block - i, blocks, filled);
        b.template finish_copies<kAhead>();
        if constexpr (Kernel::Q_t::kWhole) b.Q.load(0);
        typename Kernel::S_accum_t S;
        if (!Kernel::trim_masks || b.sees(block)) b.QK_gemm(S);
        b.template wait_for_copies<kAhead - 1>();
        if (half == 1) order_arrive(half);

        for (; block > blocks.begin; --block) {
            if (Kernel::trim_masks && !b.needs_mask(block, blocks) &&
                !b.needs_mask(block - 1, blocks))
                step<false, false>(b, S, half, block, blocks, now, filled);
            else
                step<true, false>(b, S, half, block, blocks, now, filled);
        }
        step<true, true>(b, S, half, block, blocks, now, filled);
    }

  private:
    // Adds a block to O, given its scores, and computes the scores of the next block.
    template <bool kMask, bool kLast, class Block, class Range>
    FS_DEVICE static void step(Block& b, typename Kernel::S_accum_t& S, int half, int block,
                               const Range& blocks, Stage& now, Stage& filled) {
        const bool seen = !Kernel::trim_masks || !kMask || b.sees(block);
        typename Kernel::P_t P;
        if (seen) {
            b.template compute_probabilities<kMask, false>(S, block, blocks);
            b.pack_P(P, S);
        }

        order_wait(half);
        if constexpr (!kLast) start_copies(b, block - kAhead, blocks, filled);
        if (seen) b.PV_gemm(P, now.bytes);
        b.template wait_for_copies<kAhead - 1>();
        if (!kLast || half == 0) order_arrive(half);  // no warp waits for the last step of half 1

        now.advance();
        if constexpr (!kLast)
            if (!Kernel::trim_masks || !kMask || b.sees(block - 1)) b.QK_gemm(S, now.bytes);
    }
    // Copies V of `block` and K of the next one.
    template <class Block, class Range>
    FS_DEVICE static void start_copies(Block& b, int block, const Range& blocks, Stage& stage) {
        if (block >= blocks.begin) b.start_V(block, stage.bytes);
        stage.advance();
        if (block > blocks.begin) b.start_K(block - 1, stage.bytes);
        b.commit_copies();
    }
    // Barrier 1 opens for half 0 once half 1 has arrived there, and barrier 2 vice versa.
    FS_DEVICE static void order_wait(int half) {
        if (half == 0)
            named_barrier_wait<1, Kernel::n_threads>();
        else
            named_barrier_wait<2, Kernel::n_threads>();
    }
    FS_DEVICE static void order_arrive(int half) {
        if (half == 0)
            named_barrier_arrive<2, Kernel::n_threads>();
        else
            named_barrier_arrive<1, Kernel::n_threads>();
    }
};

}  // namespace flashsmith
