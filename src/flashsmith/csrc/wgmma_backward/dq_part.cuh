// The part of dQ = dS K that a warpgroup computes, and how it is added to the fp32 sums in global
// memory.
#pragma once

#include "wgmma_backward/dq_order.cuh"
#include "wgmma_backward/scores.cuh"

namespace flashsmith {

// Adds fp32 numbers in shared memory to numbers in global memory.
FS_DEVICE void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
        "r"(smem), "r"(bytes)
        : "memory");
}
// Waits until everything that this thread adds has been added.
FS_DEVICE void bulk_sums_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class Kernel>
struct dQPart : ConsumerScores<Kernel> {
    using Base = ConsumerScores<Kernel>;
    using Panel = typename Kernel::Panel;
    using Keys = KeyBlock<Kernel>;
    using Base::args, Base::blocks, Base::direction, Base::dq, Base::dq_block, Base::dq_head,
        Base::dq_sums, Base::kSumsBesideScores, Base::lane, Base::n_heads, Base::odd_turns,
        Base::smem, Base::stages, Base::warp, Base::warpgroup, Base::block, Base::first_key,
        Base::first_row, Base::head, Base::rounds_until_dq, Base::key_mask;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;

    using Base::Base;

    // Prepares the first step. Returns the number of steps.
    FS_DEVICE int begin(uint32_t number) {
        const Keys keys(args, number);
        first_key = keys.first_key + first_row();
        blocks = keys.blocks;
        key_mask = BackwardKeyMask<SEMANTICS>(args, keys.q.count, keys.k.count);
        block = keys.first_step().block;
        if constexpr (Kernel::has_lists) blocks = {0, 0, 0, 0};
        dq_block = blocks.begin - 1;
        n_heads = keys.n_heads;
        direction = keys.direction;
        head = 0;
        if constexpr (Kernel::has_program) {
            this->batch = keys.batch;
            this->first_head = keys.first_head;
        }
        dq_head = -1;
        rounds_until_dq = warpgroup;
        if constexpr (Kernel::has_lists) {
            if constexpr (!CFG.without_dq)
                this->first_sums = sums_of_lane(
                    first_statistic<SEMANTICS>(args, keys.batch, keys.first_head, keys.q.first));
            return ListedSteps<Kernel>(this->launch_args, keys).n_steps();
        }
        if constexpr (!CFG.without_dq) dq_sums = first_dq_sums(keys);
        return keys.n_steps();
    }

    // The part of dQ = dS K that this warpgroup computes.
    FS_DEVICE int part() const {
        if constexpr (CFG.cta_pair) return block_index() % 2 * Kernel::n_warpgroups + warpgroup;
        if constexpr (CFG.shared_dq) return block_index() % 2;
        return Kernel::alternates_dq ? 0 : warpgroup;
    }
    FS_DEVICE void start_dq() {
        const int part = this->part();
        using KeysPanel = typename Kernel::KeysPanel;
        const uint32_t tile = stages.wait();
        const int row = Kernel::shares_rows ? part * kWarpgroupRows : 0;
        const uint64_t a = KeysPanel::descriptor(opaque(tile) + row * KeysPanel::kRowBytes);
        const uint64_t b = dq_columns_of_K(part);
        // The first instruction ignores these values. Because they are set to zero, none of them is
        // live from step to step.
        if constexpr (!kSumsBesideScores) zero(dq);
        wgmma_fence(dq);
#pragma unroll
        for (int step = 0; step < Kernel::key_steps; ++step)
            Kernel::dQGemm::run(dq, a + KeysPanel::template column_step<Kernel::B_r>(step),
                                b + Panel::row_step(step), step > 0);
        wgmma_commit();
    }
    // The descriptor of the columns of K for a part.
    FS_DEVICE uint64_t dq_columns_of_K(int part) const {
        const uint32_t K = opaque(smem) + Kernel::K_offset;
        constexpr int kPanel = Kernel::KV_panel_bytes;
        if constexpr (Kernel::halves_a_panel)
            return Panel::descriptor(K + part * kPanel,
                                     part == 0 ? 2 * kPanel : kPanel + Panel::kRowBytes / 2);
        const int column = Kernel::shares_rows ? 0 : part * Kernel::dq_columns;
        return Panel::descriptor(
            K + column / Panel::kColumns * kPanel + column % Panel::kColumns * kElementBytes,
            kPanel);
    }
    // `kBehind` is how many later GEMMs are still running.
    template <int kBehind = 0>
    FS_DEVICE void finish_dq() {
        wgmma_wait<kBehind>(dq);
        if constexpr (Kernel::has_lists) find_dq_sums();
        stages.release(lane);
        advance_dq_sums();
        if constexpr (!kSumsBesideScores) add_dq();
    }
    FS_DEVICE void compute_dq() {
        start_dq();
        finish_dq();
        if constexpr (kSumsBesideScores) add_dq();
    }
    // Adds the last dq, if any, to its sums while another GEMM runs. Without the branch, ptxas
    // would move these instructions in between the GEMMs, and serialise them.
    FS_DEVICE void add_dq() {
        if (CFG.ordered_dq && !Kernel::has_lists ? dq_head < 0 : dq_block < blocks.begin) return;
        if constexpr (CFG.bulk_sums) return add_dq_by_tma();
        dQOrder<Kernel>{smem}.wait(warpgroup, odd_turns);
#pragma unroll
        for (int n = 0; n < Kernel::dq_columns / 8; ++n)
            add_global(dq_sums + n * Kernel::tile_sums,
                       float4{dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]});
        dQOrder<Kernel>{smem}.advance(part(), lane);
    }
    // Adds the whole part of a warp. With `red` instructions, lanes would wait for space in the
    // queue to the L2, and no lane could continue before its registers are read.
    FS_DEVICE void add_dq_by_tma() {
        constexpr uint32_t kBytes = Kernel::warp_lanes * 16;
        const uint32_t place =
            smem + Kernel::sums_offset + (warpgroup * kWarpsPerWarpgroup + warp) * kBytes;
        if (lane == 0) tma_store_wait_read();  // the store of the last block's dq
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Kernel::dq_columns / 8; ++n)
            store_shared_16B(place + (n * kWarpSize + lane) * 16,
                             uint4{__float_as_uint(dq[0][n][0]), __float_as_uint(dq[0][n][1]),
                                   __float_as_uint(dq[0][n][2]), __float_as_uint(dq[0][n][3])});
        tma_store_fence();
        __syncwarp();
        if (lane != 0) return;
        bulk_add(dq_sums, place, kBytes);
        tma_store_commit();
    }

    // The sums of a block are stored part by part, so that a warp adds to 512 contiguous bytes. The
    // address begins one step too early, because it is advanced before each use.
    FS_DEVICE float* first_dq_sums(const Keys& keys) const {
        const int part = this->part();
        const int64_t step = CFG.ordered_dq ? args.statistics_head_stride : Kernel::B_r;
        return args.dq_sums + Kernel::first_dq_sum(keys.statistic(args, keys.first_step()) - step) +
               part * Kernel::part_sums + (warp * Kernel::warp_lanes + lane) * 4;
    }
    // With lists: the address of this lane's sums for the block of queries whose statistics begin
    // at `statistic`.
    FS_DEVICE float* sums_of_lane(int64_t statistic) const {
        return args.dq_sums + Kernel::first_dq_sum(statistic) + this->part() * Kernel::part_sums +
               (warp * Kernel::warp_lanes + lane) * 4;
    }
    // With lists: finds the sums of the step that the stage of dS stores.
    FS_DEVICE void find_dq_sums() {
        const auto step =
            ListedStep::load(smem + Kernel::dS_entries + 8 * stages.read.stage(), lane);
        dq_block = step.entry.block();
        dq_sums = this->first_sums + Kernel::first_dq_sum(step.head * args.statistics_head_stride +
                                                          dq_block * Kernel::B_r);
    }
    FS_DEVICE void advance_dq_sums() {
        if constexpr (Kernel::has_lists) return;
        constexpr int kBlock = Kernel::dq_block_floats;
        if constexpr (CFG.ordered_dq) {
            const int64_t head_sums = Kernel::first_dq_sum(args.statistics_head_stride);
            dq_sums += head_sums;
            if (++dq_head < n_heads) return;
            dq_head = 0;
            dq_sums += direction * kBlock - n_heads * head_sums;
            return;
        }
        dq_sums += kBlock;
        if (++dq_block < blocks.end) return;
        dq_block = blocks.begin;
        dq_sums += Kernel::first_dq_sum(args.statistics_head_stride) -
                   (blocks.end - blocks.begin) * int64_t{kBlock};
    }

    // If it is this warpgroup's turn, computes the whole next dq.
    FS_DEVICE void alternate_dq() {
        if (rounds_until_dq == 0) {
            compute_dq();
        } else {
            stages.read.advance();
            advance_dq_sums();
        }
        rounds_until_dq = rounds_until_dq == 0 ? Kernel::n_warpgroups - 1 : rounds_until_dq - 1;
    }
};

}  // namespace flashsmith
