// Derives types and constants from a config of the wgmma_backward family and its semantics.
#pragma once

#include <type_traits>

#include "common/program_scores.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"
#include "wgmma_backward/config.cuh"
#include "wgmma_dq/static_kernel_configuration.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

template <WgmmaBackwardKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticHopperBackwardKernelConfig {
    static constexpr WgmmaBackwardKernelConfig CFG = CFG_.of_main_kernel();
    // With separate_dq: the static config of the kernel that computes dq.
    using DqKernel = StaticHopperDqKernelConfig<CFG_.of_dq_kernel(), SEMANTICS_>;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr bool has_program = SEMANTICS.has_program();
    // Whether each block of keys visits the blocks of queries of a list instead of a range.
    static constexpr bool has_lists = SEMANTICS.program_masks;
    // Whether consumers set rows that see no key to zero.
    static constexpr bool zeroes_rows = SEMANTICS.hides_keys() || has_program;
    // Whether more than the exponential lies between the scores and P.
    static constexpr bool changes_scores = SEMANTICS.changes_scores || !kSlopeIsOne<SEMANTICS>;
    using PrepareArgs = std::conditional_t<prepare_takes_program(SEMANTICS), BackwardProgramArgs,
                                           BackwardKernelArgs>;
    using Args =
        std::conditional_t<has_program, HopperBackwardProgramArgs, HopperBackwardKernelArgs>;

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int d_head = CFG.d_head;
    static constexpr bool is_pair = CFG.d_v > 0;
    // The CTAs that share a block of keys, and the columns that each has: of Q, K, dq and dk, and
    // of V, do and dv.
    static constexpr int n_ctas = CFG.n_ctas();
    // The CTAs of a cluster.
    static constexpr int cluster_size = CFG.cluster_size(), cluster_keys = CFG.cluster_keys();
    static constexpr int query_ctas = CFG.query_ctas();
    static constexpr int columns = d_head / n_ctas, V_columns = CFG.d_head_v() / n_ctas;
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_warpgroups = CFG.n_warpgroups;
    static constexpr int key_groups = CFG.key_groups();
    static constexpr bool clears_dq_sums = !CFG.without_dq;  // in prepare, together with their
                                                             // counters
    static constexpr bool always_sums_dq = true;
    static constexpr bool has_dq_counters = CFG.ordered_dq;
    static constexpr int consumer_threads = n_warpgroups * kWarpgroupThreads;
    // The 65,536 registers of an SM are divided among warpgroups of 128 threads, in units of 8 per
    // thread.
    static constexpr int registers_at_start = 512 / (n_warpgroups + 1) / 8 * 8;

    // Tiles consist of panels of 64 columns, or of 32 if d_head is not a multiple of 64. dS
    // consists of panels of the 64 keys of a warpgroup.
    using Panel = flashsmith::Panel<d_head % 64 == 0 ? 64 : 32>;
    using KeysPanel = flashsmith::Panel<64>;
    static constexpr int n_panels = (columns + Panel::kColumns - 1) / Panel::kColumns;
    static constexpr int V_panels = (V_columns + Panel::kColumns - 1) / Panel::kColumns;
    static constexpr int KV_panel_bytes = B_c * Panel::kRowBytes;
    static constexpr int K_tile_bytes = n_panels * KV_panel_bytes;
    static constexpr int V_tile_bytes = V_panels * KV_panel_bytes;
    static constexpr int Q_panel_bytes = B_r * Panel::kRowBytes;
    static constexpr int Q_tile_bytes = n_panels * Q_panel_bytes;
    static constexpr int do_tile_bytes = V_panels * Q_panel_bytes;
    static constexpr int dS_panel_bytes = B_r * KeysPanel::kRowBytes;
    // With shared_dq, the other CTA's dS follows.
    static constexpr int dS_tile_bytes = (CFG.shared_dq ? 2 : key_groups) * dS_panel_bytes;
    static constexpr int statistics_bytes = B_r * 4;
    using QPipeline = TilePipeline<CFG.q_stages, Q_tile_bytes, query_ctas>;
    using DoPipeline = TilePipeline<CFG.do_stages, do_tile_bytes, query_ctas>;
    static constexpr bool shares_rows = CFG.shares_rows();
    static constexpr int dq_columns = CFG.dq_columns(), dq_sum_columns = CFG.dq_sum_columns();
    static constexpr int dq_parts = CFG.dq_parts(), dq_parts_of_cta = dq_parts / n_ctas;
    static constexpr int dq_block_floats = CFG.dq_block_floats();
    // The threads of a CTA that keep the order of dq.
    static constexpr int order_keepers = CFG.ordered_dq ? dq_parts : 0;
    static_assert(dq_parts * cluster_size <= CFG.kCounters);
    // Where the sums of a block of queries begin; `statistic` is the index of the statistics of its
    // first row.
    FS_DEVICE static int64_t first_dq_sum(int64_t statistic) {
        if constexpr (CFG.ordered_dq) return statistic / B_r * dq_block_floats;
        return statistic * dq_sum_columns;
    }
    static constexpr bool alternates_dq = dq_parts < n_warpgroups;

    // If two warpgroups divide the columns of dQ and there are three panels, each has one panel and
    // half of the middle one. A GEMM needs a panel, followed by half of the next one at a constant
    // distance. So the middle panel of K is stored after the other two, and also V's if V has
    // three.
    static constexpr bool halves_a_panel = CFG.shares_columns() && n_panels == 3 && dq_parts == 2;
    FS_DEVICE static constexpr int place_of_panel(int panel) {
        return halves_a_panel && panel > 0 ? n_panels - panel : panel;
    }
    // The panel of K with the first or the second half of a part's columns of dQ.
    FS_DEVICE static constexpr int dq_panel(int part, int half) {
        if (halves_a_panel) return half == 0 ? 2 * part : 1;
        return part * (dq_columns / Panel::kColumns) + half;
    }
    FS_DEVICE static constexpr int place_of_V_panel(int panel) {
        return is_pair ? panel : place_of_panel(panel);
    }
    // The k-th step of 16 columns of K or V, in the order in which panels are stored.
    template <bool kOfV>
    FS_DEVICE static constexpr int keys_step(int k) {
        constexpr int kSteps = Panel::kStepsPerPanel;
        const int panel = kOfV ? place_of_V_panel(k / kSteps) : place_of_panel(k / kSteps);
        return panel * kSteps + k % kSteps;
    }

    // The GEMMs and their registers. Scores are transposed: 64 keys by B_r queries.
    using ScoresGemm = Wgmma<value_t, B_r, false>;
    using dQGemm = Wgmma<value_t, dq_columns, true>;
    static constexpr int d_steps = (columns + 15) / 16;  // 72 is padded with 8 zero columns
    static constexpr int d_v_steps = (V_columns + 15) / 16;
    static constexpr int query_steps = B_r / 16;
    static constexpr int key_steps = B_c / 16;
    using Scores = float[1][B_r / 8][4];
    using Rounded = uint32_t[query_steps][4];
    using Gradient = float[1][columns / 8][4];  // dk
    using GradientOfV = float[1][V_columns / 8][4];
    using dQ_t = float[1][dq_columns / 8][4];

    // The sums of a part of dQ have the layout of the accumulators: tiles of 8 columns one after
    // the other, each with all warps. If TMA adds them, they are sorted by warp, and then by tile.
    static constexpr int part_sums = kWarpgroupRows * dq_columns;
    static constexpr int warp_lanes = CFG.bulk_sums ? dq_columns / 8 * kWarpSize : kWarpSize;
    static constexpr int tile_sums = (CFG.bulk_sums ? kWarpSize : kWarpgroupThreads) * 4;

    // The layout of shared memory, as byte offsets from its beginning.
    static constexpr int K_offset = 0;
    static constexpr int peer_K_offset = K_offset + K_tile_bytes;
    static constexpr int peer_K_bytes = CFG.peer_K_bytes();
    static constexpr int V_offset = peer_K_offset + peer_K_bytes;
    static constexpr int Q_offset = V_offset + V_tile_bytes;
    static constexpr int do_offset = Q_offset + CFG.q_stages * Q_tile_bytes;
    static constexpr int dS_offset = do_offset + CFG.do_stages * do_tile_bytes;
    static constexpr int P_offset = dS_offset + CFG.n_ds_tiles() * dS_tile_bytes;
    static constexpr int P_bytes = CFG.split_roles ? B_r * B_c * 4 : 0;
    // S and dP of the other CTA's columns.
    static constexpr int peer_offset = P_offset + P_bytes;
    static constexpr int peer_tile_bytes = CFG.peer_bytes() / 2;
    static constexpr int sums_offset = peer_offset + CFG.peer_bytes();
    static constexpr int lse_offset = sums_offset + CFG.sums_bytes();
    static_assert(lse_offset == CFG.tile_bytes());
    static constexpr int D_offset = lse_offset + CFG.q_stages * statistics_bytes;
    static constexpr int barrier_offset = D_offset + CFG.do_stages * statistics_bytes;

    // A pair of barriers (full, empty) for K, V, P and each stage; then the number of the block of
    // keys, the barriers for the order of dq, and a pair for S and for dP of the other CTA.
    static constexpr int K_barriers = barrier_offset;
    static constexpr int V_barriers = K_barriers + 16;
    static constexpr int P_barriers = V_barriers + 16;
    static constexpr int Q_barriers = P_barriers + 16;
    static constexpr int do_barriers = Q_barriers + 16 * CFG.q_stages;
    static constexpr int dS_barriers = do_barriers + 16 * CFG.do_stages;
    static constexpr int number_offset = dS_barriers + 16 * CFG.ds_stages;
    // With split_roles there is no number. A barrier for rows that are set to zero replaces it.
    static constexpr int rows_barrier = number_offset;
    static constexpr int order_barriers = number_offset + 16;
    static constexpr int peer_barriers = order_barriers + 16 * n_warpgroups * CFG.ordered_dq;
    static_assert(peer_barriers + 32 * CFG.cta_pair <= CFG.smem_bytes());
    // With shared_dq, a barrier for each stage of dS: this CTA's part is stored.
    static constexpr int stored_barriers = peer_barriers;
    static_assert(stored_barriers + 8 * CFG.ds_stages * CFG.shared_dq <= CFG.smem_bytes());
    // With lists: the entry and the head of each stage of Q and of dS, 8 bytes each.
    static constexpr int Q_entries = peer_barriers + 32 * CFG.cta_pair;
    static constexpr int dS_entries = Q_entries + 8 * CFG.q_stages;
    static_assert(!has_lists || dS_entries + 8 * CFG.ds_stages <= CFG.smem_bytes());

    // The assumptions of the constants above and of the kernel. `flashsmith explain` lists all
    // rules with their reasons.
    static constexpr bool valid_config() {
        static_assert(columns % 8 == 0 && columns <= 256,
                      "d_head: a wgmma has up to 256 columns, in steps of 8");
        static_assert(!is_pair || (d_head % 64 == 0 && V_columns % 64 == 0 && V_columns <= 256 &&
                                   (!CFG.split_roles || V_columns <= columns)),
                      "d_v: panels of 64 columns; with split_roles dv has the registers of dk");
        static_assert(B_c == kWarpgroupRows * key_groups, "B_c: a warpgroup has 64 keys");
        static_assert(
            !CFG.split_roles ||
                (d_head > 128 && B_r == kWarpgroupRows && n_warpgroups == 2 &&
                 (CFG.ds_stages > 1 || CFG.without_dq) && CFG.order == StepOrder::dv_first),
            "split_roles: for wide heads, one warpgroup for dv and one for dk");
        static_assert(shares_rows || B_r == kWarpgroupRows,
                      "B_r: a part of dQ has 64 rows, for each warpgroup or for all");
        static_assert(halves_a_panel || dq_columns == d_head || dq_columns % Panel::kColumns == 0 ||
                          Panel::kColumns % dq_columns == 0,
                      "d_head: a part of dQ's columns is whole panels, or divides one");
        static_assert(!alternates_dq || CFG.order == StepOrder::scores_together,
                      "order: alternating warpgroups need scores_together");
        static_assert(kStatisticsRows % B_r == 0, "B_r: statistics come in whole tiles");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        static_assert(can_be_set(CFG.producer_registers) && can_be_set(CFG.consumer_registers),
                      "registers: setmaxnreg takes multiples of 8 between 24 and 240");
        static_assert(CFG.producer_registers + n_warpgroups * CFG.consumer_registers <=
                          (n_warpgroups + 1) * registers_at_start,
                      "registers: setmaxnreg deadlocks if they exceed the available ones");
        static_assert(!CFG.early_exp || CFG.order != StepOrder::dv_first,
                      "early_exp: with dv_first no product overlaps the exponentials");
        static_assert(!CFG.lagged_dq || CFG.ds_stages > 1,
                      "lagged_dq: dS is stored before the last step's is read");
        static_assert(!CFG.split_roles || !(CFG.lagged_dq || CFG.pingpong || CFG.persistent),
                      "split_roles: excludes lagged_dq, pingpong and persistent");
        static_assert(
            !CFG.cta_pair || (CFG.split_roles && d_head == 512 && !is_pair && !CFG.ordered_dq),
            "cta_pair: for d_head 512, with split_roles and without d_v and ordered_dq");
        static_assert(
            !CFG.shared_dq || (CFG.split_roles && !CFG.cta_pair && !CFG.without_dq && !has_lists),
            "shared_dq: needs split_roles, and excludes cta_pair, without_dq and lists of blocks");
        static_assert(!CFG.multicast || CFG.shared_dq,
                      "multicast: needs shared_dq, whose CTAs have the same queries");
        static_assert(!CFG.pingpong || n_warpgroups > 1,
                      "pingpong: needs a second warpgroup to alternate with");
        static_assert(!CFG.bulk_sums || !(CFG.split_roles || CFG.ordered_dq),
                      "bulk_sums: excludes split_roles and ordered_dq");
        static_assert(CFG.dq_sums == DqSums::beside_scores || !(CFG.split_roles || alternates_dq),
                      "dq_sums: split_roles and alternating warpgroups need beside_scores");
        static_assert(
            !CFG.early_rows || CFG.split_roles || CFG.order == StepOrder::scores_together,
            "early_rows: other orders begin S in a different step than they read its rows");
        static_assert(CFG.dq_sums != DqSums::sums_under_dk ||
                          (CFG.lagged_dq && (CFG.order == StepOrder::scores_together ||
                                             CFG.order == StepOrder::scores_ahead)),
                      "dq_sums: without lagged_dq a step's dq waits for all warpgroups' dS");
        static_assert(
            !CFG.without_dq || (CFG.ds_stages == 1 && !CFG.lagged_dq && !CFG.ordered_dq &&
                                !CFG.bulk_sums && CFG.dq_sums == DqSums::beside_scores &&
                                (CFG.split_roles || CFG.order == StepOrder::scores_together)),
            "without_dq: needs scores_together or split_roles, and no knob of dq");
        static_assert(!CFG_.separate_dq || !(CFG_.without_dq || CFG_.cta_pair || has_program),
                      "separate_dq: excludes without_dq, cta_pair and programs");
        static_assert(CFG.order == StepOrder::dv_first || CFG.order == StepOrder::scores_together ||
                          CFG.q_stages > 1,
                      "q_stages: the next step's S begins before this step's dk is done");
        return true;
    }

  private:
    static constexpr bool can_be_set(int registers) {
        return registers >= 24 && registers <= 240 && registers % 8 == 0;
    }
};

}  // namespace flashsmith
