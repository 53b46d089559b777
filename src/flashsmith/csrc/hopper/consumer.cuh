// A consumer warpgroup: attention for 64 rows of Q of one tile after the other.
#pragma once

#include "output.cuh"
#include "row_softmax.cuh"
#include "turns.cuh"

namespace flashsmith {

template <class Kernel>
struct Consumer {
    static constexpr HopperForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    const HopperForwardKernelArgs& args;
    const ForwardKernelArgs& problem;
    const uint32_t smem;
    const int warpgroup, warp, lane;
    const Turns<Kernel> turns;

    RingPlace<CFG.q_buffers> buffer;
    TileRing<CFG.kv_stages, Kernel::KV_tile_bytes, CFG.cluster_size> K, V;
    OutputStore<Kernel> output;
    WorkTile tile;

    RowSoftmax<Kernel::masked, CFG.rescale_threshold != 0, CFG.exp2_fma_share> softmax;
    typename Kernel::S_t S;
    typename Kernel::P_t P;
    typename Kernel::O_t O;
    bool O_is_begun;

    FS_DEVICE Consumer(const HopperForwardKernelArgs& args, uint32_t smem, int warpgroup)
        : args(args),
          problem(args.problem),
          smem(smem),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpLanes % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          turns{warpgroup},
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          output{args, warp, lane},
          softmax(problem.scale_log2) {}

    // ---- the algorithm ----

    FS_DEVICE void run() {
        turns.open();
        while (receive_tile()) {
            const BlockRange mine = blocks_of_warpgroup();
            // Every warpgroup takes as many turns as the tile has blocks after the first.
            pass_by(tile.block_end - mine.end, tile.n_blocks() - 1);
            if (mine.begin < mine.end)
                attend(mine);
            else
                see_nothing();
            pass_by(mine.begin - tile.block_begin, tile.n_blocks() - 1);
            finish_tile();
        }
        output.finish();
    }

    // Last block first: masks and ragged ends mostly concern the last blocks of a row.
    FS_DEVICE void attend(const BlockRange& blocks) {
        int block = blocks.end - 1;
        O_is_begun = false;
        K.wait_full();
        start_QK();
        finish_QK<0>();
        output.drain();
        score<true>(block, blocks);
        pack_P();

#pragma unroll 1
        while (--block >= blocks.begin) {
            K.wait_full();
            V.wait_full();
            turns.template wait<PingPong::gemm>();
            if constexpr (CFG.overlap) {
                start_QK();
                start_PV();
                turns.template pass_on<PingPong::gemm>();
                finish_QK<1>();
                score<false>(block, blocks);
                finish_PV();
            } else {
                start_PV();
                finish_PV();
                start_QK();
                turns.template pass_on<PingPong::gemm>();
                finish_QK<0>();
                score<false>(block, blocks);
            }
            if (O_is_stale) softmax.rescale(O, factors);
            pack_P();
        }
        V.wait_full();
        start_PV();
        finish_PV();
    }

    // ---- products ----

    // S = Q K^T.
    FS_DEVICE void start_QK() {
        using Panel = typename Kernel::Panel;
        const uint64_t q = Panel::descriptor(Q_tile()), k = Panel::descriptor(K.tile());
        wgmma_fence(S);
#pragma unroll
        for (int step = 0; step < Kernel::QK_steps; ++step)
            Kernel::QK::run(S, q + Panel::template column_step<kWarpgroupRows>(step),
                            k + Panel::template column_step<Kernel::B_c>(step), step > 0);
        wgmma_commit();
    }
    template <int kPending>
    FS_DEVICE void finish_QK() {
        wgmma_wait<kPending>(S);
        K.release(warp, lane);
    }

    // O += P V.
    FS_DEVICE void start_PV() {
        using Panel = typename Kernel::Panel;
        const uint64_t v = Panel::descriptor(V.tile(), Kernel::KV_panel_bytes);
        wgmma_fence(O, P);
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            Kernel::PV::run(O, P[step], v + Panel::row_step(step), step > 0 || O_is_begun);
        wgmma_commit();
        O_is_begun = true;
    }
    FS_DEVICE void finish_PV() {
        wgmma_wait<0>(O);
        V.release(warp, lane);
    }

    // ---- between the products ----

    bool O_is_stale;
    float factors[2];  // of O, where it is

    // Scores become probabilities.
    template <bool kFirst>
    FS_DEVICE void score(int block, const BlockRange& blocks) {
        if constexpr (SEMANTICS.softcap) tanh_scaled(S, problem.softcap_scale_2log2e);
        if constexpr (Kernel::masked)
            if (blocks.needs_mask(block)) mask(block);
        // Whoever wants the maxima gets every row's.
        const float threshold = problem.row_max == nullptr ? CFG.rescale_threshold : 0;
        O_is_stale = softmax.template raise_maximum<kFirst>(S, factors, threshold);
        turns.template wait<kFirst ? PingPong::none : PingPong::exp>();
        softmax.template exponentiate<kFirst>(S);
        turns.template pass_on<kFirst ? PingPong::none : PingPong::exp>();
    }

    // The accumulator of two neighbouring 16x8 tiles is, rounded and packed, the A operand of a
    // step of 16 keys.
    FS_DEVICE void pack_P() {
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&scores)[4] = S[0][2 * step + i / 2];
                P[step][i] =
                    pack_16bit<typename Kernel::value_t>(scores[i % 2 * 2], scores[i % 2 * 2 + 1]);
            }
    }

    // Scores of keys that a row may not see become -inf.
    FS_DEVICE void mask(int block) {
        const VisibleKeys<SEMANTICS> visible(problem, tile.q_count, tile.k_count);
        const int first_column = block * Kernel::B_c + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KeyRange keys = visible.keys(first_row() + warp * kWarpRows + 8 * r + lane / 4);
            const KeyRange columns{keys.first - first_column, keys.last - first_column};
#pragma unroll
            for (int n = 0; n < Kernel::B_c / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e > columns.last ||
                        (SEMANTICS.mask == MaskKind::window && 8 * n + e < columns.first))
                        S[0][n][2 * r + e] = -INFINITY;
        }
    }

    // ---- tiles ----

    FS_DEVICE int slot() const { return buffer.stage() * Kernel::n_warpgroups + warpgroup; }
    FS_DEVICE uint32_t Q_tile() const {
        return smem + Kernel::Q_offset + slot() * Kernel::Q_tile_bytes;
    }
    FS_DEVICE RingBarriers Q_barriers() const { return {smem + Kernel::Q_barriers}; }
    FS_DEVICE int first_row() const { return tile.first_row + warpgroup * kWarpgroupRows; }

    // Waits for the next tile's Q; false after the last.
    FS_DEVICE bool receive_tile() {
        mbarrier_wait(Q_barriers().full(slot()), buffer.parity());
        read_notice();
        return tile.exists();
    }
    FS_DEVICE void read_notice() {
        tile = WorkTile::load(smem + Kernel::notices + slot() * Kernel::notice_bytes);
    }

    // Of the tile's blocks those that this warpgroup's rows see.
    FS_DEVICE BlockRange blocks_of_warpgroup() const {
        if (first_row() >= tile.q_count) return {tile.block_end, tile.block_end, 0, 0};
        if constexpr (!Kernel::masked) return {tile.block_begin, tile.block_end, 0, 0};
        BlockRange blocks = VisibleKeys<SEMANTICS>(problem, tile.q_count, tile.k_count)
                                .blocks(first_row(), kWarpgroupRows, Kernel::B_c);
        if (blocks.begin >= blocks.end) return {tile.block_end, tile.block_end, 0, 0};
        return blocks;
    }

    // Blocks that only other warpgroups need.
    FS_DEVICE void pass_by(int blocks, int turns_at_most) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            K.wait_full();
            K.release(warp, lane);
            V.wait_full();
            V.release(warp, lane);
            if (i < turns_at_most) turns.skip();
        }
    }

    FS_DEVICE void finish_tile() {
        read_notice();  // again, instead of holding it in registers all the while
        output.drain();
        const float* sinks = problem.sinks;
        softmax.finish(O, sinks == nullptr ? nullptr : sinks + tile.head);
        store_statistics();
        const uint32_t slot_empty = Q_barriers().empty(slot());
        if constexpr (CFG.separate_O) {
            __syncwarp();  // every lane has read the tile's notice
            if (lane == 0) mbarrier_arrive(slot_empty);
            output.start(O, smem + Kernel::O_offset + warpgroup * Kernel::Q_tile_bytes, slot_empty,
                         tile, first_row());
        } else {
            turns.gather_warpgroup();  // no warp's products read Q any more
            output.start(O, Q_tile(), slot_empty, tile, first_row());
            if constexpr (CFG.q_buffers == 1) output.drain();
        }
        buffer.advance();
    }

    FS_DEVICE void see_nothing() {
#pragma unroll
        for (int n = 0; n < Kernel::d_head / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[0][n][e] = 0.0f;
        softmax = decltype(softmax)(problem.scale_log2);
    }

    FS_DEVICE void store_statistics() const {
        if ((problem.lse == nullptr && problem.row_max == nullptr) || lane % 4 != 0) return;
        const int64_t head = tile.batch * problem.lse_batch_stride +
                             tile.head * problem.lse_head_stride + tile.q_first;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row() + warp * kWarpRows + 8 * r + lane / 4;
            if (row >= tile.q_count) continue;
            if (problem.lse != nullptr) problem.lse[head + row] = softmax.row_sum[0][r];
            if (problem.row_max != nullptr) problem.row_max[head + row] = softmax.row_max[0][r];
        }
    }
};

}  // namespace flashsmith
