// The work of a CTA: a block of keys of one head, and the blocks of queries that see them, for all
// heads that share the keys.
#pragma once

#include "backward/key_mask.cuh"
#include "backward/rows.cuh"
#include "wgmma_backward/static_kernel_configuration.cuh"

namespace flashsmith {

// The number of a CTA's block of keys, if it has only one. The CTAs of a cluster have the same;
// with shared_dq, it is the number of both blocks.
template <class Kernel>
FS_DEVICE uint32_t key_block_of_cta() {
    return block_index() / Kernel::cluster_size;
}
// The first column of Q, K, V, do and the gradients that this CTA has.
template <class Kernel>
FS_DEVICE int first_column() {
    return Kernel::CFG.cta_pair ? block_index() % 2 * Kernel::columns : 0;
}

// Stands for a block number if no block is left.
constexpr uint32_t kNoKeyBlock = 0xffffffffu;

template <class Kernel>
struct KeyBlock {
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr bool kOrdered = Kernel::CFG.ordered_dq;
    // Whether the first blocks of keys of several heads come before their second ones.
    static constexpr bool kTogether = kOrdered || kTriangular<SEMANTICS>;
    // About how many CTAs, or pairs with shared_dq, a GPU of sm_90 holds at once.
    static constexpr uint32_t kResidentCtas = Kernel::CFG.shared_dq ? 64 : 128;

    int batch, head_k, first_key;
    SequenceRows q, k;
    int first_head, n_heads;  // query heads
    BlockRange blocks;
    // With ordered_dq: the increment from one block of queries to the next. It is 1 if blocks of
    // keys are processed from the last to the first, and -1 otherwise.
    int direction = -1;

    // The blocks of a head run at about the same time, so that their parts of dq are added in the
    // L2. Under a causal mask, the first block of keys is visible to the most queries, and comes
    // first. The first blocks of all heads that run together come before their second ones. So the
    // last CTAs are short, even if many query heads share keys. For ordered_dq, see also dQTurns.
    FS_DEVICE KeyBlock(const BackwardKernelArgs& args, uint32_t number) {
        constexpr int kKeys = Kernel::cluster_keys;
        const uint32_t n_blocks = (args.seq_k + kKeys - 1) / kKeys;
        uint32_t sequence = number / n_blocks;
        uint32_t place = number - sequence * n_blocks;
        if constexpr (kTogether) {
            uint32_t together = max(kResidentCtas / n_blocks, 1u);
            // The blocks of keys of a head then begin twice as far apart in time. With more heads,
            // their queries and sums would not fit in the L2.
            if (kOrdered) together = max(together, min(2 * kResidentCtas / n_blocks, 8u));
            const uint32_t sequences = args.batch * args.heads_k;
            // Groups are counted from the end, so that only the first one may have fewer heads.
            const uint32_t groups_behind = (sequences - 1 - sequence) / together;
            const uint32_t end = sequences - groups_behind * together;
            const uint32_t heads = min(together, end);
            place = number - (end - heads) * n_blocks;
            sequence = end - heads + place % heads;
            place /= heads;
            const bool is_grouped = args.heads_q != args.heads_k;
            if (kOrdered && Kernel::masked && !is_grouped && groups_behind > 0) {
                direction = 1;
                place = n_blocks - 1 - place;
            }
        }
        first_key = place * kKeys;
        batch = sequence / args.heads_k;
        head_k = sequence % args.heads_k;
        q = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        k = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
        n_heads = args.heads_q / args.heads_k;
        first_head = head_k * n_heads;
        const BackwardKeyMask<SEMANTICS> mask(args, q.count, k.count);
        blocks = mask.query_blocks(first_key, kKeys, Kernel::B_r);
        if constexpr (Kernel::CFG.shared_dq) {
            // Both CTAs visit the same blocks of queries, but each has its own full ones.
            first_key += block_index() % 2 * Kernel::B_c;
            const BlockRange own = mask.query_blocks(first_key, Kernel::B_c, Kernel::B_r);
            blocks.full_begin = own.full_begin;
            blocks.full_end = own.full_end;
        }
    }

    // In a packed batch, each sequence has as many blocks as the longest one needs.
    FS_DEVICE bool exists() const {
        // The first key of the cluster. One of its two blocks may lie beyond the sequence.
        const int first =
            Kernel::CFG.shared_dq ? first_key - block_index() % 2 * Kernel::B_c : first_key;
        return !SEMANTICS.packed || first < k.count;
    }
    FS_DEVICE int n_steps() const {
        if (Kernel::cluster_size > 1 && !exists()) return 0;
        return max(blocks.end - blocks.begin, 0) * n_heads;
    }

    // A step: a block of queries of one head. With ordered_dq, a block is processed for all heads
    // before the next block. Each block of keys then reaches every query later than the block of
    // keys before it.
    struct Step {
        int head, block;
    };
    FS_DEVICE Step first_step() const {
        return {first_head, kOrdered && direction < 0 ? blocks.end - 1 : blocks.begin};
    }
    template <class ListedStep>
    FS_DEVICE Step step_of(const ListedStep& listed) const {
        return {first_head + listed.head, listed.entry.block()};
    }
    FS_DEVICE void advance(Step& step) const {
        if constexpr (kOrdered) {
            if (++step.head == first_head + n_heads)
                step.head = first_head, step.block += direction;
        } else {
            if (++step.block == blocks.end) step.block = blocks.begin, ++step.head;
        }
    }
    // The index of the statistics of the first row of a step.
    FS_DEVICE int64_t statistic(const BackwardKernelArgs& args, const Step& step) const {
        return first_statistic<SEMANTICS>(args, batch, step.head, q.first) +
               step.block * Kernel::B_r;
    }
};

}  // namespace flashsmith
