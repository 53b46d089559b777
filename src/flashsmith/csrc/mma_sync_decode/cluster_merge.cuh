// Merges a tile's runs in the shared memory of a cluster.
#pragma once

#include "common/barrier.cuh"
#include "mma_sync_decode/row_state.cuh"

namespace flashsmith {

// The states of a tile's runs in the shared memory of a cluster. Each CTA pushes its run's states
// to the CTAs that merge them, in groups of eight threads' columns. It merges its own columns once
// all states have arrived. Nothing goes through global memory.
template <class Kernel>
struct ClusterMerge {
    static constexpr int kColumns = Kernel::d_v / 4, kGroup = 8, kBytes = 32;
    static constexpr int kMostRuns = Kernel::CFG.cluster;
    static_assert(kColumns % kGroup == 0);

    const uint32_t barrier, states;
    const int levels, rank, groups;  // groups: the most that a CTA has

    FS_DEVICE ClusterMerge(const DecodeKernelArgs& args, uint32_t smem, int rows)
        : barrier(barrier_of(args, smem)),
          states(barrier + 16),
          levels(args.cluster_levels),
          rank(cluster_rank()),
          groups(((rows * kColumns / kGroup - 1) >> levels) + 1) {}

    // The address of the barrier, which lies after the states of a run's subtrees.
    FS_DEVICE static uint32_t barrier_of(const DecodeKernelArgs& args, uint32_t smem) {
        return smem + Kernel::saved_states_offset + args.kept_levels * args.kept_level_bytes;
    }
    // Initialises the barrier. Must come before any CTA of the cluster pushes.
    FS_DEVICE static void begin(const DecodeKernelArgs& args, uint32_t smem) {
        if (thread_index() == 0) {
            mbarrier_init(barrier_of(args, smem), 1);
            mbarrier_init_fence();
        }
        __syncwarp();
        cluster_arrive();
    }
    FS_DEVICE int own_columns(int rows) const {
        const int all = rows * kColumns / kGroup;
        return rank < all ? (((all - 1 - rank) >> levels) + 1) * kGroup : 0;
    }
    FS_DEVICE void expect(int rows, int runs) const {
        if (thread_index() == 0) mbarrier_arrive_expect(barrier, own_columns(rows) * runs * kBytes);
    }
    FS_DEVICE uint32_t address(int run, int index) const {
        return states + (run * groups * kGroup + index) * kBytes;
    }
    // `index` counts groups of four columns over all rows.
    FS_DEVICE void push(const RowState& state, int run, int index) const {
        const int group = index / kGroup;
        const int cta = group & ((1 << levels) - 1);
        const uint32_t there =
            cluster_address(address(run, (group >> levels) * kGroup + index % kGroup), cta);
        const uint32_t remote_barrier = cluster_address(barrier, cta);
        const uint2 statistics = state.bits_of_statistics();
        store_remote_16B(there, remote_barrier, state.bits_of_sums());
        store_remote_16B(there + 16, remote_barrier, {statistics.x, statistics.y, 0, 0});
    }
    // For several pushes to one group, whose first address is computed only once.
    struct Group {
        uint32_t address, barrier;
    };
    FS_DEVICE Group group_of(int run, int group) const {
        const int cta = group & ((1 << levels) - 1);
        return {cluster_address(address(run, (group >> levels) * kGroup), cta),
                cluster_address(barrier, cta)};
    }
    FS_DEVICE static void push(const RowState& state, const Group& group, int within) {
        const uint32_t there = group.address + within * kBytes;
        const uint2 statistics = state.bits_of_statistics();
        store_remote_16B(there, group.barrier, state.bits_of_sums());
        store_remote_16B(there + 16, group.barrier, {statistics.x, statistics.y, 0, 0});
    }
    // Maps `own`, an index into this CTA's columns, to an index into the columns of all CTAs.
    FS_DEVICE int index_of(int own) const {
        return ((own / kGroup << levels) + rank) * kGroup + own % kGroup;
    }
    FS_DEVICE RowState merged(int runs, int own) const {
        // Branch-free, so that loads and merges overlap.
        RowState of_runs[kMostRuns];
#pragma unroll
        for (int i = 0; i < kMostRuns; ++i) {
            const uint32_t at = address(min(i, runs - 1), own);
            of_runs[i] = RowState(load_shared_float2(at + 16), load_shared_16B(at));
            if (i >= runs) of_runs[i].sum = 0.0f;
        }
#pragma unroll
        for (int step = 1; step < kMostRuns; step *= 2)
#pragma unroll
            for (int i = 0; i < kMostRuns; i += 2 * step) {
                of_runs[i + step].merge_after(of_runs[i]);
                of_runs[i] = of_runs[i + step];
            }
        return of_runs[0];
    }
};

}  // namespace flashsmith
