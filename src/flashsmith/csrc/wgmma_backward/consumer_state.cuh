// The state of a consumer warpgroup from step to step, and the GEMMs that read the queries of a
// step.
#pragma once

#include "backward/store_gradient.cuh"
#include "backward/unattended_rows.cuh"
#include "common/opaque.cuh"
#include "sm90/warpgroup_order.cuh"
#include "wgmma_backward/ds_stages.cuh"
#include "wgmma_backward/listed_steps.cuh"

namespace flashsmith {

// Hardware barriers. Barrier 0 belongs to __syncthreads. The next one is for rows that are set to
// zero, and the others are for the order of warpgroups.
constexpr int kRowsBarrier = 1, kFirstOrderBarrier = 2;

template <class Kernel>
struct ConsumerState {
    static_assert(Kernel::valid_config());
    static constexpr WgmmaBackwardKernelConfig CFG = Kernel::CFG;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    using value_t = typename Kernel::value_t;
    using Panel = typename Kernel::Panel;
    using Keys = KeyBlock<Kernel>;
    // The statistics of the two queries that a lane has in each tile of scores.
    using RowPairs = float2[Kernel::B_r / 8];

    // Whether dq is added to its sums between the GEMMs of the scores; and whether the GEMM of dq
    // comes before dk's.
    static constexpr bool kSumsBesideScores = CFG.dq_sums == DqSums::beside_scores;
    static constexpr bool kdQBeforedk = CFG.dq_sums == DqSums::sums_under_dk;
    // Whether a step adds its own dq, or the previous step's, between its GEMMs. Warpgroups
    // that alternate do not.
    static constexpr bool kAddsBetween =
        kSumsBesideScores && !Kernel::alternates_dq && !CFG.without_dq;

    // ---- state ----

    const typename Kernel::Args& launch_args;
    const BackwardKernelArgs& args;
    const uint32_t smem;
    const int warpgroup, warp, lane;
    int first_key;  // of this warpgroup
    BlockRange blocks;
    BackwardKeyMask<SEMANTICS> key_mask;
    int block;            // current block of queries
    int rounds_until_dq;  // for alternating warpgroups: steps until this one computes dq
    int dq_block;         // block of the last dq, and this lane's address for its sums
    float* dq_sums;
    // With ordered_dq, a block is processed for all heads, one after another. These are the number
    // of heads, the next head, and the head of the last dq. dq_block is then unused.
    int n_heads, head, dq_head, direction;
    int batch, first_head;  // used by programs; the current head is first_head + head
    // With lists: the entry of the current block, and the sums of this lane in block 0 of the first
    // head.
    BlockEntry entry;
    float* first_sums;
    uint32_t odd_turns = 0;  // parity of this warpgroup's turns in that order

    TilePipeline<1, Kernel::K_tile_bytes> K;
    TilePipeline<1, Kernel::V_tile_bytes> V;
    typename Kernel::QPipeline Q;
    typename Kernel::DoPipeline d_o;
    dSStages<Kernel> stages;
    const WarpgroupOrder<CFG.n_warpgroups, CFG.pingpong, kFirstOrderBarrier> order;

    typename Kernel::Scores S, dP;
    typename Kernel::Rounded P, dS;
    typename Kernel::Gradient dk;
    typename Kernel::GradientOfV dv;
    typename Kernel::dQ_t dq;

    FS_DEVICE ConsumerState(const typename Kernel::Args& args, uint32_t smem, int warpgroup)
        : launch_args(args),
          args(args.problem),
          smem(smem),
          warpgroup(warpgroup),
          warp(__shfl_sync(0xffffffffu, thread_index() / kWarpSize % kWarpsPerWarpgroup, 0)),
          lane(lane_index()),
          key_mask(args.problem, 0, 0),
          K(smem + Kernel::K_offset, smem + Kernel::K_barriers),
          V(smem + Kernel::V_offset, smem + Kernel::V_barriers),
          Q(smem + Kernel::Q_offset, smem + Kernel::Q_barriers),
          d_o(smem + Kernel::do_offset, smem + Kernel::do_barriers),
          stages{smem},
          order{warpgroup} {}

    // The first key of this warpgroup, counted from the first key of the CTA.
    FS_DEVICE int first_row() const { return CFG.split_roles ? 0 : warpgroup * kWarpgroupRows; }

    // ---- a step's queries ----

    // Waits until the queries of the next block have arrived.
    FS_DEVICE void await_queries() {
        Q.consumer_wait();
        if constexpr (Kernel::has_lists) {
            const auto step =
                ListedStep::load(smem + Kernel::Q_entries + 8 * Q.state.stage(), lane);
            entry = step.entry;
            block = entry.block();
            head = step.head;
        }
        zero_unattended_rows();
    }
    FS_DEVICE void begin_S() { start_scores<false>(S, Kernel::K_offset, Q.tile()); }
    FS_DEVICE void begin_dP() { start_scores<true>(dP, Kernel::V_offset, d_o.tile()); }

    // Whether any element of the current block is masked.
    FS_DEVICE bool needs_mask() const {
        if constexpr (Kernel::has_lists) return !entry.is_full(2 * (first_row() / kWarpgroupRows));
        return blocks.needs_mask(block);
    }

    // With lists: whether the mask function hides any element.
    FS_DEVICE bool needs_function() const {
        return entry.needs_function(2 * (first_row() / kWarpgroupRows));
    }

    FS_DEVICE void advance_block() {
        if constexpr (Kernel::has_lists) return;  // the next block arrives with Q
        if constexpr (CFG.ordered_dq) {
            if (++head == n_heads) head = 0, block += direction;
        } else {
            if (++block == blocks.end) {
                block = blocks.begin;
                if constexpr (Kernel::has_program) ++head;
            }
        }
    }

    // Releases the Q of the preceding step.
    FS_DEVICE void release_last_Q() {
        const int stage = (Q.state.stage() + CFG.q_stages - 1) % CFG.q_stages;
        if (lane == 0) mbarrier_arrive(Q.barriers.empty(stage));
    }

    // Sets rows that see no key to zero.
    FS_DEVICE void zero_unattended_rows() const {
        if constexpr (!Kernel::zeroes_rows) return;
        // In a full block, every row sees keys; but its scores may be -inf.
        if constexpr (Kernel::has_lists && !SEMANTICS.program_scores)
            if (entry.is_full(0)) return;
        const int first_row = block * Kernel::B_r;
        const UnattendedRows<SEMANTICS, Kernel::B_r> rows{
            min(key_mask.first_attending_row() - first_row, Kernel::B_r),
            key_mask.seq_q - first_row,
            smem + Kernel::lse_offset + Q.state.stage() * Kernel::statistics_bytes};
        if (!rows.any(lane)) return;
        mbarrier_wait(d_o.full(), d_o.state.phase());
        // With one width, both tiles have the same chunks.
        constexpr int kWider =
            Kernel::columns > Kernel::V_columns ? Kernel::columns : Kernel::V_columns;
        constexpr int kChunks = kWider / 8;
        const int first = warpgroup * kWarpgroupThreads + warp * kWarpSize + lane;
        for (int i = first; i < rows.end() * kChunks; i += Kernel::consumer_threads) {
            const int row = i / kChunks, chunk = i % kChunks;
            if (Kernel::has_program && !rows.contains(row)) continue;
            const uint32_t place = chunk / Panel::kChunks * Kernel::Q_panel_bytes +
                                   Panel::offset(row, chunk % Panel::kChunks);
            if (Kernel::columns == kWider || chunk < Kernel::columns / 8)
                store_shared_16B(Q.tile() + place, uint4{0, 0, 0, 0});
            if (Kernel::V_columns == kWider || chunk < Kernel::V_columns / 8)
                store_shared_16B(d_o.tile() + place, uint4{0, 0, 0, 0});
        }
        tma_store_fence();
        // With split_roles, the roles run different code. PTX does not guarantee that barrier
        // instructions at two places form one barrier.
        if constexpr (CFG.split_roles)
            mbarrier_arrive_and_wait(smem + Kernel::rows_barrier);
        else
            named_barrier_wait(kRowsBarrier, Kernel::consumer_threads);
    }

    // ---- products ----

    // Multiplies the rows of K or V that this warpgroup has by a tile of queries.
    template <bool kOfV>
    FS_DEVICE void start_scores(typename Kernel::Scores& scores, int offset, uint32_t tile) {
        const uint64_t a =
            Panel::descriptor(opaque(smem) + offset + first_row() * Panel::kRowBytes);
        const uint64_t b = Panel::descriptor(opaque(tile));
        wgmma_fence(scores);
#pragma unroll
        for (int step = 0; step < (kOfV ? Kernel::d_v_steps : Kernel::d_steps); ++step)
            Kernel::ScoresGemm::run(scores,
                                    a + Panel::template column_step<Kernel::B_c>(
                                            Kernel::template keys_step<kOfV>(step)),
                                    b + Panel::template column_step<Kernel::B_r>(step), step > 0);
        wgmma_commit();
    }

    // gradient += P^T do, or dS^T q.
    template <int kTiles>
    FS_DEVICE void start_gradient(float (&gradient)[1][kTiles][4], typename Kernel::Rounded& a,
                                  uint32_t tile) {
        const uint64_t b = Panel::descriptor(opaque(tile), Kernel::Q_panel_bytes);
        wgmma_fence(gradient, a);
#pragma unroll
        for (int step = 0; step < Kernel::query_steps; ++step)
            Wgmma<value_t, 8 * kTiles, true>::run(gradient, a[step], b + Panel::row_step(step), 1);
        wgmma_commit();
    }

    // ---- the end ----

    template <bool kOfV, int kTiles>
    FS_DEVICE void store(void* gradient, const float (&acc)[1][kTiles][4], float scale,
                         int64_t origin, int64_t seq_stride, const Keys& keys) const {
        if (gradient == nullptr) return;
        const int key = keys.first_key + first_row() + warp * kWarpRows;
        const int column = first_column<Kernel>();
        const int64_t element = origin + (keys.k.first + key) * seq_stride + column;
        store_gradient<value_t, CFG.wide_stores>(
            static_cast<char*>(gradient) + element * (args.grads_fp32 ? 4 : 2), seq_stride,
            keys.k.count - key, (kOfV ? d_of_v<Kernel>(args) : d_of_qk<Kernel>(args)) - column,
            args.grads_fp32, acc, scale);
    }
};

}  // namespace flashsmith
