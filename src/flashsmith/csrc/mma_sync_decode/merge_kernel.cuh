// The kernel that merges the states of a row's runs, in the tree that their parts are leaves of.
// Each warp of a CTA takes a subtree of it, eight leaves at a time, and the warps' states are the
// last two levels; or, of many rows with eight runs at most, each warp has a row of its own.
#pragma once

#include "mma_sync_decode/row_state.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

template <class Kernel>
struct RowMerge {
    static constexpr int kWarps = kMergeThreads / kWarpSize;
    static_assert(kWarps == 4, "two pairs");
    static constexpr int kColumnSteps = (Kernel::d_head + 127) / 128;  // a lane has four columns
    // Leaves whose loads are on their way at once, and levels of the tree above them in a warp.
    static constexpr int kAhead = 8, kLevelsAbove = 5;
    static_assert(kWarps * kAhead << kLevelsAbove >= kMostParts);
    using States = RowState[kColumnSteps];

    const DecodeKernelArgs& args;
    const int batch, head_k, row;  // of the K/V head's rows
    const DecodeSequence s;
    using Shared = float[kWarps][kColumnSteps][kWarpSize][6];
    Shared& shared;

    // `alone`: by this warp, else by all of the CTA's.
    FS_DEVICE void run(bool alone) const {
        const int warp = alone ? 0 : thread_index() / kWarpSize, lane = lane_index();
        // Of a tree with a power of two of leaves.
        int leaves = 1;
        while (leaves * (alone ? 1 : kWarps) < s.runs) leaves *= 2;
        const int begin = warp * leaves, end = min(begin + leaves, s.runs);
        States states;
        merge_leaves(states, begin, end, lane);
        if (begin + kAhead < end) add_others(states, begin + kAhead, end, lane);
        if (!alone) {
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                float (&mine)[6] = shared[warp][c][lane];
#pragma unroll
                for (int e = 0; e < 4; ++e) mine[e] = states[c].o[e];
                mine[4] = states[c].sum;
                mine[5] = states[c].maximum;
            }
            __syncthreads();
            if (warp > 0) return;
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                RowState right = of_warp(2, c, lane);
                states[c].join(of_warp(1, c, lane));
                right.join(of_warp(3, c, lane));
                states[c].join(right);
            }
        }
        const int query = args.by_group.divide(row);
        const int head = head_k * args.heads_per_group + row - query * args.heads_per_group;
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            const int column = 128 * c + 4 * lane;
            if (column >= Kernel::d_head) continue;
            store_row<typename Kernel::value_t>(args, states[c], row_end(args, states[c], head),
                                                batch, s.first_query, query, head, column);
        }
    }

    FS_DEVICE RowState of_warp(int warp, int c, int lane) const {
        const float (&its)[6] = shared[warp][c][lane];
        RowState state;
#pragma unroll
        for (int e = 0; e < 4; ++e) state.o[e] = its[e];
        state.sum = its[4];
        state.maximum = its[5];
        return state;
    }

    // The subtree of the leaves from `first` on, those from `end` on without keys.
    FS_DEVICE void merge_leaves(States& merged, int first, int end, int lane) const {
        const PartStates<Kernel> kept(args, s, batch, head_k);
        RowState ahead[kAhead][kColumnSteps];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                const int column = 128 * c + 4 * lane;
                if (first + i < end && column < Kernel::d_head)
                    ahead[i][c] = kept.load((first + i) << s.run_levels, row, column);
            }
#pragma unroll
        for (int step = 1; step < kAhead; step *= 2)
#pragma unroll
            for (int i = 0; i < kAhead; i += 2 * step)
#pragma unroll
                for (int c = 0; c < kColumnSteps; ++c) ahead[i][c].join(ahead[i + step][c]);
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) merged[c] = ahead[0][c];
    }

    // To the first subtree of a warp those behind it.
    FS_DEVICE void add_others(States& states, int first, int end, int lane) const {
        RowState waiting[kLevelsAbove][kColumnSteps];
        add(waiting, states, 0);
        int count = 1;
        for (; first < end; first += kAhead, ++count) {
            merge_leaves(states, first, end, lane);
            add(waiting, states, count);
        }
        join_waiting(states, waiting, count);
    }

    // Subtree `index` of equal ones joins those before it that are complete with it.
    FS_DEVICE static void add(RowState (&waiting)[kLevelsAbove][kColumnSteps], States& states,
                              int index) {
        bool waits = false;
#pragma unroll
        for (int level = 0; level < kLevelsAbove; ++level) {
            if (waits) continue;
            waits = (index >> level & 1) == 0;
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                if (!waits) waiting[level][c].join(states[c]);
                if (!waits) states[c] = waiting[level][c];
                if (waits) waiting[level][c] = states[c];
            }
        }
    }

    FS_DEVICE static void join_waiting(States& states,
                                       RowState (&waiting)[kLevelsAbove][kColumnSteps], int count) {
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) states[c] = RowState();
#pragma unroll
        for (int level = 0; level < kLevelsAbove; ++level)
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c)
                if ((count >> level & 1) != 0) {
                    waiting[level][c].join(states[c]);
                    states[c] = waiting[level][c];
                }
    }
};

FS_DEVICE void wait_for_decode(const DecodeKernelArgs& args) {
    wait_for_launch_before();
    allow_next_launch();
    if (block_index() == 0 && thread_index() == 0 && args.run_counter != nullptr)
        *args.run_counter = 0;  // for the next call
}

// Rows of the sequences that have several runs, but those that clusters have merged: one after
// another, or as many neighbours as there are warps.
template <class Kernel>
struct MergedRows {
    // Whose loads are on their way at once.
    FS_DEVICE static bool are_alone(const DecodeSequence& s) {
        return s.runs <= RowMerge<Kernel>::kAhead;
    }
    FS_DEVICE static uint32_t items(const DecodeKernelArgs& args, const DecodeSequence& s) {
        if (args.cluster_levels > 0 && !s.is_chunk) return 0;
        constexpr int kWarps = RowMerge<Kernel>::kWarps;
        const int rows = s.queries * args.heads_per_group;
        return s.runs > 1 ? (are_alone(s) ? (rows + kWarps - 1) / kWarps : rows) * args.heads_k : 0;
    }
};

// A CTA for each row.
template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads) decode_merge_kernel(const DecodeKernelArgs args) {
    using Merge = RowMerge<Kernel>;
    __shared__ typename Merge::Shared shared;
    static_assert(sizeof shared == Kernel::merge_smem_bytes);
    const int sequence_head = args.by_merged_rows.divide(block_index());
    const int row = static_cast<int>(block_index()) - sequence_head * args.merged_rows;
    const int batch = args.by_heads_k.divide(sequence_head);
    const DecodeSequence s = sequence_of<Kernel>(args, batch, share_of_cta<Kernel>(args));
    wait_for_decode(args);
    if (s.runs == 1 || row >= s.queries * args.heads_per_group) return;
    Merge{args, batch, sequence_head - batch * args.heads_k, row, s, shared}.run(false);
}

// CTAs that look for rows. Where rows are many, a CTA for each would cost more: these begin beside
// the decode kernel's, and have found theirs when that is over.
template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads)
    decode_merge_rows_kernel(const DecodeKernelArgs args) {
    using Merge = RowMerge<Kernel>;
    __shared__ typename Merge::Shared shared;
    static_assert(sizeof shared == Kernel::merge_smem_bytes);
    ItemSearch search(share_of_cta<Kernel>(args), block_index());
    DecodeSequence s;
    int batch, rest;
    bool waits = true;
    while (find_sequence<Kernel, MergedRows<Kernel>>(args, search, batch, s, rest)) {
        if (waits) wait_for_decode(args);
        waits = false;
        const bool alone = MergedRows<Kernel>::are_alone(s);
        int row = args.by_heads_k.divide(rest);
        const int head_k = rest - row * args.heads_k;
        if (alone) row = row * Merge::kWarps + thread_index() / kWarpSize;
        if (row < s.queries * args.heads_per_group)
            Merge{args, batch, head_k, row, s, shared}.run(alone);
        if (!alone) __syncthreads();  // the next row's warps write where this one's are read
        search.index += gridDim.x;
    }
    if (waits) wait_for_decode(args);
}

}  // namespace flashsmith
