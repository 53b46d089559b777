// The kernel that merges the states of a row's runs, in the tree whose leaves are their parts. Each
// warp of a CTA takes a subtree, eight leaves at a time, and the warps' states form the last two
// levels. With many rows of at most eight runs, each warp has its own row instead. States of few
// runs may be taken as they arrive, while the decode kernel runs.
#pragma once

#include "common/canonical.cuh"
#include "mma_sync_decode/cache_scales.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

FS_DEVICE void wait_for_decode(const DecodeKernelArgs& args) {
    wait_for_launch_before();
    if (block_index() == 0 && thread_index() == 0 && args.run_counter != nullptr)
        *args.run_counter = 0;  // for the next call
}

template <class Kernel, bool kArriving = false>
struct RowMerge {
    static constexpr int kWarps = kMergeThreads / kWarpSize;
    static_assert(kWarps == 4, "two pairs");
    // A lane has four columns of each step. Wider rows are merged one group of columns after
    // another.
    static constexpr int kColumnSteps = Kernel::CFG.merged_steps();
    static constexpr int kGroupColumns = std::min(128 * kColumnSteps, Kernel::d_v);
    static_assert(Kernel::d_v % kGroupColumns == 0);
    // Leaves that are loaded at once, and the tree levels above them within a warp.
    static constexpr int kAhead = 8, kLevelsAbove = 5;
    static_assert(kAhead == 8, "merge_leaves() writes out a tree of eight");
    static_assert(kWarps * kAhead << kLevelsAbove >= kMostParts);
    using States = RowState[kColumnSteps];

    const DecodeKernelArgs& args;
    const int batch, head_k, row;  // row is an index among the rows of the K/V head
    const DecodeSequence s;
    using Shared = float[kWarps][kColumnSteps][kWarpSize][6];
    Shared& shared;

    // Whether the states are taken as they arrive.
    FS_DEVICE bool arrive() const { return kArriving && s.parts <= args.most_arriving; }

    // Locates the states of a row's leaves, starting at leaf `first`.
    struct Leaves {
        const char *sums, *statistics;
        // Bytes from one leaf to the next: at most 32 MiB, since parts times tiles are at most
        // kMostParts.
        uint32_t apart, statistics_apart;

        FS_DEVICE Leaves(const RowMerge& merge, int first, int column = 0) {
            const DecodeSequence& s = merge.s;
            const PartStates<Kernel> kept(merge.args, s, merge.batch, merge.head_k);
            const int part = first << s.run_levels;
            sums = reinterpret_cast<const char*>(kept.sums(part, merge.row) + column);
            statistics = reinterpret_cast<const char*>(kept.statistics(part, merge.row));
            apart = static_cast<uint32_t>(kept.rows) * (Kernel::d_v * 4) << s.run_levels;
            statistics_apart = 8u << s.run_levels;
        }
        FS_DEVICE RowState load(uint32_t leaf, int column) const {
            const float2 its =
                *reinterpret_cast<const float2*>(statistics + uint64_t{leaf} * statistics_apart);
            return RowState(its, load_global_16B(sums + uint64_t{leaf} * apart + column * 4));
        }
    };

    // `alone`: this warp merges the row, otherwise all warps of the CTA do. `waits`: waits for the
    // decode kernel first. `warms_up`: merges nothing, and only makes the SM fetch the
    // instructions.
    FS_DEVICE void run(bool alone, bool waits, bool warms_up = false) const {
        const int warp = alone ? 0 : thread_index() / kWarpSize, lane = lane_index();
        // The number of leaves of a subtree is a power of two.
        int leaves = 1;
        while (leaves * (alone ? 1 : kWarps) < s.runs) leaves *= 2;
        const int begin = warp * leaves, end = min(begin + leaves, s.runs);
        const Leaves own(*this, begin);
        if (waits && !arrive()) wait_for_decode(args);
        if (!warms_up && (s.runs == 1 || row >= s.queries * args.heads_per_group)) return;
        if constexpr (Kernel::canonical) {
            if (warp == 0) merge_chunks(0, lane, warms_up);
            if constexpr (kGroupColumns < Kernel::d_v)
#pragma unroll 1
                for (int first = kGroupColumns; first < Kernel::d_v; first += kGroupColumns)
                    if (warp == 0) merge_chunks(first, lane, warms_up);
            return;
        }
        merge_columns(0, own, begin, end, alone, warms_up);
#pragma unroll 1
        for (int first = kGroupColumns; first < Kernel::d_v; first += kGroupColumns) {
            // Warp 0 has read the states of the preceding group of columns in shared memory, which
            // this group overwrites.
            if (!alone) __syncthreads();
            merge_columns(first, Leaves(*this, begin, first), begin, end, alone, warms_up);
        }
    }

    // Merges a group of columns that begins with column `first`.
    FS_DEVICE void merge_columns(int first, const Leaves& own, int begin, int end, bool alone,
                                 bool warms_up) const {
        const int warp = alone ? 0 : thread_index() / kWarpSize, lane = lane_index();
        States states;
        const int count = warms_up ? 0 : end - begin;
        if (arrive())
            take_arriving(states, begin, count, first, lane);
        else
            merge_leaves(states, own, count, lane, warms_up);
        if (!warms_up && begin + kAhead < end) add_others(states, begin + kAhead, end, first, lane);
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
                RowState left = of_warp(1, c, lane), right = of_warp(3, c, lane);
                left.merge_after(states[c]);
                right.merge_after(of_warp(2, c, lane));
                right.merge_after(left);
                states[c] = right;
            }
        }
        const int query = args.by_group.divide(row);
        const int head = head_k * args.heads_per_group + row - query * args.heads_per_group;
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            const int column = first + 128 * c + 4 * lane;
            if (column >= Kernel::d_v || warms_up) continue;
            store_row<Kernel>(args, states[c], row_end<Kernel>(args, states[c], head, head_k),
                              batch, s.first_query, query, head, column);
        }
    }

    // Merges one chunk after another. Each is a leaf. `first_column` is the first of a group.
    FS_DEVICE void merge_chunks(int first_column, int lane, bool warms_up) const {
        const int count = warms_up ? 1 : s.runs;
        RowStatistics row{0.0f, 0.0f};
        float o[kColumnSteps][4] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += kAhead) {
            const Leaves leaves(*this, first, first_column);
            RowState states[kAhead][kColumnSteps];
            if (!warms_up) {
                load_four<0>(states, leaves, count - first, lane);
                load_four<kAhead / 2>(states, leaves, count - first, lane);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const StateMerge merge(row, {states[i][0].maximum, states[i][0].sum});
#pragma unroll
                for (int c = 0; c < kColumnSteps; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[c][e] = merge.merged(o[c][e], states[i][c].o[e]);
            }
        }
        const int query = args.by_group.divide(this->row);
        const int head = head_k * args.heads_per_group + this->row - query * args.heads_per_group;
        const CanonicalEnd end(row, args.sinks == nullptr ? nullptr : args.sinks + head);
        if (warms_up) return;
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            const int column = first_column + 128 * c + 4 * lane;
            const auto scaled = [&](int e) {
                return canonical_element<Kernel>(args, o[c][e], end.factor, head_k);
            };
            if (column < d_of_v<Kernel>(args))
                store_global_8B(row_of_o(args, batch, s.first_query, query, head, column),
                                {pack_16bit<typename Kernel::value_t>(scaled(0), scaled(1)),
                                 pack_16bit<typename Kernel::value_t>(scaled(2), scaled(3))});
        }
        if (lane == 0 && first_column == 0)
            store_lse(args, end.lse, batch, s.first_query, query, head);
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

    // Loads four of `count` leaves. Leaves past the end have no keys.
    template <int kFrom>
    FS_DEVICE static void load_four(RowState (&states)[kAhead][kColumnSteps], const Leaves& leaves,
                                    int count, int lane) {
        // Branch-free, so that all loads start together.
#pragma unroll
        for (int i = kFrom; i < kFrom + kAhead / 2; ++i) {
            const int leaf = min(i, count - 1);
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                states[i][c] = leaves.load(leaf, min(128 * c + 4 * lane, kGroupColumns - 4));
                if (leaf < i) states[i][c].sum = 0.0f;
            }
        }
    }

    FS_DEVICE static void join_neighbours(RowState (&leaves)[kAhead][kColumnSteps], int left,
                                          int right) {
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            leaves[right][c].merge_after(leaves[left][c]);
            leaves[left][c] = leaves[right][c];
        }
    }

    // Merges the subtree of the first kAhead leaves, or of all `count` leaves if these are fewer.
    FS_DEVICE static void merge_leaves(States& merged, const Leaves& leaves, int count, int lane,
                                       bool warms_up = false) {
        RowState states[kAhead][kColumnSteps];
        const bool has_more = warms_up || count > kAhead / 2;
        if (count > 0) load_four<0>(states, leaves, count, lane);
        if (count > kAhead / 2) load_four<kAhead / 2>(states, leaves, count, lane);
        join_neighbours(states, 0, 1);
        join_neighbours(states, 2, 3);
        join_neighbours(states, 0, 2);
        if (has_more) {
            join_neighbours(states, 4, 5);
            join_neighbours(states, 6, 7);
            join_neighbours(states, 4, 6);
            join_neighbours(states, 0, 4);
        }
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) merged[c] = states[0][c];
    }

    // Merges `count` leaves, at most four, as soon as all of their words have arrived, and resets
    // the words to zero for the next call. All CTAs of the decode kernel that sends them have
    // already begun.
    FS_DEVICE void take_arriving(States& merged, int first, int count, int first_column,
                                 int lane) const {
        static_assert(kMostArrivingParts <= kWarps * kAhead / 2);
        const ArrivingStates<Kernel> memory(args, head_k, s.queries * args.heads_per_group,
                                            s.parts);
        const int last = count > 0 ? first + count - 1 : 0;  // a warp without leaves reads leaf 0
        uint4 sums[kAhead / 2][kColumnSteps];
        uint2 statistics[kAhead / 2];
        bool is_all;
        do {
            is_all = true;
#pragma unroll
            for (int i = 0; i < kAhead / 2; ++i) {
                const int part = min(first + i, last);
                statistics[i] = poll_global_8B(memory.statistics_of(part, row));
#pragma unroll
                for (int c = 0; c < kColumnSteps; ++c)
                    sums[i][c] = poll_global_16B(memory.sums_of(part, row) + first_column +
                                                 min(128 * c + 4 * lane, kGroupColumns - 4));
            }
#pragma unroll
            for (int i = 0; i < kAhead / 2; ++i) {
                is_all &= statistics[i].x != 0 && statistics[i].y != 0;
#pragma unroll
                for (int c = 0; c < kColumnSteps; ++c)
                    is_all &= sums[i][c].x != 0 && sums[i][c].y != 0 && sums[i][c].z != 0 &&
                              sums[i][c].w != 0;
            }
        } while (count > 0 && !is_all);
        __syncwarp();  // some lanes read the same words, which are now reset
        RowState states[kAhead][kColumnSteps];
#pragma unroll
        for (int i = 0; i < kAhead / 2; ++i) {
            const float2 its{memory.received(statistics[i].x), memory.received(statistics[i].y)};
            if (lane == 0 && i < count && first_column + kGroupColumns == Kernel::d_v)
                send_global_8B(memory.statistics_of(first + i, row), {0, 0});
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                const int column = first_column + 128 * c + 4 * lane;
                if (column < Kernel::d_v && i < count)
                    send_global_16B(memory.sums_of(first + i, row) + column, {0, 0, 0, 0});
                const uint4 x = sums[i][c];
                states[i][c] = RowState(its, {~x.x, ~x.y, ~x.z, ~x.w});
                if (i >= count) states[i][c].sum = 0.0f;
            }
        }
        join_neighbours(states, 0, 1);
        join_neighbours(states, 2, 3);
        join_neighbours(states, 0, 2);
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) merged[c] = states[0][c];
    }

    // Adds a warp's other subtrees to its first one.
    FS_DEVICE void add_others(States& states, int first, int end, int column, int lane) const {
        RowState waiting[kLevelsAbove][kColumnSteps];
        add(waiting, states, 0);
        int count = 1;
        for (; first < end; first += kAhead, ++count) {
            merge_leaves(states, Leaves(*this, first, column), end - first, lane);
            add(waiting, states, count);
        }
        join_waiting(states, waiting, count);
    }

    // Adds subtree `index`; joins it with its left sibling, and so on, until one must wait.
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
        // If the tree of subtrees is full, no subtree is waiting: the last one's state is the
        // result.
        if (count >> kLevelsAbove != 0) return;
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

// Rows of sequences with several runs, except those that clusters have merged. A work item is one
// row or, if warps merge alone, one row for each warp.
template <class Kernel>
struct MergedRows {
    static constexpr bool kHasWholeRuns = false;
    // Whether a sequence has few enough runs for one warp to merge a row alone, with the loads of
    // all leaves issued at once.
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

// Merges one row per CTA.
template <class Kernel, bool kArriving>
FS_DEVICE void merge_one_row(const DecodeKernelArgs& args) {
    using Merge = RowMerge<Kernel, kArriving>;
    __shared__ typename Merge::Shared shared;
    static_assert(sizeof shared == Kernel::merge_smem_bytes);
    const int sequence_head = args.by_merged_rows.divide(block_index());
    const int row = static_cast<int>(block_index()) - sequence_head * args.merged_rows;
    const int batch = args.by_heads_k.divide(sequence_head);
    // The next launch prefetches its keys meanwhile. Before its own wait it may read only data for
    // which an older value is acceptable.
    allow_next_launch();
    const DecodeSequence s = sequence_of<Kernel>(args, batch, share_of_cta<Kernel>(args));
    const Merge merge{args, batch, sequence_head - batch * args.heads_k, row, s, shared};
    // Fetching instructions that the SM does not have yet takes longer than everything else here.
    // If the SM has room for this CTA next to the decode kernel's, the CTA fetches them while that
    // kernel runs.
#pragma unroll 1
    for (int pass = args.warms_up != 0 ? 0 : 1; pass < 2; ++pass) {
        merge.run(false, pass == 1, pass == 0);
        // Warp 0 has read the warm-up's states in shared memory, which the next pass overwrites.
        __syncthreads();
    }
    // A launch that waits for this one also waits for earlier launches.
    if (merge.arrive()) wait_for_decode(args);
}

template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads)
    decode_merge_kernel(const typename Kernel::ScaledArgs args) {
    merge_one_row<Kernel, false>(args);
}

// Merges one row per CTA, and takes the states of its few parts as they arrive.
template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads)
    decode_merge_arriving_kernel(const typename Kernel::ScaledArgs args) {
    merge_one_row<Kernel, true>(args);
}

// CTAs that search for rows. If there are many rows, one CTA per row would cost more. These CTAs
// begin while the decode kernel runs, and have found their rows when it is over.
template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads)
    decode_merge_rows_kernel(const typename Kernel::ScaledArgs args) {
    using Merge = RowMerge<Kernel>;
    __shared__ typename Merge::Shared shared;
    static_assert(sizeof shared == Kernel::merge_smem_bytes);
    allow_next_launch();
    WorkCursor cursor(share_of_cta<Kernel>(args), block_index());
    DecodeSequence s;
    int batch, rest;
    bool waits = true;
    while (find_sequence<Kernel, MergedRows<Kernel>>(args, cursor, batch, s, rest)) {
        const bool alone = MergedRows<Kernel>::are_alone(s);
        int row = args.by_heads_k.divide(rest);
        const int head_k = rest - row * args.heads_k;
        if (alone) row = row * Merge::kWarps + thread_index() / kWarpSize;
        Merge{args, batch, head_k, row, s, shared}.run(alone, waits);
        waits = false;
        if (!alone) __syncthreads();  // the next row's data overwrite what is read here
        cursor.index += gridDim.x;
    }
    if (waits) wait_for_decode(args);
}

}  // namespace flashsmith
