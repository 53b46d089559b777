// The offset of a row's exponents: a maximum that is updated for every block, or one that may be
// stale. A policy is part of a Consumer and works on its state.
#pragma once

#include "common/canonical.cuh"
#include "common/changed_scores.cuh"
#include "common/key_mask.cuh"
#include "sm90_forward/row_softmax.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

template <class Kernel>
struct Consumer;

// Updates the maximum with every block's scores before they are exponentiated.
template <class Kernel>
struct CurrentMax {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr bool kMayRecompute = false;
    using Softmax = RowSoftmax<CFG.rescale_threshold != 0, CFG.exp2_fma_share, 2>;

    FS_DEVICE bool updates_max(const Consumer<Kernel>&, int, const BlockRange&) const {
        return true;
    }
    FS_DEVICE void add(Consumer<Kernel>& consumer, bool) const {
        consumer.softmax.template add<false>(consumer.block_sums);
    }
    FS_DEVICE void finish_P(Consumer<Kernel>& consumer) const { consumer.pack_P(); }
};

// canonical: updates the maximum in the same way, with the specification's operations.
template <class Kernel>
struct CanonicalMax {
    static constexpr bool kMayRecompute = false;
    struct Softmax : CanonicalRows<1> {
        using CanonicalRows<1>::CanonicalRows;
        struct BlockSums {};

        template <bool kFirst, int kTiles>
        FS_DEVICE bool update_max(const float (&scores)[1][kTiles][4], float (&factors)[2], float) {
            float both[1][2];
            const bool grows = raise(scores, both);
            factors[0] = both[0][0], factors[1] = both[0][1];
            return grows;
        }
        template <int kTiles>
        FS_DEVICE BlockSums exponentiate(float (&scores)[1][kTiles][4]) {
            CanonicalRows<1>::exponentiate(scores);
            return {};
        }
        template <bool>
        FS_DEVICE void add(const BlockSums&) {}
        template <int kTiles>
        FS_DEVICE static void rescale(float (&o)[1][kTiles][4], const float (&factors)[2]) {
            const float both[1][2] = {{factors[0], factors[1]}};
            CanonicalRows<1>::rescale(o, both);
        }
    };

    FS_DEVICE bool updates_max(const Consumer<Kernel>&, int, const BlockRange&) const {
        return true;
    }
    FS_DEVICE void add(Consumer<Kernel>&, bool) const {}
    FS_DEVICE void finish_P(Consumer<Kernel>& consumer) const { consumer.pack_P(); }
};

// stale_max: most blocks compute no maximum. Their sums show if a row's true maximum is too far
// above row_max. The warp then corrects the block for these rows, on its own, before P is packed.
template <class Kernel>
struct StaleMax {
    static constexpr WgmmaForwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr bool kMayRecompute = true;
    // Four sums per row: no probability exceeds the sum that contains it.
    using Softmax = RowSoftmax<CFG.rescale_threshold != 0, CFG.exp2_fma_share, 4>;
    using BlockSums = typename Softmax::BlockSums;

    bool max_is_valid;  // whether row_max is close enough to the block's maximum

    // Whether a block updates the maximum: it does while rows may have seen no key yet, and in the
    // first two blocks that all rows see, in which maxima still grow too much.
    FS_DEVICE bool updates_max(const Consumer<Kernel>& consumer, int block,
                               const BlockRange& blocks) const {
        const ForwardKernelArgs& problem = consumer.problem;
        if (!SEMANTICS.partial && problem.row_max != nullptr)
            return true;  // every row's maximum
                          // is requested
        // With lists, blocks are positions in a list. A row that has seen no key so far is
        // recomputed.
        if constexpr (Kernel::has_lists)
            return block + 3 >= blocks.end || consumer.needs_mask(block, blocks);
        // A part may begin at any block.
        if (Kernel::splits_keys && block + 2 >= blocks.end) return true;
        if constexpr (!Kernel::masked) return block + 2 >= problem.n_KV_blocks;
        return blocks.needs_mask(block) || blocks.needs_mask(block + 2);
    }

    // finish_P() adds the sums once they are final.
    FS_DEVICE void add(const Consumer<Kernel>& consumer, bool max_was_updated) {
        max_is_valid = max_was_updated || (is_valid(consumer, 0) && is_valid(consumer, 1));
    }

    FS_DEVICE void finish_P(Consumer<Kernel>& consumer) {
        if (!any_lane(!max_is_valid))
            consumer.pack_P();
        else
            resolve_stale_max(consumer);
        consumer.softmax.template add<false>(consumer.block_sums);
        consumer.K.consumer_release(consumer.warp, consumer.lane);
    }

  private:
    FS_DEVICE static void resolve_stale_max(Consumer<Kernel>& consumer) {
        bool is_lost[2], may_raise[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            is_lost[r] = any_lane_of_quad(!is_recoverable(consumer.block_sums.sum[r]));
            may_raise[r] = any_lane_of_quad(!is_valid(consumer, r)) && !is_lost[r];
        }
        consumer.rescales_O = raise_rows(consumer, may_raise);
        consumer.pack_P();
        if (any_lane(is_lost[0] || is_lost[1])) recompute_scores(consumer, is_lost);
    }

    // Whether no probability of this lane in row `r` exceeds row_max by more than room_to_grow().
    FS_DEVICE static bool is_valid(const Consumer<Kernel>& consumer, int r) {
        constexpr float kThreshold = 1 << CFG.rescale_threshold;
        const BlockSums& sums = consumer.block_sums;
        const float limit =
            fminf(fmaf(consumer.softmax.row_sum[0][r], kMaxShare, 1.00001f), kThreshold);
        return sums.largest[r] <= limit && is_recoverable(sums.sum[r]);
    }

    // Whether fp32 can hold the probabilities, and the factor that scales them to 1 is not
    // subnormal, which ex2 would flush to 0. False for NaN. If false, the scores of the row cannot
    // be recovered: either it had no maximum, so that its probabilities are infinite, or its scores
    // are too far above the maximum.
    FS_DEVICE static bool is_recoverable(float sum) { return sum < 0x1p100f; }

    // Like Softmax::update_max(), for scores that are already probabilities. Only `rows` may get
    // another maximum; the factors of all other rows are 1.
    FS_DEVICE static bool raise_rows(Consumer<Kernel>& consumer, const bool (&rows)[2]) {
        Softmax& softmax = consumer.softmax;
        float grown[2];
        bool is_raised[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // A maximum never decreases.
            grown[r] = log2_approx(quad_max(fmaxf(Softmax::largest(consumer.S, r), 1.0f)));
            const float room = fminf(room_to_grow(softmax.row_sum[0][r]), CFG.rescale_threshold);
            is_raised[r] = any_lane_of_quad(rows[r] && grown[r] > room);
            consumer.O_factors[r] = 1.0f;
        }
        if (!any_lane(is_raised[0] || is_raised[1])) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!is_raised[r]) continue;
            float& row_max = softmax.row_max[0][r];
            const float scale_log2 = softmax.scale_log2;
            const float raised = fmaf(grown[r], reciprocal_approx(scale_log2), row_max);
            // The factor by which the exponentials change, including roundings.
            const float factor =
                exp2_approx(__fmul_rn(row_max, scale_log2) - __fmul_rn(raised, scale_log2));
            row_max = raised;
            softmax.row_sum[0][r] *= factor;
            consumer.block_sums.sum[r] *= factor;
            consumer.O_factors[r] = factor;
        }
        Softmax::rescale(consumer.S, consumer.O_factors);
        return true;
    }

    // Recomputes the maxima of `rows`, and then P, from Q and K, by this warp alone. It takes 16
    // keys at a time, which needs fewer registers than S.
    FS_DEVICE static void recompute_scores(Consumer<Kernel>& consumer, const bool (&rows)[2]) {
        Softmax& softmax = consumer.softmax;
        BlockSums& block_sums = consumer.block_sums;
        float scores[1][2][4];
        float lane_max[2] = {-INFINITY, -INFINITY}, factors[2] = {1.0f, 1.0f};
#pragma unroll 1
        for (int step = 0; step < Kernel::PV_steps; ++step) {
            compute_scores(consumer, scores, step);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (rows[r]) lane_max[r] = fmaxf(lane_max[r], Softmax::largest(scores, r));
        }
        consumer.rescales_O |= softmax.template update_max_to<false>(lane_max, factors, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (rows[r]) consumer.O_factors[r] = factors[r], block_sums.sum[r] = 0.0f;
#pragma unroll
        for (int step = 0; step < Kernel::PV_steps; ++step) {
            compute_scores(consumer, scores, step);
            const BlockSums more = softmax.exponentiate(scores);
            uint32_t recomputed[4];
            pack_fragment<typename Kernel::value_t>(recomputed, scores[0][0], scores[0][1]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!rows[r]) continue;
                block_sums.sum[r] += more.sum[r];
                consumer.P[step][r] = recomputed[r];
                consumer.P[step][2 + r] = recomputed[2 + r];
            }
        }
        __syncwarp();  // one lane releases K after every lane has read it
    }
    FS_DEVICE static void compute_scores(const Consumer<Kernel>& consumer, float (&scores)[1][2][4],
                                         int step) {
        using Panel = typename Kernel::Panel;
        zero(scores);
        const int row = consumer.warp * kWarpRows + consumer.lane % 16;
        const int key = step * 16 + consumer.lane / 16 * 8 + consumer.lane % 8;
#pragma unroll 1
        for (int column = 0; column < Kernel::d_head; column += 16) {
            const int panel = column / Panel::kColumns, chunk = column % Panel::kColumns / 8;
            uint32_t q[4], k[4];
            ldmatrix_x4(q, consumer.Q_tile() + panel * Kernel::Q_panel_bytes +
                               Panel::offset(row, chunk + consumer.lane / 16));
            ldmatrix_x4(k, consumer.K.tile() + panel * Kernel::KV_panel_bytes +
                               Panel::offset(key, chunk + consumer.lane / 8 % 2));
            mma_m16n8k16<typename Kernel::value_t>(scores[0][0], q, {k[0], k[1]});
            mma_m16n8k16<typename Kernel::value_t>(scores[0][1], q, {k[2], k[3]});
        }
        change_scores<SEMANTICS>(scores, consumer.problem.score_argument);
    }
};

}  // namespace flashsmith
