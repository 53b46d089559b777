// The config that names a kernel of the wgmma family, and what such a kernel is called with.
// Plain C++20 without CUDA types: the host compiler, the kernels and the tests all read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/forward_args.cuh"

namespace flashsmith {

// Which stage of the main loop one consumer warpgroup of a CTA after the other goes through: none,
// the issue of GEMMs, or the exponentials.
enum class PingPong : int { none = 0, gemm = 1, exp = 2 };

// Which tiles a CTA computes: one; every n-th, of n CTAs in the grid; or the next not yet begun.
enum class Schedule : int { one_tile = 0, static_persistent = 1, dynamic = 2 };

// In which order tiles begin: head by head; or the longest first, in groups of heads whose K and V
// stay in L2 together.
enum class TileOrder : int { by_head = 0, longest_first = 1 };

// Names one kernel of the wgmma family. Fields, order and meaning are those of the Python class.
struct HopperForwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warpgroups;  // of consumers, 64 rows of Q each; one more is the producer's
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
    int section_mib;  // longest first: K and V of the heads in one group
    int ctas_per_sm;
    int exp2_fma_share;  // percent of the exponentials that the FMA pipe computes
    bool early_exp;      // overlap: no exponential is put off until the GEMM beside it is done
    bool stale_max;      // later blocks compute no maximum: sums show when it is out of date
    bool direct_O;       // O leaves from registers, so that Q's slot is free before O is done
    int short_block;     // a warpgroup's last block may end after so many keys; 0: it may not
    int split_keys;      // parts of a tile's keys where tiles would leave SMs idle; 0: none
    bool pack_gqa;       // a tile's rows are the query heads of a group, token after token
    int register_Q;      // steps of 16 columns of Q that a tile's GEMMs read from registers
    int canonical;       // version of the canonical order that rows' bits keep; 0: none

    constexpr auto operator<=>(const HopperForwardKernelConfig&) const = default;

    constexpr int n_threads() const { return kWarpgroupThreads * (n_warpgroups + 1); }

    // Bytes of the Q, K and V tiles a CTA holds at once, and of O's where it has its own.
    constexpr int64_t tile_bytes() const {
        const int64_t rows =
            int64_t{B_r} * (q_buffers + (separate_O ? 1 : 0)) + 2 * int64_t{kv_stages} * B_c;
        return rows * d_head * kElementBytes;
    }
    // Dynamic shared memory of one CTA: the tiles, and a page for barriers and tile infos.
    static constexpr int kBarrierPage = 1024;
    constexpr int64_t smem_bytes() const { return tile_bytes() + kBarrierPage; }

    // Canonical: what a warpgroup saves of its rows between chunks. Each thread has its sums of O,
    // four to every eight columns, and two rows' statistics.
    constexpr int64_t running_state_bytes() const {
        return int64_t{kWarpgroupThreads} * (d_head / 8 + 1) * 16;
    }

    // CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
    // count per thread, the same for all warps when they start; 0 leaves the register file out of
    // account.
    constexpr int num_ctas_per_sm(int max_smem_bytes, int registers = 0) const {
        return ctas_that_fit(smem_bytes(), n_threads(), max_smem_bytes, registers);
    }
};

// Whether the tiles of a last round that leaves most SMs idle are split into parts, one warpgroup's
// rows each, and spread: 4,096 tiles on 132 SMs are 31 rounds and four tiles more. A warpgroup by
// itself is slower than beside others, so only parts that all fit one round gain anything. Masks
// need the whole sequence's length, which parts do not have.
constexpr bool splits_last_tiles(const HopperForwardKernelConfig& config,
                                 const Semantics& semantics) {
    return !semantics.hides_keys() && config.n_warpgroups > 1 && config.cluster_size == 1 &&
           config.split_keys == 0;
}

// Whether the tiles that are short of rows come last of all, as far as the heads that SMs end with
// go: the less the last tiles take, the sooner all SMs are done. Elsewhere they stay beside the
// other tiles of their head, which read the same K and V at the same time.
constexpr bool keeps_short_tiles_back(const HopperForwardKernelConfig& config,
                                      const Semantics& semantics) {
    return !semantics.hides_keys() && !semantics.packed && config.n_warpgroups > 1 &&
           config.cluster_size == 1 && config.tile_order == TileOrder::by_head;
}

// Whether the keys' tensor maps have sequences that end where they like: packed ones, and those of
// which some keys count. Dense, these are rows of one long sequence: see rows_of_batches().
constexpr bool packs_keys(const Semantics& semantics) {
    return semantics.packed || semantics.partial;
}

// A divisor that the host knows: a multiplication takes the place of some twenty instructions that
// a division takes on the GPU. n / divisor is (high half of n multiplier + n) >> shift, for n below
// 2^31.
struct Divisor {
    uint32_t divisor, multiplier, shift;
};

// Everything a kernel of this family needs: its only parameter, in constant memory.
struct HopperForwardKernelArgs {
    TensorMap q, k, v, o;
    ForwardKernelArgs problem;
    // Dynamic schedule: tiles handed out beyond the first of every CTA. Zero between launches: the
    // last request resets it.
    uint32_t* tile_counter;
    int32_t n_tiles;  // of the whole problem; with clusters cluster_size tiles of a head are one
    int32_t n_whole_tiles;  // those from here on are parts of tiles: see splits_last_tiles()
    // Those of the last heads: first the long ones of all, then the short ones. See
    // keeps_short_tiles_back().
    int32_t first_of_last_heads, first_short_tile, long_tiles;  // long_tiles: of a head
    // Parts of a split tile, tiles of a head, query heads of a sequence, query heads that share a
    // key head; longest first also query heads (of all sequences) and tiles of a head group. With
    // pack_gqa tiles, and all counts of heads but that of a group, are of key heads.
    Divisor parts_per_tile, tiles_per_head, heads_q, heads_per_kv_head, heads_per_group,
        tiles_per_group;
};

using hopper_forward_kernel_fn = void (*)(const HopperForwardKernelArgs);

}  // namespace flashsmith
