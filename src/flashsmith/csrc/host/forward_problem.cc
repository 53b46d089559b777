#include "host/forward_problem.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/constants.cuh"

namespace flashsmith {
namespace {

constexpr int kRowUnit = 8;  // elements in 16 bytes; rows begin and end at multiples of it
// Positions and the limits of windows are below this, so that the sum of two fits in an int.
constexpr int64_t kMaxLength = int64_t{1} << 30;

constexpr const char* kOtherKind =
    "packed: the call and this library's kernels must both use packed sequences, or neither";
constexpr const char* kOtherOutput =
    "partial: whole-attention kernels take sinks and row_max, partial ones k_begin and seqused_k";

Strides read_strides(NumberReader& numbers) {
    // A braced list evaluates its elements from left to right, so they are read in order.
    return {numbers.integer(), numbers.integer(), numbers.integer()};
}

}  // namespace

int32_t tiles_of(int64_t rows, int tile) {
    return static_cast<int32_t>((rows + tile - 1) / tile);
}

ForwardProblem in_rows(ForwardProblem p, bool pack_gqa) {
    if (!pack_gqa) return p;
    p.seq_q *= p.heads_q / p.heads_k;
    p.heads_q = p.heads_k;
    require(p.seq_q < kMaxLength, "pack_gqa: queries x heads of a group must stay below 2^30");
    return p;
}

int tokens_of(int B_r, const ForwardProblem& p, bool pack_gqa) {
    const auto group = static_cast<int>(pack_gqa ? p.heads_q / p.heads_k : 1);
    return (B_r + group - 1) / group;
}

ForwardProblem read_forward_problem(NumberReader& numbers, Tensors tensors) {
    return {
        .batch = numbers.integer(),
        .seq_q = numbers.integer(),
        .seq_k = numbers.integer(),
        .heads_q = numbers.integer(),
        .heads_k = numbers.integer(),
        .d = numbers.integer(),
        .d_v = numbers.integer(),
        .total_q = numbers.integer(),
        .total_k = numbers.integer(),
        .q = read_strides(numbers),
        .k = read_strides(numbers),
        .v = read_strides(numbers),
        .o = read_strides(numbers),
        .scale = static_cast<float>(numbers.number()),
        .softcap = static_cast<float>(numbers.number()),
        .window_left = numbers.integer(),
        .window_right = numbers.integer(),
        .packed =
            tensors[ForwardTensor::cu_seqlens_q] != 0 && tensors[ForwardTensor::cu_seqlens_k] != 0,
    };
}

ForwardKernelArgs forward_arguments(const ForwardProblem& p, int B_r, int B_c) {
    ForwardKernelArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    args.q_batch_stride = p.q.batch;
    args.q_seq_stride = p.q.seq;
    args.q_head_stride = p.q.head;
    args.k_batch_stride = p.k.batch;
    args.k_seq_stride = p.k.seq;
    args.k_head_stride = p.k.head;
    args.v_batch_stride = p.v.batch;
    args.v_seq_stride = p.v.seq;
    args.v_head_stride = p.v.head;
    args.o_batch_stride = p.o.batch;
    args.o_seq_stride = p.o.seq;
    args.o_head_stride = p.o.head;
    args.lse_batch_stride = p.packed ? 0 : p.heads_q * p.seq_q;
    args.lse_head_stride = p.packed ? p.total_q : p.seq_q;
    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.seq_k = static_cast<int32_t>(p.seq_k);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.total_k = static_cast<int32_t>(p.total_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.d = static_cast<int32_t>(p.d);
    args.n_Q_blocks = tiles_of(p.seq_q, B_r);
    args.n_KV_blocks = tiles_of(p.seq_k, B_c);
    args.window_left = static_cast<int32_t>(std::min(p.window_left, kMaxLength));
    args.window_right = static_cast<int32_t>(std::min(p.window_right, kMaxLength));
    args.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
    args.score_argument = p.softcap > 0 ? 2 * kLog2E * (p.scale / p.softcap) : 0.0f;
    return args;
}

void check_problem(const ForwardProblem& p, const Semantics& semantics, int d_head, int B_r,
                   int d_v) {
    const auto length = [](int64_t x) { return x >= 0 && x < kMaxLength; };
    const auto count = [](int64_t x) { return x > 0 && x <= INT_MAX; };
    require(length(p.seq_q) && length(p.seq_k), "lengths must be between 0 and 2^30 - 1");
    require(p.batch >= 0 && p.batch <= INT_MAX && p.total_q >= 0 && p.total_q <= INT_MAX &&
                p.total_k >= 0 && p.total_k <= INT_MAX,
            "batch and total lengths must be between 0 and 2^31 - 1");
    require(count(p.heads_q) && count(p.heads_k) && p.heads_q % p.heads_k == 0,
            "heads_q must be a multiple of heads_k");
    require(p.d > 0 && p.d <= d_head && p.d % kRowUnit == 0,
            "d is " + std::to_string(p.d) + "; the config serves multiples of 8 up to " +
                std::to_string(d_head));
    if (d_v == 0)
        require(p.d_v == 0 || p.d_v == p.d, "d_v is " + std::to_string(p.d_v) + " and d " +
                                                std::to_string(p.d) + "; take a config with a d_v");
    else
        require(p.d_v > 0 && p.d_v <= d_v && p.d_v % kRowUnit == 0,
                "d_v is " + std::to_string(p.d_v) + "; the config serves multiples of 8 up to " +
                    std::to_string(d_v));

    require(p.packed == semantics.packed, kOtherKind);
    require((p.softcap > 0) == semantics.changes_scores,
            "softcap: this library's kernels lack or need one");
    require(p.window_left >= 0 && p.window_right >= 0, "window limits must not be negative");
    const bool left = p.window_left < kUnlimited, right = p.window_right < kUnlimited;
    if (!semantics.hides_keys())
        require(!left && !right, "mask: this library's kernels have none");
    else if (!semantics.takes_limits)
        require(!left && p.window_right == 0, "mask: this library's kernels take no limits");
    // This takes two steps, so that no product can overflow.
    const int64_t sequences = p.batch * p.heads_q;
    require(sequences <= INT_MAX && sequences * tiles_of(p.seq_q, B_r) <= INT_MAX,
            "batch x heads x Q blocks must stay within 2^31 - 1");
}

int64_t tiles_to_split(const ForwardProblem& p, const Semantics& semantics, int parts, int B_r,
                       int B_c, int64_t tiles, int64_t at_once) {
    if (parts == 0 || p.seq_k <= B_c || tiles == 0) return 0;
    if (semantics.is_triangular()) {
        // Twice the average number of keys that a tile sees. The longest tile sees seq_k.
        const int64_t seen = p.seq_q <= p.seq_k ? std::min(2 * p.seq_k - p.seq_q + B_r, 2 * p.seq_k)
                                                : (p.seq_k + B_r) * p.seq_k / p.seq_q;
        if (tiles * seen < at_once * 2 * p.seq_k) return tiles;
    }
    const int64_t rest = tiles % at_once;
    const bool is_shorter = (rest * parts + at_once - 1) / at_once < parts;
    return is_shorter ? rest : 0;
}

void set_parts(ForwardKernelArgs& args, int64_t split, int parts, int B_r) {
    args.parts = nullptr;  // the call provides the workspace's address
    args.part_rows = split * parts * B_r;
}

void add_merge(Plan& plan, size_t problem_offset, int64_t split, int parts, int B_r, int d_v) {
    if (split == 0) return;
    const int64_t rows = split * parts * B_r;
    require(rows <= INT_MAX, "split_keys: rows of all parts must stay within 2^31 - 1");
    constexpr int64_t kStatistics = 2;
    Launch& main = plan.launches.front();
    main.addresses.push_back({problem_offset + offsetof(ForwardKernelArgs, parts),
                              in_workspace(plan.workspaces.size())});
    plan.workspaces.push_back({"parts",
                               static_cast<size_t>(rows * (d_v + kStatistics)) * sizeof(float),
                               Contents::undefined});
    const int64_t threads = split * B_r * (d_v / 4);
    Launch merge = main;
    merge.kernel = 1;
    merge.grid = {static_cast<uint32_t>((threads + kPartMergeThreads - 1) / kPartMergeThreads), 1,
                  1};
    merge.cluster = {1, 1, 1};
    merge.block = {kPartMergeThreads, 1, 1};
    merge.smem_bytes = 0;
    merge.tensor_maps = {};
    plan.launches.push_back(std::move(merge));
}

std::vector<AddressPatch> forward_addresses(const Semantics& semantics, size_t problem_offset) {
    using Args = ForwardKernelArgs;
    using Tensor = ForwardTensor;
    std::vector<AddressPatch> patches = {
        {offsetof(Args, q), in_tensor(Tensor::q)},
        {offsetof(Args, k), in_tensor(Tensor::k)},
        {offsetof(Args, v), in_tensor(Tensor::v)},
        {offsetof(Args, o), in_tensor(Tensor::o)},
        {offsetof(Args, lse), in_tensor(Tensor::lse)},
        {offsetof(Args, row_max), in_tensor(semantics.partial ? Tensor::k_begin : Tensor::row_max)},
        {offsetof(Args, sinks), in_tensor(semantics.partial ? Tensor::seqused_k : Tensor::sinks)},
        {offsetof(Args, cu_seqlens_q), in_tensor(Tensor::cu_seqlens_q)},
        {offsetof(Args, cu_seqlens_k), in_tensor(Tensor::cu_seqlens_k)},
    };
    for (AddressPatch& patch : patches) patch.argument_offset += problem_offset;
    return patches;
}

std::vector<Presence> forward_presence(const Semantics& semantics) {
    using Tensor = ForwardTensor;
    std::vector<Presence> presence = {{Tensor::cu_seqlens_q, semantics.packed, kOtherKind},
                                      {Tensor::cu_seqlens_k, semantics.packed, kOtherKind}};
    const auto absent = semantics.partial ? std::array{Tensor::row_max, Tensor::sinks}
                                          : std::array{Tensor::k_begin, Tensor::seqused_k};
    for (const size_t tensor : absent) presence.push_back({tensor, false, kOtherOutput});
    return presence;
}

void check_smem(int64_t smem_bytes, const DeviceSpec& device) {
    require(smem_bytes <= device.max_smem_per_block,
            "the config needs " + std::to_string(smem_bytes) +
                " bytes of shared memory, the device allows " +
                std::to_string(device.max_smem_per_block));
}

}  // namespace flashsmith
