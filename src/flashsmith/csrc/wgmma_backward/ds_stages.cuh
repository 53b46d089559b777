// The stages of dS in shared memory, for dQ = dS K over all keys of the CTA.
#pragma once

#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "wgmma_backward/key_block.cuh"

namespace flashsmith {

// Stores four 8x8 matrices of 16-bit elements, each transposed. Lane l gives the address of the row
// l % 8 in memory for the matrix l / 8.
FS_DEVICE void stmatrix_x4_transposed(uint32_t smem, const uint32_t (&d)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
        "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
        : "memory");
}

// The stages of dS. A stage is full when all warpgroups have stored their dS, and empty when dQ has
// been computed from it. With shared_dq, it is full when the other CTA's dS has arrived, too, and
// empty when both CTAs have computed dQ from it.
template <class Kernel>
struct dSStages {
    static constexpr int kStages = Kernel::CFG.ds_stages;
    // The number of warps that arrive at a full barrier, and at an empty one.
    static constexpr int kWriters = Kernel::key_groups * kWarpsPerWarpgroup;
    static constexpr bool kShared = Kernel::CFG.shared_dq;
    static constexpr int kReaders =
        (kShared ? 2 * Kernel::n_warpgroups : Kernel::dq_parts_of_cta) * kWarpsPerWarpgroup;

    uint32_t smem;
    PipelineState<kStages> written, read;

    FS_DEVICE static void init(uint32_t smem) {
        const PipelineBarriers barriers{smem + Kernel::dS_barriers};
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(barriers.full(stage), kShared ? 1 : kWriters);
            if constexpr (kShared) mbarrier_init(stored(smem, stage), kWriters);
            mbarrier_init(barriers.empty(stage), kReaders);
        }
    }
    FS_DEVICE PipelineBarriers barriers() const { return {smem + Kernel::dS_barriers}; }
    FS_DEVICE static uint32_t stored(uint32_t smem, int stage) {
        return smem + Kernel::stored_barriers + 8 * stage;
    }
    FS_DEVICE uint32_t tile(int stage) const {
        return smem + Kernel::dS_offset + stage * Kernel::dS_tile_bytes;
    }

    FS_DEVICE uint32_t acquire() const {
        mbarrier_wait(barriers().empty(written.stage()), written.phase() ^ 1);
        return tile(written.stage());
    }
    // Makes this warp's stores visible to wgmma.
    FS_DEVICE void commit(int lane) {
        if constexpr (Kernel::CFG.without_dq) return __syncwarp();
        tma_store_fence();
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(kShared ? stored(smem, written.stage())
                                    : barriers().full(written.stage()));
        written.advance();
    }
    FS_DEVICE uint32_t wait() const {
        mbarrier_wait(barriers().full(read.stage()), read.phase());
        return tile(read.stage());
    }
    FS_DEVICE void release(int lane) {
        const uint32_t empty = barriers().empty(read.stage());
        if (lane == 0) mbarrier_arrive(empty);
        if constexpr (kShared)
            if (lane == 0) mbarrier_arrive_remote(cluster_address(empty, cluster_rank() ^ 1));
        read.advance();
    }
};

// With shared_dq: the thread that sends this CTA's dS to the other CTA.
template <class Kernel>
struct dSSender {
    using Stages = dSStages<Kernel>;

    const BackwardKernelArgs& args;
    const uint32_t smem;

    // A stage in the other CTA is free when it is in this one.
    FS_DEVICE void run() const {
        constexpr uint32_t kBytes = Kernel::dS_panel_bytes;
        const uint32_t peer = cluster_rank() ^ 1;
        const Stages stages{smem};
        PipelineState<Stages::kStages> state;
        int n_steps = KeyBlock<Kernel>(args, key_block_of_cta<Kernel>()).n_steps();
#pragma unroll 1
        for (; n_steps > 0; --n_steps) {
            const int stage = state.stage();
            const uint32_t full = stages.barriers().full(stage);
            mbarrier_wait(Stages::stored(smem, stage), state.phase());
            mbarrier_arrive_expect(full, kBytes);
            copy_shared(cluster_address(stages.tile(stage) + kBytes, peer), stages.tile(stage),
                        kBytes, cluster_address(full, peer));
            state.advance();
        }
    }
};

}  // namespace flashsmith
