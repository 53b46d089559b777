// The config of a kernel of the wgmma_backward family, and the arguments of its main kernel. Plain
// C++20 without CUDA types, because the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"
#include "common/constants.cuh"
#include "common/program_args.cuh"
#include "wgmma_dq/config.cuh"

namespace flashsmith {

// The order of the GEMMs of a warpgroup in a step.
enum class StepOrder : int {
    dv_first = 0,         // S, then dv and dP, then dk and dq
    late_dq = 1,          // like dv_first, but dq overlaps the exponentials of the next step
    scores_together = 2,  // S and dP, then dv, dk and dq
    scores_ahead = 3,     // like late_dq, but the next step's S also comes before dk
};

// When the dq of a step is added to the sums in global memory.
enum class DqSums : int {
    beside_scores = 0,  // during the first GEMM of the next step
    sums_at_once = 1,   // as soon as the step's dq is done
    sums_under_dk = 2,  // as soon as dq is done, and dq is computed before dk
};

// The fields, their order and their meaning match the Python class. A new knob is added at the end,
// and a knob of 0 must change nothing.
struct WgmmaBackwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warpgroups;  // consumers, which have or share 64 keys; without the producer
    int q_stages;
    int do_stages;
    int ds_stages;
    int producer_registers;
    int consumer_registers;
    StepOrder order;
    bool early_exp;    // the concurrent GEMM does not delay exponentials
    bool split_roles;  // two warpgroups have the same keys: one computes dv, the other dk
    bool lagged_dq;    // a step computes the preceding step's dq: no warpgroup waits for another's
                       // dS
    bool pingpong;     // warpgroups alternate in issuing their GEMMs
    bool persistent;   // one CTA per SM takes one block of keys after another
    DqSums dq_sums;    // when the dq of a step is added to the sums
    bool ordered_dq;   // blocks of keys add to dq in a fixed order: the same bits in every run
    bool wide_stores;  // dk and dv are stored 16 bytes per lane
    bool bulk_sums;    // TMA adds dq to its sums from shared memory
    bool early_rows;   // the lse and D of a step are read before its GEMMs are issued
    bool without_dq;   // only dk and dv are computed: q is frozen
    int d_v;           // columns of V, do and dv; 0 means d_head
    bool cta_pair;     // the two CTAs of a cluster have the same keys, and half of the columns each
    bool separate_dq;  // CTAs that keep queries compute dq, in another launch
    bool shared_dq;    // the two CTAs of a cluster exchange dS, and compute half of the columns of
                       // dq each, for the keys of both
    bool multicast;    // with shared_dq: each CTA copies half of Q's and do's panels to both CTAs

    constexpr auto operator<=>(const WgmmaBackwardKernelConfig&) const = default;

    constexpr int n_ctas() const { return cta_pair ? 2 : 1; }  // CTAs that share a block of keys
    constexpr int cluster_size() const { return cta_pair || shared_dq ? 2 : 1; }
    // The CTAs that copy Q and do together.
    constexpr int query_ctas() const { return multicast ? 2 : 1; }
    // The keys of a cluster.
    constexpr int cluster_keys() const { return shared_dq ? 2 * B_c : B_c; }
    constexpr int n_threads() const { return kWarpgroupThreads * (n_warpgroups + 1); }
    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }

    // The config of the main kernel, which computes no dq if a separate kernel does.
    constexpr WgmmaBackwardKernelConfig of_main_kernel() const {
        WgmmaBackwardKernelConfig config = *this;
        config.without_dq |= separate_dq;
        config.separate_dq = false;
        return config;
    }
    // With separate_dq: the config of the kernel that computes dq. The stages of K and V are as
    // many as fit.
    constexpr WgmmaDqKernelConfig of_dq_kernel() const {
        const bool is_narrow = d_head <= 96, is_wide = d_head > 192;
        const int stages = d_head == 64 || d_head == 128 ? 3 : 2;
        return {
            .dtype = dtype,
            .d_head = d_head,
            .B_r = 2 * kWarpgroupRows,
            .B_c = is_narrow ? 128 : 64,
            .n_warpgroups = 2,
            .k_stages = stages,
            .v_stages = is_wide ? 1 : stages,
            .producer_registers = 24,
            .consumer_registers = 240,
            .late_dq = true,
            .pingpong = true,
            .d_v = d_v,
        };
    }

    constexpr int64_t dq_smem_bytes() const {
        return separate_dq ? of_dq_kernel().smem_bytes() : 0;
    }

    // The number of warpgroups with different keys, 64 each.
    constexpr int key_groups() const { return split_roles ? 1 : n_warpgroups; }

    // dS goes through shared memory only for dq.
    constexpr int n_ds_tiles() const { return without_dq || separate_dq ? 0 : ds_stages; }
    // Bytes of one CTA's K and V, of the stages of Q, do and dS, of P if one warpgroup passes it to
    // another, of S and dP, or K and dS, if they come from another CTA, and of dq before it is
    // added.
    constexpr int64_t tile_bytes() const {
        const int64_t of_qk =
            (int64_t{B_c} + int64_t{q_stages} * B_r) * tile_columns(d_head / n_ctas());
        const int64_t of_v =
            (int64_t{B_c} + int64_t{do_stages} * B_r) * tile_columns(d_head_v() / n_ctas());
        const int64_t P_bytes = split_roles ? int64_t{B_r} * B_c * 4 : 0;
        const int64_t of_dS = int64_t{n_ds_tiles()} * B_r * cluster_keys();
        return (of_qk + of_v + of_dS) * kElementBytes + peer_K_bytes() + P_bytes + peer_bytes() +
               sums_bytes();
    }
    // Bytes of the other CTA's K, in the two panels that have this CTA's columns of dq.
    constexpr int peer_K_bytes() const { return shared_dq ? 2 * B_c * 64 * kElementBytes : 0; }
    constexpr int peer_bytes() const { return cta_pair ? 2 * B_r * B_c * 4 : 0; }
    constexpr int sums_bytes() const {
        return bulk_sums ? n_warpgroups * kWarpgroupRows * dq_columns() * 4 : 0;
    }
    // Dynamic shared memory of one CTA: the tiles, the row statistics in the stages of Q and do,
    // and barriers.
    static constexpr int kBarrierPage = 256, kOrderBytes = 64;
    constexpr int64_t smem_bytes() const {
        return tile_bytes() + int64_t{q_stages + do_stages} * B_r * 4 + kBarrierPage +
               ordered_dq * kOrderBytes;
    }

    // How the warpgroups divide dQ = dS K, B_r x d_head: by its rows or by its columns. If neither
    // can be divided evenly, the warpgroups alternate. A part has 64 rows and dq_columns() columns.
    // If columns are divided for d_head 72 or 80, these are the 96 columns of a tile.
    constexpr bool shares_rows() const { return B_r == kWarpgroupRows * n_warpgroups; }
    constexpr bool shares_columns() const {
        return B_r == kWarpgroupRows && n_warpgroups > 1 &&
               tile_columns(d_head) % (16 * n_warpgroups) == 0;
    }
    constexpr int dq_parts() const {
        return shares_rows() || shares_columns() ? n_warpgroups * n_ctas() : 1;
    }
    // The number of floats for the sums of a block of queries. With ordered_dq, the counters of its
    // parts follow.
    static constexpr int kCounters = 32;
    constexpr int dq_sum_columns() const {
        return shares_columns() ? tile_columns(d_head) : d_head;
    }
    constexpr int dq_block_floats() const {
        return B_r * dq_sum_columns() + (ordered_dq ? kCounters : 0);
    }
    constexpr int dq_columns() const {
        return shares_columns() ? tile_columns(d_head / n_ctas()) / n_warpgroups : d_head;
    }
};

// Everything that the main kernel needs. It is the only parameter, in constant memory.
struct HopperBackwardKernelArgs {
    TensorMap q, k, v, d_o;
    BackwardKernelArgs problem;
    uint32_t* key_block_counter;  // persistent: 0 before and after a launch
    uint32_t n_key_blocks;        // over all heads; if packed, including blocks that do not exist
};

// The arguments of kernels that run a caller's program.
struct HopperBackwardProgramArgs : HopperBackwardKernelArgs {
    ProgramArgs program;
};

using hopper_backward_kernel_fn = void (*)(const HopperBackwardKernelArgs);

}  // namespace flashsmith
