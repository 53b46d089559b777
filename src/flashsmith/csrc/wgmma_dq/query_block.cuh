// The work of a CTA: a block of queries of one head, and the blocks of keys that they see.
#pragma once

#include "backward/key_mask.cuh"
#include "backward/listed_steps.cuh"
#include "backward/rows.cuh"
#include "wgmma_dq/static_kernel_configuration.cuh"

namespace flashsmith {

template <class Kernel>
struct QueryBlock {
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    int batch, head, head_k, first_row;
    SequenceRows q, k;
    BackwardKeyMask<SEMANTICS> key_mask;
    BlockRange blocks;  // blocks of keys; with lists, places in a list
    const int32_t* list;

    // The blocks of a head, and the heads of a group, run at about the same time, so that they find
    // the keys in the L2. Under a causal mask, the last queries see the most keys, and come first.
    FS_DEVICE QueryBlock(const typename Kernel::Args& launch, uint32_t number)
        : key_mask(launch.problem, 0, 0), blocks{0, 0, 0, 0} {
        const BackwardKernelArgs& args = launch.problem;
        const uint32_t n_blocks = (args.seq_q + Kernel::B_r - 1) / Kernel::B_r;
        const uint32_t sequence = number / n_blocks;
        const uint32_t place = number - sequence * n_blocks;
        first_row = (kTriangular<SEMANTICS> ? n_blocks - 1 - place : place) * Kernel::B_r;
        batch = sequence / args.heads_q;
        head = sequence % args.heads_q;
        head_k = head / (args.heads_q / args.heads_k);
        q = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_q, batch, args.seq_q, args.total_q);
        k = sequence_rows<SEMANTICS.packed>(args.cu_seqlens_k, batch, args.seq_k, args.total_k);
        key_mask = BackwardKeyMask<SEMANTICS>(args, q.count, k.count);
        if constexpr (Kernel::has_lists) {
            list =
                key_lists<Kernel>(args, launch.program).list(batch, head, first_row / Kernel::B_r);
            if (exists()) blocks.end = list[0];
        } else {
            if (exists()) blocks = key_mask.key_blocks(first_row, Kernel::B_r, Kernel::B_c);
        }
    }

    // In a packed batch, each sequence has as many blocks as the longest one needs.
    FS_DEVICE bool exists() const { return !SEMANTICS.packed || first_row < q.count; }
    FS_DEVICE int n_steps() const { return max(blocks.end - blocks.begin, 0); }
};

}  // namespace flashsmith
