// Derives types and constants from a config and its semantics: everything about a kernel that is
// fixed at compile time.
#pragma once

#include <type_traits>

#include "common/canonical.cuh"
#include "common/tile_copy.cuh"
#include "mma_sync/flash_attention.cuh"
#include "mma_sync/gemm.cuh"
#include "mma_sync/loaders.cuh"
#include "mma_sync/main_loops.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

// Tile counts along every dimension of the two GEMMs.
template <const FlashForwardKernelConfig& CFG>
struct ForwardKernelTileShapes {
    static constexpr int rows_per_warp = CFG.B_r / CFG.n_warps;
    static constexpr int m_tiles = rows_per_warp / 16;
    static constexpr int QK_n_tiles = CFG.B_c / 8;
    static constexpr int QK_k_steps = (CFG.d_head + 15) / 16;  // 72 is padded with 8 zero columns
    static constexpr int PV_n_tiles = CFG.d_head_v() / 8;
    static constexpr int PV_k_steps = CFG.B_c / 16;
};

template <FlashForwardKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticForwardKernelConfig {
    static constexpr FlashForwardKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool masked = SEMANTICS.masked();
    static constexpr bool has_program = SEMANTICS.has_program();
    // Whether each Q block visits the K/V blocks of a list instead of a range.
    static constexpr bool has_lists = SEMANTICS.program_masks;
    using Args = std::conditional_t<has_program, ForwardProgramArgs, ForwardKernelArgs>;

    using N = ForwardKernelTileShapes<CFG>;
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    using accum_t = float;

    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int d_head = CFG.d_head;   // of Q and K
    static constexpr int d_v = CFG.d_head_v();  // of V and O
    static constexpr int n_threads = CFG.n_threads();
    static constexpr bool async_copy = CFG.async_copy;
    static constexpr bool eager_load_blocks = CFG.eager_load_blocks;
    static constexpr bool optimized_softmax = CFG.optimized_softmax;

    static constexpr int kv_stages = CFG.kv_stages, kv_tiles = CFG.kv_tiles();
    static constexpr bool trim_masks = CFG.trim_masks && masked;
    static constexpr bool groups_heads = CFG.l2_group_mib > 0;
    static constexpr bool splits_keys = CFG.split_keys > 0;
    static constexpr bool packs_gqa = CFG.pack_gqa;
    static constexpr int min_ctas_per_sm = CFG.min_ctas_per_sm;

    // Shared-memory layout in bytes: Q (later O), the K tiles, the V tiles. With d_v, each K tile
    // is followed by its V tile, so that one distance leads to the next stage of both.
    using QLayout = SmemLayout<B_r, tile_columns(d_head), CFG.swizzled>;
    using OLayout = SmemLayout<B_r, tile_columns(d_v), CFG.swizzled>;
    using KLayout = SmemLayout<B_c, tile_columns(d_head), CFG.swizzled>;
    using VLayout = SmemLayout<B_c, tile_columns(d_v), CFG.swizzled>;
    static constexpr int stage_bytes = KLayout::kBytes + (CFG.d_v > 0 ? VLayout::kBytes : 0);
    static constexpr int Q_offset = 0;
    static constexpr int K_offset = Q_offset + (d_head > d_v ? QLayout::kBytes : OLayout::kBytes);
    static constexpr int V_offset =
        K_offset + (CFG.d_v > 0 ? KLayout::kBytes : CFG.kv_tiles() * KLayout::kBytes);
    static constexpr int state_offset =
        K_offset + CFG.kv_tiles() * (KLayout::kBytes + VLayout::kBytes);
    static_assert(state_offset == CFG.tile_bytes());

    // All threads copy a Q, K or V tile; each warp writes its own rows of O.
    static constexpr bool has_extent = SEMANTICS.uneven || tile_columns(d_head) > d_head;
    using CopyQ = TileCopy<QLayout, B_r, n_threads, has_extent>;
    using CopyK = TileCopy<KLayout, B_c, n_threads, has_extent>;
    using CopyV = TileCopy<VLayout, B_c, n_threads, has_extent>;
    using CopyO = TileCopy<OLayout, N::rows_per_warp, kWarpSize, has_extent>;

    using S_accum_t = accum_t[N::m_tiles][N::QK_n_tiles][4];
    using O_accum_t = accum_t[N::m_tiles][N::PV_n_tiles][4];
    static constexpr bool canonical = CFG.canonical > 0;
    using Softmax =
        std::conditional_t<canonical, CanonicalRows<N::m_tiles>,
                           OnlineSoftmax<N::m_tiles, optimized_softmax, CFG.lazy_rescale>>;

    using Q_t = StreamedOperand<QLoader<QLayout, N::m_tiles>, N::QK_k_steps, CFG.Q_mma_load_K_tiles,
                                CFG.mma_double_buffer_loads>;
    using K_t = StreamedOperand<KLoader<KLayout, N::QK_n_tiles>, N::QK_k_steps,
                                CFG.K_mma_load_K_tiles, CFG.mma_double_buffer_loads>;
    using V_t = StreamedOperand<VLoader<VLayout, N::PV_n_tiles>, N::PV_k_steps,
                                CFG.V_mma_load_K_tiles, CFG.mma_double_buffer_loads>;
    using P_t = RegisterOperand<N::m_tiles, N::PV_k_steps>;
    using GEMM_QK = WarpGemm<value_t, N::m_tiles, N::QK_n_tiles, Q_t, K_t>;
    using GEMM_PV = WarpGemm<value_t, N::m_tiles, N::PV_n_tiles, P_t, V_t>;

    using MainLoop = std::conditional_t<
        canonical, CanonicalLoop<StaticForwardKernelConfig>,
        std::conditional_t<
            CFG.ping_pong, PingPongLoop<StaticForwardKernelConfig>,
            std::conditional_t<(CFG.kv_stages > 0), MultiStageLoop<StaticForwardKernelConfig>,
                               SingleStageLoop<StaticForwardKernelConfig>>>>;

    // The assumptions of the types above and of the kernel. `flashsmith explain` lists all rules
    // and their reasons.
    static constexpr bool valid_config() {
        static_assert(CFG.d_head % 8 == 0 && CFG.d_head <= 256,
                      "d_head: a tile of O has 8 columns, and O is kept in registers");
        static_assert(CFG.d_v == 0 || (d_v % 64 == 0 && d_head % 64 == 0 && d_v <= 256),
                      "d_v: O's panels are those of Q");
        static_assert(CFG.B_r % (16 * CFG.n_warps) == 0, "B_r: an mma has 16 rows");
        static_assert(CFG.B_c % 16 == 0, "B_c: a step of P V takes 16 keys");
        static_assert(n_threads <= 1024, "n_warps: a CTA has at most 1,024 threads");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        static_assert(is_load_count(CFG.Q_mma_load_K_tiles, 16 * N::QK_k_steps),
                      "Q_mma_load_K_tiles: 0, 2, 4, 8 or 16, and whole steps of d_head");
        static_assert(is_load_count(CFG.K_mma_load_K_tiles, 16 * N::QK_k_steps),
                      "K_mma_load_K_tiles: 0, 2, 4, 8 or 16, and whole steps of d_head");
        static_assert(is_load_count(CFG.V_mma_load_K_tiles, B_c),
                      "V_mma_load_K_tiles: 0, 2, 4, 8 or 16, and whole steps of B_c");
        static_assert(
            CFG.Q_mma_load_K_tiles == 0 || CFG.Q_mma_load_K_tiles == CFG.K_mma_load_K_tiles,
            "Q_mma_load_K_tiles: Q and K are walked in step");
        static_assert(CFG.kv_stages == 0 || (CFG.async_copy && CFG.eager_load_blocks),
                      "kv_stages: copies of later stages are in flight, asynchronous and eager");
        static_assert(
            !CFG.ping_pong || (CFG.kv_stages >= 3 && CFG.n_warps % 8 == 0),
            "ping_pong: halves of whole warpgroups, and a stage for each next to the next one");
        static_assert(!has_lists || (!splits_keys && !packs_gqa),
                      "program: a list has the blocks of one Q block of one head");
        static_assert(!canonical || (CFG.canonical == kCanonicalVersion && optimized_softmax &&
                                     !CFG.lazy_rescale && !CFG.ping_pong && !splits_keys &&
                                     B_c == canonical_tile(d_head, kTargetArch, CFG.d_v)),
                      "canonical: the order of operations is the specification's");
        return true;
    }

  private:
    // Whether loads of `count` K-tiles evenly divide an operand that is `extent` elements deep.
    // With double buffering there must be at least two loads.
    static constexpr bool is_load_count(int count, int extent) {
        const bool power_of_two = count >= 2 && count <= 16 && (count & (count - 1)) == 0;
        const int halves = CFG.mma_double_buffer_loads ? 2 : 1;
        return count == 0 ||
               (power_of_two && extent % (8 * count) == 0 && count * 8 * halves <= extent);
    }
};

}  // namespace flashsmith
