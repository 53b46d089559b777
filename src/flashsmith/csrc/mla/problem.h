// A call of attention over a latent cache on the host: code that all families of this operation
// use. Plain C++20 without CUDA headers.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/constants.cuh"
#include "host/forward_problem.h"
#include "host/plan.h"
#include "mla/args.cuh"

namespace flashsmith {

// The kernels of a config, in the order of the families' templates.
enum MlaKernel : size_t { kMlaMain, kMlaMerge, kMlaAppend };

// The operation's tensors, in order. The tensors that a program reads come last.
enum MlaTensor : size_t {
    q,
    k_cache,
    cache_lens,
    o,
    lse,
    page_table,
    new_rows,
    sinks,
    cu_seqlens_q,
    k_scale,
    first_read,
};

struct MlaProblem {
    int64_t batch, seq_q, capacity, heads_q, heads_k, d, d_v, total_q, blocks, slots;
    MlaStrides q, cache, o, appended;
    int64_t page_table_stride, lse_batch_stride, lse_head_stride;
    float scale;
    int64_t window_left, window_right;
    bool free_split, is_paged;
    float row_scale;  // the cache's scale if it is not a tensor
};

inline MlaStrides read_strides(NumberReader& numbers) {
    // A braced list evaluates its elements from left to right, so they are read in order.
    return {numbers.integer(), numbers.integer(), numbers.integer()};
}

// Reads the operation's own numbers, which those of a program follow.
inline MlaProblem read_mla_problem(NumberReader& numbers, Tensors tensors) {
    return {
        .batch = numbers.integer(),
        .seq_q = numbers.integer(),
        .capacity = numbers.integer(),
        .heads_q = numbers.integer(),
        .heads_k = numbers.integer(),
        .d = numbers.integer(),
        .d_v = numbers.integer(),
        .total_q = numbers.integer(),
        .blocks = numbers.integer(),
        .slots = numbers.integer(),
        .q = read_strides(numbers),
        .cache = read_strides(numbers),
        .o = read_strides(numbers),
        .appended = read_strides(numbers),
        .page_table_stride = numbers.integer(),
        .lse_batch_stride = numbers.integer(),
        .lse_head_stride = numbers.integer(),
        .scale = static_cast<float>(numbers.number()),
        .window_left = numbers.integer(),
        .window_right = numbers.integer(),
        .free_split = numbers.integer() != 0,
        .is_paged = tensors[page_table] != 0,
        .row_scale = static_cast<float>(numbers.number()),
    };
}

inline ForwardProblem as_forward(const MlaProblem& p, bool packed) {
    ForwardProblem forward{};
    forward.batch = p.batch;
    forward.seq_q = p.seq_q;
    forward.seq_k = p.capacity;
    forward.heads_q = p.heads_q;
    forward.heads_k = p.heads_k;
    forward.d = p.d;
    forward.total_q = p.total_q;
    forward.window_left = p.window_left;
    forward.window_right = p.window_right;
    forward.packed = packed;
    return forward;
}

// Checks that kernels with these d_head and d_v, and with tiles of `B_r` rows, can compute the
// problem. Throws std::invalid_argument.
inline void check_mla(const MlaProblem& p, int d_head, int d_v, int B_r,
                      const Semantics& semantics) {
    check_problem(as_forward(p, semantics.packed), semantics, d_head, B_r);
    require(p.heads_k == 1, "k_cache: " + std::to_string(p.heads_k) +
                                " heads; all query heads of these kernels share one");
    require(p.d == d_head && p.d_v == d_v, "d: the config serves d " + std::to_string(d_head) +
                                               " with values of " + std::to_string(d_v) +
                                               ", and the call has " + std::to_string(p.d) +
                                               " and " + std::to_string(p.d_v));
    require(p.blocks >= 0 && p.blocks <= INT_MAX && p.slots >= 0 && p.slots <= INT_MAX,
            "k_cache: blocks and slots must be between 0 and 2^31 - 1");
    require(p.capacity == 0 || p.blocks > 0, "k_cache: there is no page; give at least one");
    require(p.seq_q * p.heads_q <= INT_MAX - B_r,
            "seq_q x heads must stay below 2^31 - " + std::to_string(B_r));
    require(p.batch * p.seq_q <= INT_MAX / kWarpSize, "batch x seq_q must stay below 2^26");
}

// Checks that kernels without a scale can compute the call. Throws std::invalid_argument.
inline void check_no_scale(const MlaProblem& p, Tensors tensors) {
    require(tensors[k_scale] == 0 && p.row_scale == 1.0f,
            "k_scale: the config's kernels have no scale; use one with cache_scaled");
}

// How a family splits the keys of tiles. `at_once`: how many CTAs run at the same time. `cta_keys`:
// the fixed cost of a CTA (start, end, and merging its rows), as the number of keys that take the
// same time.
struct MlaSplit {
    int B_c, min_keys, most_parts;
    int64_t at_once, cta_keys;

    // The time of a call in which each tile has up to `parts` parts, in units of a CTA's time for
    // one key.
    int64_t time_of(int64_t tiles, int64_t parts, int64_t keys) const {
        const int64_t rounds = (tiles * parts + at_once - 1) / at_once;
        return rounds * ((keys + parts - 1) / parts + cta_keys);
    }

    // An invariant split depends on the sequence's own length alone, so a tile may have as many
    // parts as the config and its keys allow. A free split has the number of parts that is fastest
    // if all sequences have as many keys as fit.
    int64_t parts(const MlaProblem& p, int64_t tiles) const {
        // Rounded up to whole blocks, like the keys of a tile, so that no length has fewer parts in
        // a small cache.
        const int64_t keys = int64_t{tiles_of(p.capacity, B_c)} * B_c;
        const int64_t possible = std::clamp<int64_t>(keys / min_keys, 1, most_parts);
        if (!p.free_split) return possible;
        return fastest(tiles, possible, p.capacity);
    }

    // The fastest of 1 to `most` parts.
    int64_t fastest(int64_t tiles, int64_t most, int64_t keys) const {
        int64_t best = 1;
        for (int64_t parts = 2; parts <= most; ++parts)
            if (time_of(tiles, parts, keys) < time_of(tiles, best, keys)) best = parts;
        return best;
    }
};

inline MlaKernelArgs mla_arguments(const MlaProblem& p) {
    MlaKernelArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    args.q_strides = p.q;
    args.o_strides = p.o;
    args.new_strides = p.appended;
    args.cache_strides = p.cache;
    args.lse_batch_stride = p.lse_batch_stride;
    args.lse_head_stride = p.lse_head_stride;
    args.page_table_stride = p.page_table_stride;
    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.heads = static_cast<int32_t>(p.heads_q);
    args.capacity = static_cast<int32_t>(p.capacity);
    args.blocks = static_cast<int32_t>(p.blocks);
    args.slots = static_cast<int32_t>(p.slots);
    args.window_left = static_cast<int32_t>(std::min<int64_t>(p.window_left, kUnlimited));
    args.window_right = static_cast<int32_t>(std::min<int64_t>(p.window_right, kUnlimited));
    args.scale_log2 = p.scale * kLog2E;
    return args;
}

// Sets the arguments for tiles of `B_r` rows, and returns how many tiles there are.
inline int64_t set_tiles(MlaKernelArgs& args, const MlaProblem& p, int B_r, const MlaSplit& split) {
    const int64_t of_sequence = tiles_of(p.seq_q * p.heads_q, B_r);
    const int64_t tiles = p.batch * of_sequence;
    const int64_t parts = split.parts(p, std::max<int64_t>(tiles, 1));
    require(tiles * parts * B_r <= INT_MAX, "batch x rows x parts must stay within 2^31 - 1");
    args.tiles = static_cast<int32_t>(of_sequence);
    args.most_parts = static_cast<int32_t>(parts);
    args.part_rows = parts > 1 ? tiles * parts * B_r : 0;
    return tiles;
}

// A launch of any of the kernels, without shared memory and tensor maps.
inline Launch mla_launch(size_t kernel, int64_t ctas, int threads, const MlaKernelArgs& args) {
    using Args = MlaKernelArgs;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = kernel,
        .grid = {static_cast<uint32_t>(ctas), 1, 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(threads), 1, 1},
        .smem_bytes = 0,
        .argument_bytes = {bytes, bytes + sizeof args},
        .addresses = {{offsetof(Args, q), in_tensor(q)},
                      {offsetof(Args, o), in_tensor(o)},
                      {offsetof(Args, lse), in_tensor(lse)},
                      {offsetof(Args, cache_lens), in_tensor(cache_lens)},
                      {offsetof(Args, page_table), in_tensor(page_table)},
                      {offsetof(Args, cu_seqlens_q), in_tensor(cu_seqlens_q)},
                      {offsetof(Args, sinks), in_tensor(sinks)},
                      {offsetof(Args, new_rows), in_tensor(new_rows)},
                      {offsetof(Args, cache_rows), in_tensor(k_cache)}},
        .tensor_maps = {},
    };
    if (args.most_parts > 1) launch.addresses.push_back({offsetof(Args, parts), in_workspace(0)});
    return launch;
}

// The launches of a call: appending, if rows are given; `main`; and merging, if keys may be split.
// `programmatic`: whether the device has programmatic launches.
inline Plan mla_plan(Launch main, const MlaKernelArgs& args, int64_t tiles, int B_r, int d_v,
                     Tensors tensors, bool packed, bool programmatic) {
    Plan plan;
    if (tensors[new_rows] != 0) {
        constexpr int64_t kRows = kMlaAppendThreads / kWarpSize;
        const int64_t rows = int64_t{args.batch} * args.seq_q;
        plan.launches.push_back(
            mla_launch(kMlaAppend, (rows + kRows - 1) / kRows, kMlaAppendThreads, args));
    }
    plan.launches.push_back(std::move(main));
    if (args.most_parts > 1) {
        plan.workspaces.push_back({"parts",
                                   static_cast<size_t>(args.part_rows * (d_v + 1)) * sizeof(float),
                                   Contents::undefined});
        constexpr int64_t kRows = kMlaMergeThreads / kWarpSize;
        plan.launches.push_back(mla_launch(kMlaMerge, tiles * B_r / kRows, kMlaMergeThreads, args));
    }
    // Each launch waits for the one before it. The one before the first is not part of this call.
    for (size_t i = 1; i < plan.launches.size(); ++i) plan.launches[i].programmatic = programmatic;
    for (const MlaTensor tensor : {page_table, new_rows, k_scale})
        plan.presence.push_back({tensor, tensors[tensor] != 0,
                                 "page_table, k, k_scale: this launch was planned for a different "
                                 "set of these"});
    plan.presence.push_back(
        {cu_seqlens_q, packed,
         "packed: the call and this library's kernels must both use packed sequences, or neither"});
    return plan;
}

}  // namespace flashsmith
