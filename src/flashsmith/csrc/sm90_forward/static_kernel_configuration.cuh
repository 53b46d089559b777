// Derives types and constants from a config of the wgmma family and its semantics.
#pragma once

#include <type_traits>

#include "common/canonical_sizes.cuh"
#include "sm90/wgmma.cuh"
#include "sm90_forward/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

template <WgmmaForwardKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticHopperKernelConfig {
    static constexpr WgmmaForwardKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr bool has_program = SEMANTICS.has_program();
    // Whether each tile visits the K/V blocks of a list instead of a range.
    static constexpr bool has_lists = SEMANTICS.program_masks;
    using Args = std::conditional_t<has_program, HopperProgramArgs, HopperForwardKernelArgs>;

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int d_head = CFG.d_head;   // of Q and K
    static constexpr int d_v = CFG.d_head_v();  // of V and O
    static constexpr int n_warpgroups = CFG.n_warpgroups;
    static constexpr int consumers = CFG.consumers();
    static constexpr bool clusters = CFG.cluster_size > 1;
    static constexpr bool splits_keys = CFG.split_keys > 0;
    static constexpr bool packs_gqa = CFG.pack_gqa;
    static constexpr bool canonical = CFG.canonical > 0;
    // Blocks per chunk.
    static constexpr int chunk_blocks = kCanonicalChunk / B_c;
    // Whether some arguments locate states of rows instead of giving the strides of lse and
    // row_max.
    static constexpr bool has_states = splits_keys || canonical;
    static constexpr int64_t running_state_bytes = CFG.running_state_bytes();
    // An SM's 65,536 registers are divided among warpgroups of 128 threads, 8 per thread at a time.
    static constexpr int registers_at_start = 512 / ((consumers + 1) * CFG.ctas_per_sm) / 8 * 8;

    // Under a mask a tile's last rows see the most keys. If a softmax takes longer than the other
    // warpgroups' GEMMs, the first warpgroup gets these rows, because it was the first to
    // finish the preceding tile.
    static constexpr bool last_rows_first = kHidesKeys<SEMANTICS> && d_head < 128;

    // Tiles consist of panels of 64 columns, or of 32 if d_head is not a multiple of 64. If d_head
    // is 72 or 80, GEMMs use only the columns of the last panel that exist. With 72, the last step
    // of Q K^T also multiplies 8 columns that TMA has filled with zeros.
    using Panel = flashsmith::Panel<d_head % 64 == 0 ? 64 : 32>;
    static constexpr int n_panels = tile_columns(d_head) / Panel::kColumns;
    static constexpr int V_panels = tile_columns(d_v) / Panel::kColumns;
    static constexpr int Q_panel_bytes = kWarpgroupRows * Panel::kRowBytes;
    static constexpr int Q_tile_bytes = n_panels * Q_panel_bytes;  // per warpgroup
    static constexpr int O_tile_bytes = V_panels * Q_panel_bytes;
    static constexpr int KV_panel_bytes = B_c * Panel::kRowBytes;
    static constexpr int K_tile_bytes = n_panels * KV_panel_bytes;
    static constexpr int KV_tile_bytes = K_tile_bytes;  // for kernels in which V is as wide as K
    static constexpr int V_tile_bytes = V_panels * KV_panel_bytes;

    // GEMMs and their registers.
    using GEMM_QK = Wgmma<value_t, B_c, false>;
    static constexpr bool halves_O = CFG.halves_O();
    static constexpr int O_columns = halves_O ? d_v / 2 : d_v;  // of one warpgroup
    using GEMM_PV = Wgmma<value_t, O_columns, true>;
    static constexpr int QK_steps = (d_head + 15) / 16;
    static constexpr int PV_steps = B_c / 16;
    // Whether a warpgroup computes its last block only as far as its rows see it, in units of
    // short_steps steps of 16 keys. Without a mask, every key of a whole block is visible.
    static constexpr bool has_short_blocks = CFG.short_block > 0 && masked && !has_lists;
    static constexpr int short_steps = CFG.short_block / 16;
    // Every register_Q_stride-th step of Q K^T has its Q in registers. The steps between
    // them read twice as much shared memory in the same time.
    static constexpr int register_Q_stride =
        CFG.register_Q > 0 ? QK_steps / CFG.register_Q : QK_steps;
    using register_Q_t = uint32_t[CFG.register_Q > 0 ? CFG.register_Q : 1][4];
    using S_t = float[1][B_c / 8][4];
    using P_t = uint32_t[PV_steps][4];
    using O_t = float[1][O_columns / 8][4];

    // Shared-memory layout: byte offsets from its start. A Q slot has one warpgroup's rows. Slots
    // are ordered by buffer, then by warpgroup.
    static constexpr int Q_slots = n_warpgroups * CFG.q_buffers;
    static constexpr int Q_offset = 0;
    static constexpr int O_offset = Q_offset + Q_slots * Q_tile_bytes;
    static constexpr int K_offset = O_offset + (CFG.separate_O ? n_warpgroups * O_tile_bytes : 0);
    static constexpr int V_offset = K_offset + CFG.kv_stages * K_tile_bytes;
    static constexpr int barrier_offset = V_offset + CFG.kv_stages * V_tile_bytes;
    static_assert(barrier_offset == CFG.tile_bytes());

    // The page for barriers has a pair (full, empty) for every Q slot, K stage and V stage, and the
    // info of the tile in each Q slot.
    static constexpr int Q_barriers = barrier_offset;
    static constexpr int K_barriers = Q_barriers + 16 * Q_slots;
    static constexpr int V_barriers = K_barriers + 16 * CFG.kv_stages;
    static constexpr int info_offset = (V_barriers + 16 * CFG.kv_stages + 31) / 32 * 32;
    // Masks and programs depend on the sequence's length, which differs between packed sequences.
    static constexpr bool info_has_q_count =
        SEMANTICS.packed && (kHidesKeys<SEMANTICS> || has_program);
    static constexpr int info_bytes = has_lists && canonical                         ? 64
                                      : info_has_q_count || splits_keys || has_lists ? 48
                                                                                     : 32;
    // The tile number that the first CTA of a cluster broadcasts, and its barriers.
    static constexpr int broadcast_offset = info_offset + info_bytes * Q_slots;
    static constexpr int broadcast_barriers = broadcast_offset + 16;
    // The entry of the list for the block in each K stage.
    static constexpr int entry_offset = broadcast_barriers + 16;
    // The barriers of the messages to a partner. The messages themselves are stored after the page.
    static constexpr int message_barriers = (entry_offset + 4 * CFG.kv_stages + 15) / 16 * 16;
    static constexpr int message_offset = barrier_offset + CFG.kBarrierPage;
    static_assert(message_barriers + (halves_O ? 16 : 0) <= message_offset);

    // The assumptions of the constants above and of the kernel. `flashsmith explain` lists all
    // rules and their reasons.
    static constexpr bool valid_config() {
        static_assert(d_head % 8 == 0 && O_columns <= CFG.kMostColumnsOfO,
                      "d_head: the columns of a wgmma are a multiple of 8, up to 256");
        static_assert(!halves_O || (n_warpgroups == 1 && CFG.direct_O && CFG.short_block == 0 &&
                                    d_v % 128 == 0),
                      "d_head: two warpgroups compute O of the same 64 rows");
        static_assert(CFG.d_v == 0 || (d_head % 64 == 0 && d_v % 64 == 0),
                      "d_v: panels of V are as wide as those of Q and K");
        static_assert(d_v <= d_head || CFG.separate_O || CFG.direct_O,
                      "d_v: O does not fit in Q's slot");
        static_assert(B_r == kWarpgroupRows * n_warpgroups, "B_r: a warpgroup has 64 rows");
        static_assert(B_c % 16 == 0 && B_c <= 256,
                      "B_c: a step of P V takes 16 keys, a wgmma of Q K^T up to 256");
        static_assert(CFG.q_buffers == 1 || CFG.q_buffers == 2,
                      "q_buffers: 1, or 2 with one for the next tile");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        static_assert(can_be_set(CFG.producer_registers) && can_be_set(CFG.consumer_registers),
                      "registers: setmaxnreg takes multiples of 8 between 24 and 240");
        static_assert(CFG.producer_registers + consumers * CFG.consumer_registers <=
                          (consumers + 1) * registers_at_start,
                      "registers: setmaxnreg deadlocks if they exceed the available ones");
        static_assert(CFG.pingpong == PingPong::none || n_warpgroups >= 2,
                      "pingpong: an order needs two warpgroups or more");
        static_assert(CFG.cluster_size == 1 || CFG.cluster_size == 2,
                      "cluster_size: a CTA has one partner, or none");
        static_assert(CFG.overlap || !CFG.early_exp,
                      "early_exp: without overlap no exponential is deferred");
        static_assert(
            !CFG.stale_max ||
                (CFG.rescale_threshold > 0 && CFG.exp2_fma_share == 0 && CFG.cluster_size == 1),
            "stale_max: needs late rescaling, infinities for scores far above the maximum, "
            "and K that a warp may read alone");
        static_assert(
            CFG.short_block % 16 == 0 && CFG.short_block < B_c,
            "short_block: a step of P V takes 16 keys, and a short block has fewer steps");
        static_assert(CFG.register_Q == 0 || register_Q_stride * CFG.register_Q == QK_steps,
                      "register_Q: must divide the number of 16-column steps");
        static_assert(!(CFG.direct_O && CFG.separate_O),
                      "direct_O: O that is stored from registers needs no shared memory");
        static_assert(CFG.split_keys == 0 || (CFG.split_keys > 1 && CFG.cluster_size == 1),
                      "split_keys: CTAs of a cluster go through the same K and V");
        static_assert(
            !canonical ||
                (CFG.canonical == kCanonicalVersion && B_c == canonical_tile(d_head, 90, CFG.d_v) &&
                 CFG.rescale_threshold == 0 && !CFG.stale_max && CFG.exp2_fma_share == 0 &&
                 CFG.short_block == 0 && !splits_keys),
            "canonical: the order of operations is the specification's");
        static_assert(!has_lists || (CFG.cluster_size == 1 && !splits_keys && !packs_gqa &&
                                     n_warpgroups <= 3),
                      "program: a list has the blocks of one CTA's rows of one head");
        static_assert(!CFG.stale_max || !SEMANTICS.program_scores,
                      "stale_max: recomputed scores would need the program a second time");
        static_assert(!canonical || CFG.schedule != Schedule::one_tile,
                      "canonical: each CTA of the grid has memory for its running state");
        return true;
    }

  private:
    static constexpr bool can_be_set(int registers) {
        return registers >= 24 && registers <= 240 && registers % 8 == 0;
    }
};

}  // namespace flashsmith
