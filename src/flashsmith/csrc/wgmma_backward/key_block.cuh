// What a CTA has to do: a block of keys of one head, and the blocks of queries that see them, of
// every head that shares the keys.
#pragma once

#include "backward/rows.cuh"
#include "backward/visibility.cuh"
#include "wgmma_backward/static_kernel_configuration.cuh"

namespace flashsmith {

// In place of a block's number: there is none any more.
constexpr uint32_t kNoKeyBlock = 0xffffffffu;

template <class Kernel>
struct KeyBlock {
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr bool kOrdered = Kernel::CFG.ordered_dq;
    // About as many as a GPU of sm_90 holds at once. The bits of dq do not depend on it.
    static constexpr uint32_t kResidentCtas = 128;

    int batch, head_k, first_key;
    SequenceRows q, k;
    int first_head, n_heads;  // of q
    BlockRange blocks;

    // The blocks of a head are neighbours: their parts of dq meet in L2. Under a causal mask the
    // first block of keys is seen by the most queries. With ordered_dq the first blocks of as many
    // heads as run together come before their second ones: see dQTurns.
    FS_DEVICE KeyBlock(const BackwardKernelArgs& args, uint32_t number) {
        const uint32_t n_blocks = (args.seq_k + Kernel::B_c - 1) / Kernel::B_c;
        uint32_t sequence = number / n_blocks;
        first_key = (number - sequence * n_blocks) * Kernel::B_c;
        if constexpr (kOrdered) {
            const uint32_t together = max(kResidentCtas / n_blocks, 1u);
            const uint32_t first = sequence / together * together;
            const uint32_t heads = min(together, args.batch * args.heads_k - first);
            const uint32_t place = number - first * n_blocks;
            sequence = first + place % heads;
            first_key = place / heads * Kernel::B_c;
        }
        batch = sequence / args.heads_k;
        head_k = sequence % args.heads_k;
        q = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        k = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
        n_heads = args.heads_q / args.heads_k;
        first_head = head_k * n_heads;
        blocks = Visibility<SEMANTICS>(args, q.count, k.count)
                     .query_blocks(first_key, Kernel::B_c, Kernel::B_r);
    }

    // A packed batch has as many blocks per sequence as its longest one needs.
    FS_DEVICE bool exists() const { return !SEMANTICS.packed || first_key < k.count; }
    FS_DEVICE int n_steps() const { return max(blocks.end - blocks.begin, 0) * n_heads; }

    // A block of queries of one head. With ordered_dq the last block comes first, of all heads: a
    // block of keys then meets every query one step behind the block of keys before it or later.
    struct Step {
        int head, block;
    };
    FS_DEVICE Step first_step() const {
        return {first_head, kOrdered ? blocks.end - 1 : blocks.begin};
    }
    FS_DEVICE void advance(Step& step) const {
        if constexpr (kOrdered) {
            if (++step.head == first_head + n_heads) step.head = first_head, --step.block;
        } else {
            if (++step.block == blocks.end) step.block = blocks.begin, ++step.head;
        }
    }
    // The statistics of a step's first row.
    FS_DEVICE int64_t statistic(const BackwardKernelArgs& args, const Step& step) const {
        return first_statistic<SEMANTICS>(args, batch, step.head, q.first) +
               step.block * Kernel::B_r;
    }
};

}  // namespace flashsmith
