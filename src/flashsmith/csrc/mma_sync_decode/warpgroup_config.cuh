// The kernel of sequences with many rows on sm_90: its config, derived from the decode kernels'
// config, and its arguments. Plain C++20 without CUDA types, because the host compiler and
// the kernels read this file.
#pragma once

#include "common/canonical_sizes.cuh"
#include "mma_sync_decode/config.cuh"
#include "sm90_forward/config.cuh"

namespace flashsmith {

// Keys of a tile are a multiple of 16 that the usual page sizes divide, so that a page is one box
// of the copies or a few.
constexpr int warpgroup_keys(const FlashDecodeKernelConfig& config) {
    if (config.canonical > 0) return canonical_tile(config.d_head, 90, config.d_v);
    // Two stages of wide K and V leave less room.
    const int columns = config.d_head + config.d_head_v();
    return columns <= 320 ? 128 : columns <= 384 ? 96 : 64;
}

// With two warpgroups, there are registers for a product that overlaps their softmax; three
// warpgroups hide the softmax behind each other's products. With long heads there is room for one Q
// buffer only, so O is stored from registers. It is also stored from registers if it is wider than
// Q's slot.
constexpr WgmmaForwardKernelConfig warpgroup_config(const FlashDecodeKernelConfig& config) {
    const int warpgroups = config.chunk_warpgroups;
    const bool is_wide = config.d_head > 128, has_three = warpgroups > 2;
    return {
        .dtype = config.dtype,
        .d_head = config.d_head,
        .B_r = kWarpgroupRows * warpgroups,
        .B_c = warpgroup_keys(config),
        .n_warpgroups = warpgroups,
        .kv_stages = 2,
        .q_buffers = is_wide ? 1 : 2,
        .producer_registers = has_three ? 32 : 40,
        .consumer_registers = has_three ? 160 : 232,
        .overlap = !has_three,
        .pingpong = is_wide ? PingPong::none : PingPong::gemm,
        .cluster_size = 1,
        .schedule = Schedule::dynamic,
        .tile_order = TileOrder::longest_first,
        .separate_O = false,
        .rescale_threshold = config.canonical > 0 ? 0 : 8,
        .section_mib = 32,
        .ctas_per_sm = 1,
        .exp2_fma_share = 0,
        .early_exp = false,
        .stale_max = false,
        .direct_O = is_wide || config.d_v > config.d_head,
        .short_block = 0,
        .split_keys = 0,
        .pack_gqa = false,
        .register_Q = 0,
        .canonical = config.canonical,
        .d_v = config.d_v,
    };
}

// Every length may occur, so the semantics allow every tile to be cut.
constexpr Semantics of_any_length(Semantics semantics) {
    semantics.uneven = true;
    return semantics;
}

// Distances in a cache, in units of 16 bytes.
struct CacheStrides {
    uint32_t block, row, head;
};

// The warps that copy a tile of K, and the warps that copy a tile of V.
constexpr int kProducersOfTile = kWarpsPerWarpgroup / 2;

// Boxes of fewer keys than this take longer than copies row by row. On an H200, pages of 16 keys
// reach 0.95 of a dense cache's speed with boxes, and 0.72 row by row.
constexpr int kFewestBoxKeys = 8;

// The kernel's only parameter. The tensor maps of K and V describe the whole cache as rows of one
// long sequence.
struct WarpgroupKernelArgs {
    HopperForwardKernelArgs forward;
    const int32_t* cache_lens;  // number of keys before the call appends
    const int32_t* page_table;  // null if the cache is dense, with one block per sequence
    const void *k_cache, *v_cache;
    CacheStrides k_strides, v_strides;
    int64_t page_table_stride;
    int32_t capacity;        // keys per sequence
    int32_t appends;         // whether each sequence has as many new keys as queries
    int32_t blocks;          // pages of the cache
    int32_t k_rows, v_rows;  // rows of the maps from one block of the cache to the next
    int32_t box_keys;        // keys that one copy takes, all in one block
    int32_t gathers;         // whether threads copy K and V row by row
    int32_t most_rows;       // most rows of a K/V head in sequences that other kernels compute
    int32_t section_keys;    // keys, over K/V heads, whose K and V should stay in L2 together
    Divisor by_page;
    int32_t d;  // width of Q and K; the problem's d is the width of O
};

}  // namespace flashsmith
