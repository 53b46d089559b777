// Which configs of the wgmma family a kernel can be built for. The rules of
// configs/hopper/rules.py, one predicate each, same names, same order: rule i is bit i. Plain C++20
// without CUDA types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "wgmma/config.cuh"

namespace flashsmith {

// --- predicates: true where the config keeps the rule --------------------------------------------
// Products are 64 bits wide: a config may hold any int.

namespace wgmma_rules {

using Config = HopperForwardKernelConfig;

struct Limits {
    int arch;
    int max_smem_per_block;
};

constexpr int kArch = 90;
constexpr int kMinRegisters = 24, kMaxRegisters = 240, kRegisterUnit = 8;
constexpr int kRegistersPerThreadAndWarpgroup = 512;  // 65,536 over a warpgroup's 128 threads
constexpr int kRegistersBesideTiles = 24;
constexpr int kRegistersBesideProduct = 26;
constexpr int kDefaultSectionMib = 32, kMaxSectionMib = 64;
constexpr int kMaxCtasPerSm = 4;
constexpr int kReservedSmem = 1024;  // of a CTA, beside its own
constexpr int kMaxExp2FmaShare = 50;

constexpr bool is_multiple(int value, int unit, int lowest, int highest) {
    return value >= lowest && value <= highest && value % unit == 0;
}

constexpr bool arch_is_hopper(const Config&, const Limits& limits) {
    return limits.arch == kArch;
}

constexpr bool d_head_supported(const Config& cfg, const Limits&) {
    return cfg.d_head == 64 || cfg.d_head == 96 || cfg.d_head == 128 || cfg.d_head == 192 ||
           cfg.d_head == 256;
}

constexpr bool n_warpgroups_supported(const Config& cfg, const Limits&) {
    return cfg.n_warpgroups >= 1 && cfg.n_warpgroups <= 4;
}

constexpr bool B_r_is_warpgroups(const Config& cfg, const Limits&) {
    return cfg.B_r == int64_t{64} * cfg.n_warpgroups;
}

constexpr bool B_c_supported(const Config& cfg, const Limits&) {
    return is_multiple(cfg.B_c, 16, 32, 256);
}

constexpr bool kv_stages_supported(const Config& cfg, const Limits&) {
    return cfg.kv_stages >= 1 && cfg.kv_stages <= 8;
}

constexpr bool q_buffers_supported(const Config& cfg, const Limits&) {
    return cfg.q_buffers == 1 || cfg.q_buffers == 2;
}

// By division, since the product of three ints may not even fit 64 bits.
constexpr bool tiles_within(const Config& cfg, int64_t bytes) {
    const int64_t O_rows = cfg.separate_O ? cfg.B_r : 0;
    const int64_t rows =
        int64_t{cfg.B_r} * cfg.q_buffers + O_rows + 2 * (int64_t{cfg.kv_stages} * cfg.B_c);
    return rows > 0 && bytes >= 0 && cfg.d_head <= bytes / (2 * rows);
}

constexpr bool smem_within_limit(const Config& cfg, const Limits& limits) {
    return tiles_within(cfg, limits.max_smem_per_block - Config::kBarrierPage);
}

constexpr bool producer_registers_supported(const Config& cfg, const Limits&) {
    return is_multiple(cfg.producer_registers, kRegisterUnit, kMinRegisters, kMaxRegisters);
}

constexpr bool consumer_registers_supported(const Config& cfg, const Limits&) {
    return is_multiple(cfg.consumer_registers, kRegisterUnit, kMinRegisters, kMaxRegisters);
}

// What a thread of each of so many warpgroups on an SM starts with.
constexpr int64_t registers_each(int64_t warpgroups) {
    return kRegistersPerThreadAndWarpgroup / warpgroups / kRegisterUnit * kRegisterUnit;
}

// There is no more to share than what the warpgroups start with.
constexpr bool registers_within_file(const Config& cfg, const Limits&) {
    const int64_t warpgroups = int64_t{cfg.n_warpgroups} + 1;
    if (warpgroups < 1 || cfg.ctas_per_sm < 1) return false;
    const int64_t each = registers_each(warpgroups * cfg.ctas_per_sm);
    return cfg.producer_registers + int64_t{cfg.n_warpgroups} * cfg.consumer_registers <=
           each * warpgroups;
}

constexpr bool tiles_fit_registers(const Config& cfg, const Limits&) {
    const int64_t O = cfg.d_head / 2, S = cfg.B_c / 2, P = cfg.overlap ? cfg.B_c / 4 : 0;
    return O + S + P + kRegistersBesideTiles <= cfg.consumer_registers;
}

constexpr bool product_fits_registers(const Config& cfg, const Limits&) {
    const int64_t warpgroups = (int64_t{cfg.n_warpgroups} + 1) * cfg.ctas_per_sm;
    if (warpgroups < 1) return false;
    const int64_t accumulators = (cfg.d_head > cfg.B_c ? cfg.d_head : cfg.B_c) / 2;
    return accumulators + kRegistersBesideProduct <= registers_each(warpgroups);
}

constexpr bool pingpong_needs_two(const Config& cfg, const Limits&) {
    return cfg.pingpong == PingPong::none || cfg.n_warpgroups >= 2;
}

constexpr bool cluster_size_supported(const Config& cfg, const Limits&) {
    return cfg.cluster_size == 1 || cfg.cluster_size == 2;
}

constexpr bool rescale_threshold_supported(const Config& cfg, const Limits&) {
    return cfg.rescale_threshold >= 0 && cfg.rescale_threshold <= 8;
}

constexpr bool section_mib_supported(const Config& cfg, const Limits&) {
    const int mib = cfg.section_mib;
    return mib >= 1 && mib <= kMaxSectionMib && (mib & (mib - 1)) == 0;
}

constexpr bool section_needs_longest_first(const Config& cfg, const Limits&) {
    return cfg.section_mib == kDefaultSectionMib || cfg.tile_order == TileOrder::longest_first;
}

constexpr bool ctas_per_sm_supported(const Config& cfg, const Limits&) {
    return cfg.ctas_per_sm >= 1 && cfg.ctas_per_sm <= kMaxCtasPerSm;
}

constexpr bool ctas_fit_shared_memory(const Config& cfg, const Limits& limits) {
    if (cfg.ctas_per_sm == 1) return true;  // smem_within_limit's own
    if (cfg.ctas_per_sm < 1) return false;
    const int64_t each =
        (int64_t{limits.max_smem_per_block} + kReservedSmem) / cfg.ctas_per_sm - kReservedSmem;
    return tiles_within(cfg, each - Config::kBarrierPage);
}

constexpr bool exp2_fma_share_supported(const Config& cfg, const Limits&) {
    return cfg.exp2_fma_share >= 0 && cfg.exp2_fma_share <= kMaxExp2FmaShare;
}

constexpr bool early_exp_needs_overlap(const Config& cfg, const Limits&) {
    return cfg.overlap || !cfg.early_exp;
}

constexpr bool stale_max_needs_rescale(const Config& cfg, const Limits&) {
    return cfg.rescale_threshold > 0 || !cfg.stale_max;
}

// Scores above a maximum out of date must come out infinite, not wrapped around.
constexpr bool stale_max_needs_sfu(const Config& cfg, const Limits&) {
    return cfg.exp2_fma_share == 0 || !cfg.stale_max;
}

// A warp may read K by itself, and the other CTA hears from one warp of each warpgroup.
constexpr bool stale_max_needs_no_cluster(const Config& cfg, const Limits&) {
    return cfg.cluster_size == 1 || !cfg.stale_max;
}

constexpr bool direct_O_is_not_separate(const Config& cfg, const Limits&) {
    return !(cfg.direct_O && cfg.separate_O);
}

struct Rule {
    const char* name;
    bool (*holds)(const Config& cfg, const Limits& limits);
};

inline constexpr Rule kRules[] = {
    {"arch_is_hopper", arch_is_hopper},
    {"d_head_supported", d_head_supported},
    {"n_warpgroups_supported", n_warpgroups_supported},
    {"B_r_is_warpgroups", B_r_is_warpgroups},
    {"B_c_supported", B_c_supported},
    {"kv_stages_supported", kv_stages_supported},
    {"q_buffers_supported", q_buffers_supported},
    {"smem_within_limit", smem_within_limit},
    {"producer_registers_supported", producer_registers_supported},
    {"consumer_registers_supported", consumer_registers_supported},
    {"registers_within_file", registers_within_file},
    {"tiles_fit_registers", tiles_fit_registers},
    {"product_fits_registers", product_fits_registers},
    {"pingpong_needs_two", pingpong_needs_two},
    {"cluster_size_supported", cluster_size_supported},
    {"rescale_threshold_supported", rescale_threshold_supported},
    {"section_mib_supported", section_mib_supported},
    {"section_needs_longest_first", section_needs_longest_first},
    {"ctas_per_sm_supported", ctas_per_sm_supported},
    {"ctas_fit_shared_memory", ctas_fit_shared_memory},
    {"exp2_fma_share_supported", exp2_fma_share_supported},
    {"early_exp_needs_overlap", early_exp_needs_overlap},
    {"stale_max_needs_rescale", stale_max_needs_rescale},
    {"stale_max_needs_sfu", stale_max_needs_sfu},
    {"stale_max_needs_no_cluster", stale_max_needs_no_cluster},
    {"direct_O_is_not_separate", direct_O_is_not_separate},
};
static_assert(std::size(kRules) <= 32, "broken_rules() has a bit for 32 rules");

}  // namespace wgmma_rules

// The rules that `cfg` breaks on a device, as bits in the order of kRules. 0: a kernel can be
// built.
constexpr uint32_t broken_rules(const HopperForwardKernelConfig& cfg, int max_smem_per_block,
                                int arch = wgmma_rules::kArch) {
    uint32_t bits = 0;
    for (size_t i = 0; i < std::size(wgmma_rules::kRules); ++i) {
        const bool broken = !wgmma_rules::kRules[i].holds(cfg, {arch, max_smem_per_block});
        bits |= uint32_t{broken} << i;
    }
    return bits;
}

// CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
// count per thread, the same for all warps when they start; 0 leaves the register file out of
// account.
constexpr int64_t num_ctas_per_sm(const HopperForwardKernelConfig& cfg, int max_smem_bytes,
                                  int registers = 0) {
    constexpr int kReservedSmemPerCta = 1024, kMaxThreadsPerSm = 2048, kMaxCtasPerSm = 32;
    constexpr int64_t kRegistersPerSm = 65536;
    const auto less = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const int64_t threads = cfg.n_threads();
    const int64_t by_smem = max_smem_bytes / (cfg.smem_bytes() + kReservedSmemPerCta);
    const int64_t ctas = less(less(by_smem, kMaxThreadsPerSm / threads), kMaxCtasPerSm);
    if (registers <= 0) return ctas;
    return less(ctas, kRegistersPerSm / ((registers + 7) / 8 * 8 * threads));
}

}  // namespace flashsmith
