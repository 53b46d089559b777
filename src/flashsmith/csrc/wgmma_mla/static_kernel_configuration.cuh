// Derives types and constants from a config of the wgmma_mla family and its semantics.
#pragma once

#include <type_traits>

#include "sm90/wgmma.cuh"
#include "wgmma_mla/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

// A block of keys in shared memory arrives, is read and is overwritten in three sections: the
// columns of each warpgroup's half of V, and the tail.
constexpr int kTail = 2, kSections = 3;

template <WgmmaMlaKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticMlaConfig {
    static constexpr WgmmaMlaKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    using element_t = value_t;  // of the cache
    static constexpr bool has_scale = false;
    using Args = MlaKernelArgs;

    static constexpr int B_r = kMlaRows, B_c = kMlaKeys;
    static constexpr int grouped_blocks = kMlaConsumers;  // one for each warpgroup
    static constexpr int d_head = CFG.d_head, d_v = CFG.d_v, half = d_v / 2;
    using Panel = flashsmith::Panel<64>;
    static constexpr int n_panels = d_head / Panel::kColumns;
    static constexpr int half_panels = half / Panel::kColumns;
    // Q and a block of keys have the same number of rows.
    static_assert(kMlaRows == kWarpgroupRows && kMlaKeys == kMlaRows);
    static constexpr int panel_bytes = kMlaKeys * Panel::kRowBytes;
    static constexpr int tile_bytes = n_panels * panel_bytes;

    FS_DEVICE static constexpr int first_panel(int section) { return section * half_panels; }
    FS_DEVICE static constexpr int section_panels(int section) {
        return section == kTail ? n_panels - 2 * half_panels : half_panels;
    }
    // The panels of a section that arrive together have a barrier. These are a stage's barriers,
    // and a section's first one.
    static constexpr int arrivals = CFG.panel_waits ? n_panels : kSections;
    FS_DEVICE static constexpr int joint_panels(int section) {
        return CFG.panel_waits ? 1 : section_panels(section);
    }
    FS_DEVICE static constexpr int first_arrival(int section) {
        return CFG.panel_waits ? first_panel(section) : section;
    }

    using GEMM_QK = Wgmma<value_t, kMlaKeys, false>;
    using GEMM_PV = Wgmma<value_t, half, true>;
    static constexpr int PV_steps = kMlaKeys / 16;
    using S_t = float[1][kMlaKeys / 8][4];
    using P_t = uint32_t[PV_steps][4];
    using O_t = float[1][half / 8][4];

    // Shared-memory layout: byte offsets from its start.
    static constexpr int Q_offset = 0;
    static constexpr int K_offset = Q_offset + tile_bytes;
    static constexpr int P_offset = K_offset + kMlaStages * tile_bytes;
    static constexpr int barrier_offset = P_offset + panel_bytes;
    static_assert(barrier_offset == CFG.tile_bytes());
    static constexpr int maxima_offset = barrier_offset + 16 * kMlaStages * arrivals;
    static constexpr int sums_offset =
        (maxima_offset + 4 * kMlaConsumers * kMlaRows + 15) / 16 * 16;
    static_assert(sums_offset + 8 * kMlaConsumers * kWarpgroupThreads <= CFG.smem_bytes());

    // An SM's 65,536 registers are divided among the threads.
    static constexpr int registers_at_start = 512 / (kMlaConsumers + 1) / 8 * 8;

    static constexpr bool valid_config() {
        static_assert(d_head % 64 == 0 && d_head > d_v,
                      "d_head: a row is panels of 64 columns, and the last are no values");
        static_assert(half % 64 == 0 && half > 0 && half <= 256,
                      "d_v: a warpgroup has half of V, panels of 64 columns, up to 256");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        static_assert(can_be_set(CFG.producer_registers) && can_be_set(CFG.consumer_registers),
                      "registers: setmaxnreg takes multiples of 8 between 24 and 240");
        static_assert(CFG.producer_registers + kMlaConsumers * CFG.consumer_registers <=
                          (kMlaConsumers + 1) * registers_at_start,
                      "registers: setmaxnreg deadlocks if they exceed the available ones");
        static_assert(CFG.run_keys == 0 || CFG.run_keys >= CFG.min_keys,
                      "run_keys: a CTA computes whole parts");
        static_assert(CFG.panels_ahead >= 0 && CFG.panels_ahead < n_panels,
                      "panels_ahead: the last panel's scores come after the other's product");
        static_assert(CFG.most_parts >= 1 && CFG.min_keys >= kMlaStages * kMlaKeys,
                      "min_keys: a part has a block for each warpgroup");
        return true;
    }

  private:
    static constexpr bool can_be_set(int registers) {
        return registers >= 24 && registers <= 240 && registers % 8 == 0;
    }
};

}  // namespace flashsmith
