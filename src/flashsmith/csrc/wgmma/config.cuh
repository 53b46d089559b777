// The config that names a kernel of the wgmma family, and what such a kernel is called with.
// Plain C++20 without CUDA types: the host compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/forward_args.cuh"

namespace flashsmith {

// Whose turn it is among the warpgroups of a CTA: nobody's, to issue products, or to exponentiate.
enum class PingPong : int { none = 0, gemm = 1, exp = 2 };

// Which tiles a CTA computes: one; every n-th of the grid's n CTAs; or the next not yet begun.
enum class Schedule : int { one_tile = 0, static_persistent = 1, dynamic = 2 };

// In which order tiles begin: head by head; or the longest first, in sections of heads whose K and
// V stay in L2 together.
enum class TileOrder : int { by_head = 0, longest_first = 1 };

// Names one kernel of the wgmma family. Fields, order and meaning are those of the Python class.
struct HopperForwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warpgroups;  // that compute, 64 rows of Q each; one more loads
    int kv_stages;
    int q_buffers;
    int producer_registers;
    int consumer_registers;
    bool overlap;
    PingPong pingpong;
    int cluster_size;
    Schedule schedule;
    TileOrder tile_order;
    bool separate_O;
    int rescale_threshold;
    int section_mib;  // longest first: K and V of the heads in one section
    int ctas_per_sm;
    int exp2_fma_share;  // percent of the exponentials that the FMA pipe computes
    bool early_exp;      // overlap: no exponential is put off until the product beside it is done
    bool stale_max;      // later blocks look for no maximum: their sums tell when it is out of date
    bool direct_O;       // O leaves from registers, so that Q's place is free before O is done

    constexpr auto operator<=>(const HopperForwardKernelConfig&) const = default;

    constexpr int n_threads() const { return 128 * (n_warpgroups + 1); }

    // Bytes of the Q, K and V tiles a CTA holds at once, and of O's where it has its own.
    constexpr int64_t tile_bytes() const {
        const int64_t rows =
            int64_t{B_r} * (q_buffers + (separate_O ? 1 : 0)) + 2 * int64_t{kv_stages} * B_c;
        return rows * d_head * 2;
    }
    // Dynamic shared memory of one CTA: the tiles, and a page for barriers and notices.
    static constexpr int kBarrierPage = 1024;
    constexpr int64_t smem_bytes() const { return tile_bytes() + kBarrierPage; }
};

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

// Whether the tiles of a last round that leaves most SMs idle are split into parts, one warpgroup's
// rows each, and spread: 4,096 tiles on 132 SMs are 31 rounds and four tiles more. A warpgroup by
// itself is slower than beside others, so only parts that all fit one round gain anything. Masks
// want the whole sequence's length, which parts give up.
constexpr bool splits_last_tiles(const HopperForwardKernelConfig& config,
                                 const Semantics& semantics) {
    return semantics.mask == MaskKind::none && config.n_warpgroups > 1 && config.cluster_size == 1;
}

// Whether the tiles that are short of rows come last of all, as far as the heads that SMs end with
// go: the less the last tiles take, the sooner all SMs are done. Elsewhere they stay beside the
// other tiles of their head, which read the same K and V at the same time.
constexpr bool keeps_short_tiles_back(const HopperForwardKernelConfig& config,
                                      const Semantics& semantics) {
    return semantics.mask == MaskKind::none && !semantics.packed && config.n_warpgroups > 1 &&
           config.cluster_size == 1 && config.tile_order == TileOrder::by_head;
}

// Packed sequences end at this row of their tensor maps, see wgmma/coordinates.cuh.
inline constexpr int kRowsOfMap = 1 << 30;

// A divisor that the host knows, for a multiplication in place of the some twenty instructions that
// the GPU divides in. n / divisor is (high half of n multiplier + n) >> shift, for n below 2^31.
struct Divisor {
    uint32_t divisor, multiplier, shift;
};

// Everything a kernel of this family needs: its only parameter, in constant memory.
struct HopperForwardKernelArgs {
    TensorMap q, k, v, o;
    ForwardKernelArgs problem;
    // Dynamic schedule: tiles handed out beyond the first of every CTA. Zero between launches: the
    // last CTA to ask resets it.
    uint32_t* tile_counter;
    int32_t n_tiles;  // of the whole problem; clusters: groups of cluster_size tiles of one head
    int32_t n_whole_tiles;  // those from here on are parts of tiles: see splits_last_tiles()
    // Those of the last heads: first the long ones of all, then the short ones. See
    // keeps_short_tiles_back().
    int32_t first_of_last_heads, first_short_tile, long_tiles;  // long_tiles: of a head
    // Where a tile lies: parts of a split tile, tiles of a head, query heads of a sequence, query
    // heads that share a key head; longest first also query heads (of all sequences) and tiles of a
    // section.
    Divisor tile_parts, head_tiles, heads_q, group, section_heads, section_tiles;
};

using hopper_forward_kernel_fn = void (*)(const HopperForwardKernelArgs);

}  // namespace flashsmith
