// The partner of a consumer warpgroup computes the right half of O's columns, if O is too wide for
// one warpgroup's registers.
//
// The consumer alone computes scores and probabilities, so that Q K^T is computed once, with a
// wgmma for all keys of a block. It sends P to the partner, and both multiply it by their half of
// V. The consumer continues with the next block's scores while the partner's product runs.
#pragma once

#include "sm90_forward/consumer.cuh"

namespace flashsmith {

template <class Kernel>
struct Partner : Consumer<Kernel> {
    using Base = Consumer<Kernel>;
    using Base::args, Base::tile, Base::P, Base::O, Base::O_factors, Base::O_is_begun, Base::V,
        Base::warp, Base::lane, Base::messages, Base::row_weights;
    static constexpr int kRightPanels =
        Kernel::O_columns / Kernel::Panel::kColumns * Kernel::KV_panel_bytes;

    const OutputStore<Kernel, Kernel::O_columns> right_output;

    FS_DEVICE Partner(const typename Kernel::Args& args, uint32_t smem, int warpgroup)
        : Base(args, smem, warpgroup), right_output{args, warp, lane} {}

    FS_DEVICE void run() {
        while (this->receive_tile()) {
            __syncwarp();  // after this, no lane reads the tile's info any more
            if (lane == 0) mbarrier_arrive(this->Q_barriers().empty(this->slot()));
            const BlockRange mine = this->blocks_of_warpgroup();
            if constexpr (Kernel::canonical)
                add_canonically(mine);
            else
                add_all(mine);
            messages.receive(row_weights[0]);
            store_tile();
            this->Q_state.advance();
        }
    }

  private:
    FS_DEVICE void add_all(const BlockRange& mine) {
        skip_values(tile.block_end - mine.end);
        O_is_begun = false;
#pragma unroll 1
        for (int block = mine.end; block > mine.begin; --block) add_block();
        if (!O_is_begun) zero(O);
        skip_values(mine.begin - tile.block_begin);
    }
    // From the first block on, chunk by chunk, as the consumer does.
    FS_DEVICE void add_canonically(const BlockRange& mine) {
        skip_values(mine.begin - tile.block_begin);
        zero(O);
#pragma unroll 1
        for (int block = mine.begin; block < mine.end;) {
            const int end = this->end_of_chunk(block, mine);
            const bool is_first = block == mine.begin;
            O_is_begun = false;
#pragma unroll 1
            for (; block < end; ++block) add_block();
            if (!is_first) merge_chunk();
            if (end < mine.end) running_state().store(O);
        }
        skip_values(tile.block_end - max(mine.end, tile.block_begin));
    }
    FS_DEVICE void merge_chunk() {
        float weights[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) messages.receive(weights[r]);
        const StateMerge merge[2] = {StateMerge(weights[0]), StateMerge(weights[1])};
        running_state().merge_into(merge, O);
    }
    FS_DEVICE RunningState<Kernel> running_state() const {
        return RunningState<Kernel>(this->problem, opaque(Kernel::n_warpgroups));
    }
    // O = O * factors + P V.
    FS_DEVICE void add_block() {
        messages.receive(P, O_factors);
        const bool rescales = O_factors[0] != 1.0f || O_factors[1] != 1.0f;
        if (O_is_begun && any_lane(rescales)) this->softmax.rescale(O, O_factors);
        V.consumer_wait();
        const uint64_t v =
            Kernel::Panel::descriptor(V.tile() + kRightPanels, Kernel::KV_panel_bytes);
        wgmma_fence(O, P);
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step)
            Kernel::GEMM_PV::run(O, P[step], v + Kernel::Panel::row_step(step),
                                 step > 0 || O_is_begun);
        wgmma_commit();
        O_is_begun = true;
        this->finish_PV_gemm();
    }
    // Skips blocks that only the other CTA of a cluster sees.
    FS_DEVICE void skip_values(int blocks) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            V.consumer_wait();
            V.consumer_release(warp, lane);
        }
    }
    FS_DEVICE void store_tile() {
        this->softmax.normalize(O, row_weights);
        if (this->is_part()) {
            if constexpr (Kernel::splits_keys) right_output.store_part(O, tile, tile.first_row);
        } else if constexpr (Kernel::SEMANTICS.partial) {
            right_output.store_fp32(O, tile, tile.first_row);
        } else {
            right_output.store_directly(O, tile, tile.first_row);
        }
    }
};

}  // namespace flashsmith
