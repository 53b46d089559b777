// Heads so wide that the sums of a tile do not fit in the registers of a warp: every warp has all
// keys of a stage, and every n_warps-th group of 16 columns of o.
//
// A warp computes the scores of half of a step's keys over half of the columns of q and k. All
// warps add these shares in the same order and compute all probabilities, so all have the same
// maxima and sums. Two barriers per step replace the merge of warps' states.
#pragma once

#include "common/code_fragments.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_decode/part_merge.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct OwnColumns : PartMerge<Kernel, kPaged> {
    using Base = PartMerge<Kernel, kPaged>;
    using value_t = typename Kernel::value_t;
    using KeysLayout = typename Kernel::KeysLayout;
    using Base::args, Base::finish_part, Base::lane, Base::rows, Base::smem, Base::state_of_warps,
        Base::statistics, Base::sums, Base::warp;
    using typename Base::Softmax, typename Base::Sums;
    static constexpr int kShareTiles = Kernel::key_tiles / 2;  // the 8-key tiles of a warp's share

    using Base::Base;

    FS_DEVICE int key_half() const { return warp / 2; }
    FS_DEVICE int column_half() const { return warp % 2; }

    // ---- scores ----

    // All scores of a step. Even and odd k16-steps are separate chains of sums.
    template <class Queries, class Scores>
    FS_DEVICE void multiply_keys(const Queries& queries, uint32_t tile, Scores& scores) const {
        using Panel = typename KeysLayout::template Panel<false>;
        const uint32_t own = tile + key_half() * 8 * kShareTiles * Panel::kRowBytes +
                             column_half() * KeysLayout::kBytes / 2;
        const auto keys = key_operand<KeysLayout, value_t, Kernel::cache>(own, lane);
        float shares[2][kShareTiles][4];
        zero(shares);
#pragma unroll
        for (int step = 0; step < Kernel::d_steps / 2; ++step) {
            uint32_t fragment[1][4];
            queries.load(fragment, step);
#pragma unroll
            for (int pair = 0; pair < kShareTiles / 2; ++pair) {
                uint32_t two_tiles[4];
                keys.load(two_tiles, step, pair);
                const uint32_t low[2] = {two_tiles[0], two_tiles[1]};
                const uint32_t high[2] = {two_tiles[2], two_tiles[3]};
                mma_m16n8k16<value_t>(shares[step % 2][2 * pair], fragment[0], low);
                mma_m16n8k16<value_t>(shares[step % 2][2 * pair + 1], fragment[0], high);
            }
        }
#pragma unroll
        for (int n = 0; n < kShareTiles; ++n) {
            const auto bits = [&](int e) { return as_uint(shares[0][n][e] + shares[1][n][e]); };
            store_shared_16B(share(warp, n), {bits(0), bits(1), bits(2), bits(3)});
        }
        __syncthreads();  // all shares have arrived; the next step's barrier lets them be
                          // overwritten
#pragma unroll
        for (int n = 0; n < Kernel::key_tiles; ++n) {
            const int of_warp = n / kShareTiles * 2;
            const RowState left({}, load_shared_16B(share(of_warp, n % kShareTiles)));
            const RowState right({}, load_shared_16B(share(of_warp + 1, n % kShareTiles)));
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[0][n][e] = left.o[e] + right.o[e];
        }
    }

    // ---- the end of a part ----

    // Collects the warps' columns in a stage, and merges the part's state with the states of
    // earlier parts.
    FS_DEVICE void merge_columns(int parts_left, int stage, const Softmax& softmax,
                                 const Sums& o) const {
        constexpr int kColumns = Kernel::d_v / 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 8 * r + lane / 4;
            const float sum = quad_sum(softmax.row_sum[0][r]);
            if (row >= rows) continue;
            if (warp == 0 && lane % 4 == 0)
                store_shared_8B(statistics(0, row), {as_uint(softmax.offset[0][r]), as_uint(sum)});
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; ++n) {
                const int column = 16 * (warp + n / 2 * Kernel::n_warps) + 8 * (n % 2);
                store_shared_8B(sums(0, stage, row, column + lane % 4 * 2),
                                {as_uint(o[0][n][2 * r]), as_uint(o[0][n][2 * r + 1])});
            }
        }
        __syncthreads();
        const RunInfo run(smem + Kernel::target_offset);
        if constexpr (Kernel::has_clusters)
            if (args.cluster_levels > 0 && parts_left == 1) cluster_wait();
        for (int i = thread_index(); i < rows * kColumns; i += Kernel::n_threads) {
            const int row = i / kColumns, column = i % kColumns * 4;
            finish_part(run, run.end_part - parts_left, state_of_warps(stage, 0, row, column), row,
                        column);
        }
        __syncthreads();  // copies will overwrite these states
    }

  private:
    // The address of a lane's four scores in a warp's share.
    FS_DEVICE uint32_t share(int of_warp, int n) const {
        return smem + Kernel::shares_offset + 16 * ((of_warp * kShareTiles + n) * kWarpSize + lane);
    }
};

}  // namespace flashsmith
