// A config of the wgmma family and what it is to compute, turned into types and constants.
#pragma once

#include <type_traits>

#include "wgmma/config.cuh"
#include "wgmma/config_rules.cuh"
#include "wgmma/wgmma.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

constexpr int kWarpLanes = 32;
constexpr int kWarpgroupRows = 64;
constexpr int kWarpRows = 16;
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpsPerWarpgroup = 4;

FS_DEVICE int lane_index() {
    return unsigned(thread_index()) % kWarpLanes;
}

template <HopperForwardKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticHopperKernelConfig {
    static constexpr HopperForwardKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static_assert(broken_rules(CFG, FLASHSMITH_MAX_SMEM_PER_BLOCK) == 0,
                  "this config breaks a legality rule: see wgmma/config_rules.cuh for the bits, or "
                  "`flashsmith explain` for the reasons");

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int d_head = CFG.d_head;
    static constexpr int n_warpgroups = CFG.n_warpgroups;
    static constexpr bool clusters = CFG.cluster_size > 1;
    static constexpr int registers_at_start =
        wgmma_rules::registers_each((n_warpgroups + 1) * CFG.ctas_per_sm);

    // Under a mask a tile's last rows see the most keys. Where a softmax takes longer than the
    // other warpgroups' products, they are the first warpgroup's, which was the first to be done
    // with the tile before.
    static constexpr bool last_rows_first = SEMANTICS.mask != MaskKind::none && d_head < 128;

    // Tiles as panels of 64 columns, or of 32 where 64 do not divide the head.
    using Panel = flashsmith::Panel<d_head % 64 == 0 ? 64 : 32>;
    static constexpr int n_panels = d_head / Panel::kColumns;
    static constexpr int Q_panel_bytes = kWarpgroupRows * Panel::kRowBytes;
    static constexpr int Q_tile_bytes = n_panels * Q_panel_bytes;  // of one warpgroup
    static constexpr int KV_panel_bytes = B_c * Panel::kRowBytes;
    static constexpr int KV_tile_bytes = n_panels * KV_panel_bytes;

    // Products and their registers.
    using QK = Wgmma<value_t, B_c, false>;
    using PV = Wgmma<value_t, d_head, true>;
    static constexpr int QK_steps = d_head / 16;
    static constexpr int PV_steps = B_c / 16;
    using S_t = float[1][B_c / 8][4];
    using P_t = uint32_t[PV_steps][4];
    using O_t = float[1][d_head / 8][4];

    // Shared memory, bytes from its start. A Q slot is one warpgroup's rows; buffer by buffer, in a
    // buffer warpgroup by warpgroup.
    static constexpr int Q_slots = n_warpgroups * CFG.q_buffers;
    static constexpr int Q_offset = 0;
    static constexpr int O_offset = Q_offset + Q_slots * Q_tile_bytes;
    static constexpr int K_offset = O_offset + (CFG.separate_O ? n_warpgroups * Q_tile_bytes : 0);
    static constexpr int V_offset = K_offset + CFG.kv_stages * KV_tile_bytes;
    static constexpr int barrier_offset = V_offset + CFG.kv_stages * KV_tile_bytes;
    static_assert(barrier_offset == CFG.tile_bytes());

    // The page of barriers: a pair (full, empty) for every Q slot, K stage and V stage, and what
    // the producer tells of the tile in a Q slot.
    static constexpr int Q_barriers = barrier_offset;
    static constexpr int K_barriers = Q_barriers + 16 * Q_slots;
    static constexpr int V_barriers = K_barriers + 16 * CFG.kv_stages;
    static constexpr int notices = (V_barriers + 16 * CFG.kv_stages + 31) / 32 * 32;
    // Masks stand at the end of a sequence, and packed ones differ.
    static constexpr bool tells_q_count = SEMANTICS.packed && SEMANTICS.mask != MaskKind::none;
    static constexpr int notice_bytes = tells_q_count ? 48 : 32;
    // What the first CTA of a cluster tells the other of the tile counter, and its barriers.
    static constexpr int answer = notices + notice_bytes * Q_slots;
    static constexpr int answer_barriers = answer + 16;
    static_assert(answer_barriers + 16 <= CFG.smem_bytes());
};

}  // namespace flashsmith
