// Derives types and constants from a config of the mma_sync_mla family and its semantics.
#pragma once

#include <type_traits>

#include "common/layout.cuh"
#include "mma_sync_mla/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

template <MmaSyncMlaKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticMmaSyncMlaConfig {
    static constexpr MmaSyncMlaKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;

    static constexpr CacheFormat cache = CFG.cache;
    static constexpr bool has_scale = CFG.has_scale();
    static constexpr bool has_codes = is_8bit(cache);  // 8-bit floats
    using Args =
        std::conditional_t<SEMANTICS.has_program(),
                           std::conditional_t<has_scale, MlaScaledProgramArgs, MlaProgramArgs>,
                           std::conditional_t<has_scale, MlaScaledArgs, MlaKernelArgs>>;
    using element_t = std::conditional_t<has_codes, uint8_t, value_t>;  // of the cache

    static constexpr int B_r = kMmaSyncMlaRows, B_c = CFG.B_c, stages = CFG.stages;
    static constexpr int grouped_blocks = 1;
    static constexpr int d_head = CFG.d_head, d_v = CFG.d_v;

    // A block of keys is panels of 64 columns. In each panel, a warp multiplies 32 columns of K,
    // two k16-steps, and has 16 columns of O.
    using Layout =
        std::conditional_t<has_codes, CodePanels<B_c, d_head>, SmemLayout<B_c, d_head, true>>;
    using Panel = typename SmemLayout<B_c, 64, true>::template Panel<has_codes>;
    static constexpr int panel_columns = 16 * kMmaSyncMlaWarps;
    static constexpr int n_panels = d_head / panel_columns, v_panels = d_v / panel_columns;

    using Q_t = uint32_t[n_panels][2][4];
    using S_t = float[1][B_c / 8][4];
    using O_t = float[1][2 * v_panels][4];

    // Shared-memory layout: byte offsets from its start.
    static constexpr int K_offset = 0;
    static constexpr int shares_offset = stages * Layout::kBytes;

    static constexpr bool valid_config() {
        static_assert(d_head % panel_columns == 0 && d_v % panel_columns == 0 && d_v < d_head,
                      "d_head, d_v: rows are panels of 64 columns, and the last are no values");
        static_assert(B_c % 32 == 0 && B_c > 0, "B_c: a warp has 16 keys, or a multiple");
        static_assert(stages >= 2, "stages: a block is copied while another is read");
        static_assert(Layout::kBytes == CFG.block_bytes());
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the blocks need more shared memory than a CTA may have");
        static_assert(CFG.most_parts >= 1 && CFG.min_keys >= B_c,
                      "min_keys: a part has a block of keys");
        return true;
    }
};

}  // namespace flashsmith
