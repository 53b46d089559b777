// Derives types and constants from a config of the wgmma_dq family and its semantics.
#pragma once

#include <type_traits>

#include "sm90/wgmma.cuh"
#include "wgmma_dq/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

template <WgmmaDqKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticHopperDqKernelConfig {
    using DqKernel = StaticHopperDqKernelConfig;
    static constexpr WgmmaDqKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr bool has_program = SEMANTICS.has_program();
    // Whether each block of queries visits the blocks of keys of a list instead of a range. The
    // kernels that write lists use the names below.
    static constexpr bool has_lists = SEMANTICS.program_masks;
    static constexpr int query_groups = CFG.n_warpgroups, dq_rows = CFG.B_r, step_keys = CFG.B_c;
    using PrepareArgs = std::conditional_t<prepare_takes_program(SEMANTICS), BackwardProgramArgs,
                                           BackwardKernelArgs>;
    using Args = std::conditional_t<has_program, HopperDqProgramArgs, HopperDqKernelArgs>;

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int d_head = CFG.d_head, d_head_v = CFG.d_head_v();
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_warpgroups = CFG.n_warpgroups;
    static constexpr bool clears_dq_sums = false;  // there are no sums
    static constexpr bool always_sums_dq = false;
    static constexpr bool has_dq_counters = false;
    // The 65,536 registers of an SM are divided among warpgroups of 128 threads, in units of 8 per
    // thread.
    static constexpr int registers_at_start = 512 / (n_warpgroups + 1) / 8 * 8;

    // Tiles consist of panels of 64 columns, or of 32 if d_head is not a multiple of 64.
    using Panel = flashsmith::Panel<d_head % 64 == 0 ? 64 : 32>;
    static constexpr int n_panels = (d_head + Panel::kColumns - 1) / Panel::kColumns;
    static constexpr int V_panels = (d_head_v + Panel::kColumns - 1) / Panel::kColumns;
    static constexpr int Q_panel_bytes = B_r * Panel::kRowBytes;
    static constexpr int Q_tile_bytes = n_panels * Q_panel_bytes;
    static constexpr int do_tile_bytes = V_panels * Q_panel_bytes;
    static constexpr int KV_panel_bytes = B_c * Panel::kRowBytes;
    static constexpr int K_tile_bytes = n_panels * KV_panel_bytes;
    static constexpr int V_tile_bytes = V_panels * KV_panel_bytes;

    // The GEMMs and their registers. Scores are 64 queries by B_c keys.
    using ScoresGemm = Wgmma<value_t, B_c, false>;
    using dQGemm = Wgmma<value_t, d_head, true>;
    static constexpr int d_steps = (d_head + 15) / 16;  // 72 is padded with 8 zero columns
    static constexpr int d_v_steps = (d_head_v + 15) / 16;
    static constexpr int key_steps = B_c / 16;
    using Scores = float[1][B_c / 8][4];
    using Rounded = uint32_t[key_steps][4];
    using dQ_t = float[1][d_head / 8][4];

    // The layout of shared memory, as byte offsets from its beginning.
    static constexpr int Q_offset = 0;
    static constexpr int do_offset = Q_offset + Q_tile_bytes;
    static constexpr int K_offset = do_offset + do_tile_bytes;
    static constexpr int V_offset = K_offset + CFG.k_stages * K_tile_bytes;
    static constexpr int barrier_offset = V_offset + CFG.v_stages * V_tile_bytes;
    static_assert(barrier_offset == CFG.tile_bytes());

    // One barrier each for Q and do, and a pair (full, empty) for each stage of K and V.
    static constexpr int Q_barrier = barrier_offset;
    static constexpr int do_barrier = Q_barrier + 8;
    static constexpr int K_barriers = Q_barrier + 16;
    static constexpr int V_barriers = K_barriers + 16 * CFG.k_stages;
    // With lists: the entry of each stage of K, which has 4 bytes.
    static constexpr int K_entries = V_barriers + 16 * CFG.v_stages;
    static_assert(K_entries + 4 * has_lists * CFG.k_stages <= CFG.smem_bytes());

    // The assumptions of the constants above and of the kernel. `flashsmith explain` lists all
    // rules with their reasons.
    static constexpr bool valid_config() {
        static_assert(d_head % 8 == 0 && d_head <= 256,
                      "d_head: a wgmma has up to 256 columns, in steps of 8");
        static_assert(CFG.d_v == 0 || (d_head % 64 == 0 && d_head_v % 64 == 0),
                      "d_v: panels of 64 columns");
        static_assert(B_r == kWarpgroupRows * n_warpgroups, "B_r: a warpgroup has 64 queries");
        static_assert(B_c % 16 == 0, "B_c: a step of dQ's product has 16 keys");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        static_assert(can_be_set(CFG.producer_registers) && can_be_set(CFG.consumer_registers),
                      "registers: setmaxnreg takes multiples of 8 between 24 and 240");
        static_assert(CFG.producer_registers + n_warpgroups * CFG.consumer_registers <=
                          (n_warpgroups + 1) * registers_at_start,
                      "registers: setmaxnreg deadlocks if they exceed the available ones");
        static_assert(!CFG.late_dq || CFG.k_stages > 1,
                      "late_dq: the last step's K is read together with the next one's");
        static_assert(!CFG.pingpong || n_warpgroups > 1,
                      "pingpong: needs a second warpgroup to alternate with");
        return true;
    }

  private:
    static constexpr bool can_be_set(int registers) {
        return registers >= 24 && registers <= 240 && registers % 8 == 0;
    }
};

}  // namespace flashsmith
