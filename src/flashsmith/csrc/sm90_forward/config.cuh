// The config that identifies a kernel of the wgmma family, and the arguments of such a kernel.
// Plain C++20 without CUDA types, because the host compiler, the kernels and the tests all read
// this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/forward_args.cuh"
#include "common/program_args.cuh"

namespace flashsmith {

// The stage of the main loop that a CTA's consumer warpgroups pass through one after another: none,
// issuing GEMMs, or computing exponentials.
enum class PingPong : int { none = 0, gemm = 1, exp = 2 };

// Which tiles a CTA computes: one tile; every n-th tile of a grid of n CTAs; or always the next
// tile that no CTA has begun.
enum class Schedule : int { one_tile = 0, static_persistent = 1, dynamic = 2 };

// The order in which tiles begin: head by head, or the longest first, in groups of heads whose K
// and V stay in L2 together.
enum class TileOrder : int { by_head = 0, longest_first = 1 };

// Identifies one kernel of the wgmma family. Fields, order and meaning match the Python class.
struct WgmmaForwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warpgroups;  // consumers with 64 rows of Q each; the producer is an additional one
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
    int section_mib;  // longest first: size of K and V of the heads in one group
    int ctas_per_sm;
    int exp2_fma_share;  // percent of the exponentials that the FMA pipe computes
    bool early_exp;      // with overlap: the concurrent GEMM does not delay exponentials
    bool stale_max;      // later blocks compute no maximum; sums show when it is out of date
    bool direct_O;       // O is stored from registers, so that Q's slot is free before O is done
    int short_block;     // a warpgroup's last block may end at a multiple of this; 0: it is always
                         // whole
    int split_keys;      // parts of a tile's keys if tiles would leave SMs idle; 0 means none
    bool pack_gqa;       // the rows of a tile are the query heads of a group, token after token
    int register_Q;      // how many 16-column steps of Q the GEMMs read from registers
    int canonical;       // version of the canonical order of operations; 0 means none
    int d_v;             // columns of V and O; 0 means d_head

    static constexpr int kMostColumnsOfO = 256;  // most columns that a warpgroup's registers hold

    constexpr auto operator<=>(const WgmmaForwardKernelConfig&) const = default;

    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }
    // Whether 64 rows of O are more than a warpgroup's registers hold. A second warpgroup, the
    // partner, then has the right half of O's columns; see partner.cuh.
    constexpr bool halves_O() const { return d_head_v() > kMostColumnsOfO; }
    constexpr int consumers() const { return n_warpgroups * (halves_O() ? 2 : 1); }
    constexpr int n_threads() const { return kWarpgroupThreads * (consumers() + 1); }

    // Bytes of the Q, K and V tiles that a CTA holds at once, and of the O tile if it is separate.
    constexpr int64_t tile_bytes() const {
        const int64_t of_qk = int64_t{B_r} * q_buffers + int64_t{kv_stages} * B_c;
        const int64_t of_v = int64_t{B_r} * (separate_O ? 1 : 0) + int64_t{kv_stages} * B_c;
        return (of_qk * tile_columns(d_head) + of_v * tile_columns(d_head_v())) * kElementBytes;
    }
    // Dynamic shared memory of one CTA: the tiles, a page for barriers and tile infos, and P for a
    // partner.
    static constexpr int kBarrierPage = 1024;
    constexpr int64_t smem_bytes() const {
        return tile_bytes() + kBarrierPage + (halves_O() ? message_bytes() : 0);
    }
    // The bytes that a warpgroup sends to its partner for a block: the P of each thread and two
    // factors of O.
    constexpr int64_t message_bytes() const { return int64_t{kWarpgroupThreads} * (B_c + 8); }

    // Canonical kernels: the bytes of the state that a consumer or partner saves for its rows
    // between chunks. Each thread has four sums of O for every eight of the warpgroup's columns,
    // and the statistics of two rows.
    constexpr int64_t running_state_bytes() const {
        const int columns = halves_O() ? d_head_v() / 2 : d_head_v();
        return int64_t{kWarpgroupThreads} * (columns / 8 + 1) * 16;
    }

    // CTAs that fit on one SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
    // count per thread, the same for all warps when they start; 0 ignores the register file.
    constexpr int num_ctas_per_sm(int max_smem_bytes, int registers = 0) const {
        return ctas_that_fit(smem_bytes(), n_threads(), max_smem_bytes, registers);
    }
};

// Whether the tiles of a last round that leaves most SMs idle are split into parts of one
// warpgroup's rows each. For example, 4,096 tiles on 132 SMs are 31 rounds and four tiles more. A
// warpgroup alone is slower than one of several, so splitting gains only if all parts fit in one
// round. Masked kernels are excluded: masks need the whole sequence's length, which parts do not
// have.
constexpr bool splits_last_tiles(const WgmmaForwardKernelConfig& config,
                                 const Semantics& semantics) {
    return !semantics.hides_keys() && config.n_warpgroups > 1 && config.cluster_size == 1 &&
           config.split_keys == 0 && !semantics.program_masks;
}

// Whether the tiles with fewer rows come last of all, among the heads that SMs end with: the
// shorter the last tiles are, the sooner all SMs are done. Otherwise they stay next to the other
// tiles of their head, which read the same K and V at the same time.
constexpr bool keeps_short_tiles_back(const WgmmaForwardKernelConfig& config,
                                      const Semantics& semantics) {
    return !semantics.hides_keys() && !semantics.packed && config.n_warpgroups > 1 &&
           config.cluster_size == 1 && config.tile_order == TileOrder::by_head;
}

// Whether sequences may end anywhere in the keys' tensor maps. This applies to packed sequences,
// and to calls that may read only some of a sequence's keys (`k_begin`, `seqused_k`). The keys of
// such a call, if they are dense, are mapped as one long sequence: see rows_of_batches().
constexpr bool packs_keys(const Semantics& semantics) {
    return semantics.packed || semantics.partial;
}

// A divisor that the host knows: on the GPU, one multiplication replaces the roughly twenty
// instructions of a division. n / divisor is (high half of n * multiplier + n) >> shift, for n
// below 2^31.
struct Reciprocal {
    uint32_t divisor, multiplier, shift;
};

// Everything that a kernel of this family needs. It is the only parameter and lies in constant
// memory.
struct HopperForwardKernelArgs {
    TensorMap q, k, v, o;
    ForwardKernelArgs problem;
    // Dynamic schedule: the number of tiles handed out after the first of every CTA. It is zero
    // between launches, because the last request resets it.
    uint32_t* tile_counter;
    int32_t n_tiles;  // of the whole problem; cluster_size tiles, for one cluster, count as one
    int32_t n_whole_tiles;  // tiles from this one on are parts of tiles: see splits_last_tiles()
    // The tiles of the last heads: first the long ones of all these heads, then the short ones. See
    // keeps_short_tiles_back().
    int32_t first_of_last_heads, first_short_tile, long_tiles;  // long_tiles: per head
    // Divisors: the parts of a split tile, the tiles of a head, the query heads of a sequence, and
    // the query heads that share a key head. For longest_first, also the query heads (of all
    // sequences) and the tiles of a head group. With pack_gqa, tiles and all head counts except a
    // group's refer to key heads.
    Reciprocal parts_per_tile, tiles_per_head, heads_q, heads_per_kv_head, heads_per_group,
        tiles_per_group;
};

// The arguments of kernels that run a caller's program.
struct HopperProgramArgs : HopperForwardKernelArgs {
    ProgramArgs program;
};

using hopper_forward_kernel_fn = void (*)(const HopperForwardKernelArgs);

}  // namespace flashsmith
