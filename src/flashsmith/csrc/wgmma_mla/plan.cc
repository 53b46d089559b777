#include "wgmma_mla/plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <string>

#include "sm90/copied_tensor.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t { main_kernel, merge, append };

// The operation's tensors, in order.
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
};

// Boxes of fewer keys than the rows that a swizzle covers would break its pattern.
constexpr int64_t kFewestBoxKeys = 8;

struct MlaProblem {
    int64_t batch, seq_q, capacity, heads_q, heads_k, d, d_v, total_q, blocks, slots;
    MlaStrides q, cache, o, appended;
    int64_t page_table_stride, lse_batch_stride, lse_head_stride;
    float scale;
    int64_t window_left, window_right;
    bool free_split, is_paged;
};

MlaStrides read_strides(NumberReader& numbers) {
    // The elements of a braced list are evaluated from left to right.
    return {numbers.integer(), numbers.integer(), numbers.integer()};
}

MlaProblem read_problem(NumberReader& numbers, Tensors tensors) {
    MlaProblem p{
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
    };
    numbers.end();
    return p;
}

ForwardProblem as_forward(const MlaProblem& p, bool packed) {
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

void check(const WgmmaMlaKernelConfig& config, const MlaProblem& p, bool packed,
           const Semantics& semantics) {
    check_problem(as_forward(p, packed), semantics, config.d_head, kMlaRows);
    require(p.heads_k == 1, "k_cache: " + std::to_string(p.heads_k) +
                                " heads; all query heads of these kernels share one");
    require(p.d == config.d_head && p.d_v == config.d_v,
            "d: the config serves d " + std::to_string(config.d_head) + " with values of " +
                std::to_string(config.d_v) + ", and the call has " + std::to_string(p.d) + " and " +
                std::to_string(p.d_v));
    require(p.blocks >= 0 && p.blocks <= INT_MAX && p.slots >= 0 && p.slots <= INT_MAX,
            "k_cache: blocks and slots must be between 0 and 2^31 - 1");
    require(p.capacity == 0 || p.blocks > 0, "k_cache: there is no page; give at least one");
    require(!p.is_paged || p.capacity == 0 || std::gcd(p.slots, kMlaKeys) >= kFewestBoxKeys,
            "page_table: pages of " + std::to_string(p.slots) +
                " keys; these kernels take multiples of 8");
}

// The cache as rows of one long sequence, for TMA.
struct CacheRows {
    MlaStrides strides;
    int64_t of_block, total;
};
CacheRows cache_rows(const MlaProblem& p) {
    CacheRows rows{p.cache, 1, p.blocks};
    if (p.slots == 1) {
        rows.strides.row = p.cache.batch;
        return rows;
    }
    if (p.blocks > 1) {
        require(p.cache.row > 0 && p.cache.batch % p.cache.row == 0,
                "k_cache: the distance of its blocks is no multiple of that of its rows; make it "
                "contiguous");
        rows.of_block = p.cache.batch / p.cache.row;
    }
    rows.total = (p.blocks - 1) * rows.of_block + p.slots;
    require(rows.total < INT_MAX, "k_cache: rows of all blocks must stay below 2^31 - 1");
    return rows;
}

TensorMapSpec cache_map(const WgmmaMlaKernelConfig& config, const MlaProblem& p,
                        const CacheRows& rows, int box_keys) {
    CopiedTensor tensor{"k_cache",
                        k_cache,
                        offsetof(MlaKernelArgs, cache),
                        {0, rows.strides.row, rows.strides.head},
                        rows.total,
                        1,
                        rows.total,
                        box_keys};
    if (p.capacity == 0 || p.blocks == 0) tensor = single_row(tensor, q);
    return tensor_map(config.d_head, config.dtype, as_forward(p, true), true, tensor);
}

// The time of a call in which each tile has up to `parts` parts, in keys of one CTA. A CTA's start
// and end, and its rows in the merge, take about as long as these many keys.
constexpr int64_t kKeysPerCta = 192;
int64_t time_of(int64_t tiles, int64_t parts, int64_t keys, int64_t sm_count) {
    const int64_t rounds = (tiles * parts + sm_count - 1) / sm_count;
    return rounds * ((keys + parts - 1) / parts + kKeysPerCta);
}

// An invariant split depends on the sequence's own length alone, so a tile may have as many parts
// as the config and its keys allow. A free one has as many as are fastest if all sequences have as
// many keys as fit.
int64_t most_parts(const WgmmaMlaKernelConfig& config, const MlaProblem& p, int64_t tiles,
                   const DeviceSpec& device) {
    // Counted like the parts of a tile, so that no length has fewer in a small cache.
    const int64_t keys = int64_t{tiles_of(p.capacity, kMlaKeys)} * kMlaKeys;
    const int64_t possible = std::clamp<int64_t>(keys / config.min_keys, 1, config.most_parts);
    if (!p.free_split) return possible;
    int64_t best = 1;
    for (int64_t parts = 2; parts <= possible; ++parts)
        if (time_of(tiles, parts, p.capacity, device.sm_count) <
            time_of(tiles, best, p.capacity, device.sm_count))
            best = parts;
    return best;
}

MlaKernelArgs arguments(const MlaProblem& p, const CacheRows& rows) {
    MlaKernelArgs args;
    std::memset(&args, 0, sizeof args);  // including padding: equal plans have equal bytes
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
    args.map_rows = static_cast<int32_t>(rows.of_block);
    args.box_keys =
        static_cast<int32_t>(p.is_paged ? std::gcd(p.slots, kMlaKeys) : int64_t{kMlaKeys});
    args.window_left = static_cast<int32_t>(std::min<int64_t>(p.window_left, kUnlimited));
    args.window_right = static_cast<int32_t>(std::min<int64_t>(p.window_right, kUnlimited));
    args.scale_log2 = p.scale * kLog2E;
    return args;
}

// A launch without shared memory and tensor maps, of any of the kernels.
Launch launch_of(size_t kernel, int64_t ctas, int threads, const MlaKernelArgs& args) {
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

void add_launches(Plan& plan, const WgmmaMlaKernelConfig& config, const MlaKernelArgs& args,
                  const TensorMapSpec& cache, bool appends) {
    const int64_t tiles = int64_t{args.batch} * args.tiles;
    if (appends) {
        constexpr int64_t kRows = kMlaAppendThreads / kWarpSize;
        const int64_t rows = int64_t{args.batch} * args.seq_q;
        plan.launches.push_back(
            launch_of(append, (rows + kRows - 1) / kRows, kMlaAppendThreads, args));
    }
    plan.launches.push_back(launch_of(main_kernel, tiles * args.most_parts, kMlaThreads, args));
    plan.launches.back().smem_bytes = static_cast<int>(config.smem_bytes());
    plan.launches.back().tensor_maps.push_back(cache);
    if (args.most_parts > 1) {
        plan.workspaces.push_back(
            {"parts", static_cast<size_t>(args.part_rows * (config.d_v + 1)) * sizeof(float),
             Contents::undefined});
        constexpr int64_t kRows = kMlaMergeThreads / kWarpSize;
        plan.launches.push_back(launch_of(merge, tiles * kMlaRows / kRows, kMlaMergeThreads, args));
    }
    // Each launch waits for the one before it. The one before the first is not part of this call.
    for (size_t i = 1; i < plan.launches.size(); ++i) plan.launches[i].programmatic = true;
}

}  // namespace

Plan plan_mla(const WgmmaMlaKernelConfig& config, NumberReader& numbers, Tensors tensors,
              const DeviceSpec& device, const Semantics& semantics) {
    const MlaProblem p = read_problem(numbers, tensors);
    require(device.arch == kArch, "wgmma kernels run on compute capability 9.0 only");
    check_smem(config.smem_bytes(), device);
    check(config, p, semantics.packed, semantics);
    const CacheRows rows = cache_rows(p);
    MlaKernelArgs args = arguments(p, rows);
    require(p.seq_q * p.heads_q <= INT_MAX - kMlaRows, "seq_q x heads must stay below 2^31 - 64");
    const int64_t of_sequence = tiles_of(p.seq_q * p.heads_q, kMlaRows);
    const int64_t tiles = p.batch * of_sequence;
    const int64_t parts = most_parts(config, p, std::max<int64_t>(tiles, 1), device);
    require(tiles * parts * kMlaRows <= INT_MAX && p.batch * p.seq_q <= INT_MAX / kWarpSize,
            "batch x rows x parts must stay within 2^31 - 1");
    args.tiles = static_cast<int32_t>(of_sequence);
    args.most_parts = static_cast<int32_t>(parts);
    args.part_rows = parts > 1 ? tiles * parts * kMlaRows : 0;

    Plan plan;
    add_launches(plan, config, args, cache_map(config, p, rows, args.box_keys),
                 tensors[new_rows] != 0);
    for (const MlaTensor tensor : {page_table, new_rows})
        plan.presence.push_back({tensor, tensors[tensor] != 0,
                                 "page_table, k: this launch was planned for a different set of "
                                 "these"});
    plan.presence.push_back(
        {cu_seqlens_q, semantics.packed,
         "packed: the call and this library's kernels must both use packed sequences, or neither"});
    return plan;
}

}  // namespace flashsmith
