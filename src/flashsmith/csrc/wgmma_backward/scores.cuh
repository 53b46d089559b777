// The work of a consumer warpgroup between its GEMMs: P from S, and dS from dP, both masked and
// rounded.
#pragma once

#include "backward/program_scores.cuh"
#include "common/softmax.cuh"
#include "wgmma_backward/consumer_state.cuh"

namespace flashsmith {

template <class Kernel>
struct ConsumerScores : ConsumerState<Kernel> {
    using Base = ConsumerState<Kernel>;
    using value_t = typename Kernel::value_t;
    using Base::args, Base::block, Base::blocks, Base::dP, Base::dS, Base::d_o, Base::first_key,
        Base::kSumsBesideScores, Base::lane, Base::P, Base::Q, Base::S, Base::smem, Base::stages,
        Base::key_mask, Base::warp;
    using typename Base::RowPairs;
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    using Base::Base;

    // If registers are left, the statistics are loaded while the GEMM runs. However, these loads
    // are queued behind the instructions of the GEMM. With early_rows, the statistics of
    // kTilesFirst tiles of S are therefore loaded before the GEMM is issued, and if even more
    // registers are left, D as well. With a softcap no registers are left: P is live in addition to
    // S, and tanh needs some.
    static constexpr bool kRowsMayWait = kSumsBesideScores || !Kernel::changes_scores;
    // Registers of dk and dv.
    static constexpr int kSums = (Kernel::columns + Kernel::V_columns) / 2;
    static constexpr bool kLoadsRowsEarly =
        kRowsMayWait && kSums + Kernel::B_r + Kernel::B_r / 4 + 24 <= CFG.consumer_registers;
    static constexpr int kTilesFirst = CFG.early_rows && kRowsMayWait ? 8 : 0;
    static constexpr bool kLoadsDFirst =
        CFG.early_rows && kRowsMayWait &&
        kSums + Kernel::B_r + Kernel::B_r / 2 + 16 <= CFG.consumer_registers;
    template <int kBegin = 0, int kEnd = Kernel::B_r / 8>
    FS_DEVICE void load_rows(RowPairs& pairs, int offset, int stage) const {
#pragma unroll
        for (int n = kBegin; n < kEnd; ++n)
            pairs[n] = load_shared_float2(smem + offset + stage * Kernel::statistics_bytes +
                                          (8 * n + lane % 4 * 2) * 4);
    }

    // With a softcap or a score function S no longer holds P after exponentiate().
    static constexpr bool kRoundsPEarly =
        CFG.order != StepOrder::scores_together || Kernel::changes_scores;

    // S becomes P. With a softcap it becomes P times 1 - tanh^2, the gradient of the cap, and with
    // a score function also times its slope. P is 0 where a query does not see a key.
    FS_DEVICE void exponentiate() {
        RowPairs lse;
        load_rows(lse, Kernel::lse_offset, Q.state.stage());
        exponentiate(lse);
    }
    FS_DEVICE void exponentiate(const RowPairs& lse) {
        change_scores<SEMANTICS>(S, args.score_argument);
        typename Kernel::Scores p;
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[0][n][e] = exp2_approx(
                    fmaf(changed(n, e), args.scale_log2, e % 2 == 0 ? -lse[n].x : -lse[n].y));
        }
        if constexpr (Kernel::masked)
            if (this->needs_mask()) mask(p);
        if constexpr (SEMANTICS.program_masks)
            if (this->needs_function()) program().hide(p, query_of_lane(), key_of_lane());
        if constexpr (kRoundsPEarly) round(P, p);
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                S[0][n][e] = BackwardProgram<SEMANTICS>::gradient(p[0][n][e], S[0][n][e]);
    }

    // The score that enters the softmax. With a score function S becomes the function's slope.
    FS_DEVICE float changed(int n, int e) {
        if constexpr (Kernel::has_program)
            return program().change(S[0][n][e], query_of_lane()(0, n, e), key_of_lane()(0, n, e));
        else
            return S[0][n][e];
    }
    FS_DEVICE BackwardProgram<SEMANTICS> program() const {
        return {this->launch_args.program, this->batch, this->first_head + this->head,
                key_mask.seq_q, key_mask.seq_k};
    }
    FS_DEVICE auto query_of_lane() const {
        const int first = block * Kernel::B_r + lane % 4 * 2;
        return [first](int, int n, int e) { return program::Place{first, 8 * n + e % 2}; };
    }
    FS_DEVICE auto key_of_lane() const {
        const int first = first_key + warp * kWarpRows + lane / 4;
        return [first](int, int, int e) { return program::Place{first, 8 * (e / 2)}; };
    }

    // ptxas moves exponentials below a wait for wgmma, but not beyond the end of a basic block.
    // This branch ends a block. Its condition is that an exponential is NaN, which never happens,
    // but ptxas cannot know that.
    FS_DEVICE void pin_exponentials() {
        pin(S);
        if (__float_as_uint(S[0][Kernel::B_r / 8 - 1][3]) == 0x7fc12345u)
            asm volatile("nanosleep.u32 20;" ::: "memory");
    }

    // Turns dP into dS = P (dP - D).
    FS_DEVICE void compute_dS(const RowPairs& D) {
#pragma unroll
        for (int n = 0; n < Kernel::B_r / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dP[0][n][e] = S[0][n][e] * (dP[0][n][e] - (e % 2 == 0 ? D[n].x : D[n].y));
        }
        // Masked dP is undefined and may be NaN. Where a program hides keys, S is 0.
        if constexpr (SEMANTICS.program_masks) {
            if (this->needs_mask())
#pragma unroll
                for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (S[0][n][e] == 0.0f) dP[0][n][e] = 0.0f;
        } else if constexpr (Kernel::masked) {
            if (this->needs_mask()) mask(dP);
        }
        if constexpr (!kRoundsPEarly) round(P, S);
        round(dS, dP);
    }

    FS_DEVICE static void round(typename Kernel::Rounded& rounded,
                                const typename Kernel::Scores& x) {
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step)
            pack_fragment<value_t>(rounded[step], x[0][2 * step], x[0][2 * step + 1]);
    }

    // Sets elements whose query does not see the key, or does not exist, to zero.
    FS_DEVICE void mask(typename Kernel::Scores& x) const {
        const int key = first_key + warp * kWarpRows + lane / 4;
        const int query = block * Kernel::B_r + lane % 4 * 2;
        if constexpr (!kHidesKeys<SEMANTICS> ||
                      (kTriangular<SEMANTICS> && Mask::kLastIsOneFurther)) {
            // One or two comparisons per element; the bounds follow from the element's position in
            // the tile.
            constexpr int kFar = 1 << 30;
            int ahead[2];  // for row r: the distance from its key to the first query's last key
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                ahead[r] = kHidesKeys<SEMANTICS>
                               ? Mask::last_key(query + key_mask.seq_k - key_mask.seq_q,
                                                key_mask.window_left, key_mask.window_right) -
                                     key - 8 * r
                               : kFar;
                if (SEMANTICS.uneven && key + 8 * r >= key_mask.seq_k) ahead[r] = -kFar;
            }
            const int left = key_mask.seq_q - query;
#pragma unroll
            for (int n = 0; n < Kernel::B_r / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = 8 * n + e % 2;
                    if (ahead[e / 2] < -i || (SEMANTICS.uneven && left <= i)) x[0][n][e] = 0.0f;
                }
            return;
        }
        const auto seen = [&](int n, int i) {
            KeyRange keys = key_mask.keys(query + 8 * n + i);
            if (SEMANTICS.uneven && query + 8 * n + i >= key_mask.seq_q) keys.last = -1;
            return keys;
        };
        mask_queries<SEMANTICS>(x, key, seen, 0.0f);
    }

    // Stores dS for this warpgroup's keys, as queries by keys. After the commit, all warpgroups may
    // read them. The commit is separate, because its fence takes some time and the next GEMMs need
    // not wait for it.
    FS_DEVICE void store_dS() {
        if constexpr (!CFG.without_dq) {
            using KeysPanel = typename Kernel::KeysPanel;
            const uint32_t panel =
                stages.acquire() + this->first_row() / kWarpgroupRows * Kernel::dS_panel_bytes;
            if constexpr (Kernel::has_lists)
                if (this->first_row() == 0 && warp == 0 && lane == 0)
                    ListedStep{this->entry, this->head}.store(smem + Kernel::dS_entries +
                                                              8 * stages.written.stage());
            const int query = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
            const uint32_t place = panel + KeysPanel::offset(query, chunk);
#pragma unroll
            for (int step = 0; step < Kernel::query_steps; ++step)
                stmatrix_x4_transposed(place + 16 * step * KeysPanel::kRowBytes, dS[step]);
        }
    }

    FS_DEVICE void finish_dS() {
        RowPairs D;
        load_rows(D, Kernel::D_offset, d_o.state.stage());
        finish_dS(D);
    }
    FS_DEVICE void finish_dS(const RowPairs& D) {
        compute_dS(D);
        __syncwarp();  // all lanes have read their rows' statistics
        d_o.consumer_release(warp, lane);
        store_dS();
    }
};

}  // namespace flashsmith
