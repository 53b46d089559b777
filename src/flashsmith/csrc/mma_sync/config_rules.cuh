// Which configs a kernel can be built for, and what one costs an SM.
// The rules of configs/rules.py, one predicate each, same names, same order: rule i is bit i. Plain
// C++20 without CUDA types; in device code call it where classes are defined (nvcc refuses a host
// constexpr in a kernel body).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "mma_sync/flash_attention.cuh"

namespace flashsmith {

// --- predicates: true where the config keeps the rule --------------------------------------------
// Products are 64 bits wide: a config may hold any int.

namespace config_rules {

using Config = FlashForwardKernelConfig;

constexpr int kMmaRows = 16;  // rows of one m16n8k16 product, and the depth of its k
constexpr int kKTileColumns = 8;
constexpr int kMaxThreadsPerCta = 1024;
constexpr int kMaxLoadCount = 16;  // K-tiles of a streamed operand that registers can hold
constexpr int kThreadsPerWarp = 32;
constexpr int kRegistersPerSm = 65536;
constexpr int kReservedSmemPerCta = 1024;
constexpr int kMinRegistersBesideO = 48;

constexpr bool is_one_of(int value, std::initializer_list<int> allowed) {
    for (const int one : allowed)
        if (value == one) return true;
    return false;
}

constexpr bool d_head_supported(const Config& cfg, int) {
    return is_one_of(cfg.d_head, {32, 64, 96, 128, 192, 256});
}

constexpr bool B_r_supported(const Config& cfg, int) {
    return is_one_of(cfg.B_r, {64, 128, 192, 256});
}

constexpr bool B_c_supported(const Config& cfg, int) {
    return is_one_of(cfg.B_c, {32, 48, 64, 96, 128});
}

constexpr bool n_warps_supported(const Config& cfg, int) {
    return is_one_of(cfg.n_warps, {2, 4, 6, 8, 12});
}

constexpr bool d_head_in_mma_steps(const Config& cfg, int) {
    return cfg.d_head % kMmaRows == 0;
}

constexpr bool B_c_in_mma_steps(const Config& cfg, int) {
    return cfg.B_c % kMmaRows == 0;
}

constexpr bool warp_rows_in_mma_steps(const Config& cfg, int) {
    return cfg.n_warps > 0 && cfg.B_r % (int64_t{kMmaRows} * cfg.n_warps) == 0;
}

constexpr bool threads_within_limit(const Config& cfg, int) {
    return int64_t{kThreadsPerWarp} * cfg.n_warps <= kMaxThreadsPerCta;
}

// Whether the tiles fit in so many bytes.
constexpr bool tiles_fit(const Config& cfg, int64_t bytes) {
    const int64_t tile_rows = cfg.B_r + 2 * int64_t{cfg.B_c} * cfg.kv_tiles();
    // By division, since the product of d_head with them may not fit 64 bits.
    return tile_rows > 0 && cfg.d_head <= bytes / 2 / tile_rows;
}

constexpr bool smem_within_limit(const Config& cfg, int max_smem_per_block) {
    return tiles_fit(cfg, max_smem_per_block);
}

// Whether `count` K-tiles at a time walk an operand that is `extent` elements deep.
constexpr bool is_load_count(int count, int extent) {
    const bool power_of_two = count >= 2 && count <= kMaxLoadCount && (count & (count - 1)) == 0;
    return count == 0 || (power_of_two && extent % (int64_t{kKTileColumns} * count) == 0);
}

constexpr bool Q_load_count(const Config& cfg, int) {
    return is_load_count(cfg.Q_mma_load_K_tiles, cfg.d_head);
}

constexpr bool K_load_count(const Config& cfg, int) {
    return is_load_count(cfg.K_mma_load_K_tiles, cfg.d_head);
}

constexpr bool V_load_count(const Config& cfg, int) {
    return is_load_count(cfg.V_mma_load_K_tiles, cfg.B_c);
}

// While one half of an operand is multiplied, another is loaded.
constexpr bool leaves_room_to_buffer(const Config& cfg, int count, int extent) {
    return !cfg.mma_double_buffer_loads || int64_t{count} * 2 * kKTileColumns <= extent;
}

constexpr bool Q_buffered_load_count(const Config& cfg, int) {
    return leaves_room_to_buffer(cfg, cfg.Q_mma_load_K_tiles, cfg.d_head);
}

constexpr bool K_buffered_load_count(const Config& cfg, int) {
    return leaves_room_to_buffer(cfg, cfg.K_mma_load_K_tiles, cfg.d_head);
}

constexpr bool V_buffered_load_count(const Config& cfg, int) {
    return leaves_room_to_buffer(cfg, cfg.V_mma_load_K_tiles, cfg.B_c);
}

constexpr bool Q_and_K_load_counts_agree(const Config& cfg, int) {
    return cfg.Q_mma_load_K_tiles == 0 || cfg.Q_mma_load_K_tiles == cfg.K_mma_load_K_tiles;
}

// With 32 rows a warp, O alone takes d_head registers a thread; 192 leave too few for the rest.
constexpr bool O_fits_registers(const Config& cfg, int) {
    return cfg.d_head <= 128 || cfg.B_r <= int64_t{kMmaRows} * cfg.n_warps;
}

constexpr bool kv_stages_supported(const Config& cfg, int) {
    return is_one_of(cfg.kv_stages, {0, 2, 3, 4});
}

constexpr bool kv_stages_copy_ahead(const Config& cfg, int) {
    return cfg.kv_stages == 0 || (cfg.async_copy && cfg.eager_load_blocks);
}

constexpr bool ping_pong_stages(const Config& cfg, int) {
    return !cfg.ping_pong || cfg.kv_stages >= 3;
}

constexpr bool ping_pong_warps(const Config& cfg, int) {
    return !cfg.ping_pong || cfg.n_warps % 8 == 0;
}

constexpr bool min_ctas_supported(const Config& cfg, int) {
    return is_one_of(cfg.min_ctas_per_sm, {0, 2, 3, 4});
}

constexpr bool min_ctas_fit_registers(const Config& cfg, int) {
    const int64_t threads = int64_t{kThreadsPerWarp} * cfg.n_warps;
    return cfg.min_ctas_per_sm == 0 ||
           kRegistersPerSm / threads / cfg.min_ctas_per_sm >=
               int64_t{cfg.B_r} * cfg.d_head / threads + kMinRegistersBesideO;
}

constexpr bool min_ctas_fit_smem(const Config& cfg, int max_smem_per_block) {
    return cfg.min_ctas_per_sm == 0 ||
           tiles_fit(cfg,
                     (int64_t{max_smem_per_block} + kReservedSmemPerCta) / cfg.min_ctas_per_sm -
                         kReservedSmemPerCta);
}

constexpr bool l2_group_supported(const Config& cfg, int) {
    return is_one_of(cfg.l2_group_mib, {0, 16, 32});
}

struct Rule {
    const char* name;
    bool (*holds)(const Config& cfg, int max_smem_per_block);
};

inline constexpr Rule kRules[] = {
    {"d_head_supported", d_head_supported},
    {"B_r_supported", B_r_supported},
    {"B_c_supported", B_c_supported},
    {"n_warps_supported", n_warps_supported},
    {"d_head_in_mma_steps", d_head_in_mma_steps},
    {"B_c_in_mma_steps", B_c_in_mma_steps},
    {"warp_rows_in_mma_steps", warp_rows_in_mma_steps},
    {"threads_within_limit", threads_within_limit},
    {"smem_within_limit", smem_within_limit},
    {"Q_load_count", Q_load_count},
    {"K_load_count", K_load_count},
    {"V_load_count", V_load_count},
    {"Q_buffered_load_count", Q_buffered_load_count},
    {"K_buffered_load_count", K_buffered_load_count},
    {"V_buffered_load_count", V_buffered_load_count},
    {"Q_and_K_load_counts_agree", Q_and_K_load_counts_agree},
    {"O_fits_registers", O_fits_registers},
    {"kv_stages_supported", kv_stages_supported},
    {"kv_stages_copy_ahead", kv_stages_copy_ahead},
    {"ping_pong_stages", ping_pong_stages},
    {"ping_pong_warps", ping_pong_warps},
    {"min_ctas_supported", min_ctas_supported},
    {"min_ctas_fit_registers", min_ctas_fit_registers},
    {"min_ctas_fit_smem", min_ctas_fit_smem},
    {"l2_group_supported", l2_group_supported},
};
static_assert(std::size(kRules) <= 32, "broken_rules() has a bit for 32 rules");

}  // namespace config_rules

// The rules that `cfg` breaks where one CTA may have `max_smem_per_block` bytes of shared memory,
// as bits in the order of kRules. 0: a kernel can be built.
constexpr uint32_t broken_rules(const FlashForwardKernelConfig& cfg, int max_smem_per_block) {
    uint32_t bits = 0;
    for (size_t i = 0; i < std::size(config_rules::kRules); ++i) {
        const bool broken = !config_rules::kRules[i].holds(cfg, max_smem_per_block);
        bits |= uint32_t{broken} << i;
    }
    return bits;
}

// --- residency -----------------------------------------------------------------------------------

constexpr int FlashForwardKernelConfig::num_ctas_per_sm(int max_smem_bytes, int registers) const {
    using config_rules::kRegistersPerSm;
    using config_rules::kReservedSmemPerCta;
    constexpr int kMaxThreadsPerSm = 2048;
    constexpr int kMaxCtasPerSm = 32;

    int ctas = max_smem_bytes / (smem_bytes() + kReservedSmemPerCta);
    const int by_threads = kMaxThreadsPerSm / (config_rules::kThreadsPerWarp * n_warps);
    ctas = by_threads < ctas ? by_threads : ctas;
    ctas = kMaxCtasPerSm < ctas ? kMaxCtasPerSm : ctas;
    if (registers > 0) {
        // A warp's registers are handed out 8 per thread at a time: 256 per warp.
        const int per_warp = (registers + 7) / 8 * 8 * config_rules::kThreadsPerWarp;
        const int by_registers = kRegistersPerSm / per_warp / n_warps;
        ctas = by_registers < ctas ? by_registers : ctas;
    }
    return ctas;
}

}  // namespace flashsmith
