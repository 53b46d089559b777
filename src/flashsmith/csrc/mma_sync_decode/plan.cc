#include "mma_sync_decode/plan.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/canonical_sizes.cuh"
#include "common/constants.cuh"
#include "host/forward_problem.h"
#include "host/program_arguments.h"
#include "mma_sync_decode/run_costs.h"
#include "mma_sync_decode/warpgroup_plan.h"

namespace flashsmith {
namespace {

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t {
    dense,
    paged,
    merge,
    append,
    merge_rows,
    chunk,  // in configs with chunks
    paged_chunk,
    merge_arriving = chunk,  // in configs that have it, all of them without chunks
};

// In a launch's argument, the scales of a cache follow the other fields, and the arguments of a
// program follow the scales.
static_assert(sizeof(DecodeProgramArgs) == sizeof(DecodeKernelArgs) + sizeof(ProgramArgs));
static_assert(sizeof(DecodeCacheArgs) == sizeof(DecodeKernelArgs) + sizeof(CacheScales));
static_assert(sizeof(DecodeScaledProgramArgs) == sizeof(DecodeCacheArgs) + sizeof(ProgramArgs));

// The operation's tensors, in order. The tensors that a program reads come last.
enum DecodeTensor : size_t {
    q,
    k_cache,
    v_cache,
    cache_lens,
    o,
    lse,
    page_table,
    new_k,
    new_v,
    cos_table,
    sin_table,
    sinks,
    cu_seqlens_q,
    kv_offset,
    k_scale,
    v_scale,
    first_read,
};
// CTAs per SM for merging rows one after another, if some sequences may have many rows.
constexpr int kMergesPerSm = 8;
// For calls without chunks: if there are more than kRowsPerSm rows per SM, CTAs search for rows,
// with kSearchesPerSm CTAs per SM if registers allow. A warp merges a row of up to eight runs
// alone.
constexpr int kRowsPerSm = 2, kSearchesPerSm = 4;
// If there are at least this many canonical tiles per SM, one CTA computes each tile. A run's share
// of the keys is then unlimited.
constexpr int kWholeTilesPerSm = 2;
constexpr float kAllParts = 1e9f;
// The index of the kernel with warpgroups, which is the last one.
size_t warpgroups_of(const FlashDecodeKernelConfig& config) {
    return size_t{merge_rows} + 1 + (config.chunk_rows > 0 ? 2 : 0) +
           (config.has_arrivals() ? 1 : 0);
}
// The most rows that a tile may have for clusters to compute its chunks.
constexpr int64_t kMostClusterRows = 8;
constexpr size_t kPartO = 0, kPartStatistics = 1, kQueries = 2;

int64_t blocks_of(int64_t rows, int64_t tile) {
    return (rows + tile - 1) / tile;
}

DecodeStrides read_strides(NumberReader& numbers) {
    // The elements of a braced list are evaluated from left to right.
    return {numbers.integer(), numbers.integer(), numbers.integer()};
}

CacheScales read_scales(NumberReader& numbers) {
    CacheScales scales;
    std::memset(&scales, 0, sizeof scales);
    scales.k_value = static_cast<float>(numbers.number());
    scales.v_value = static_cast<float>(numbers.number());
    scales.k_step = static_cast<int32_t>(numbers.integer());
    scales.v_step = static_cast<int32_t>(numbers.integer());
    return scales;
}

struct DecodeProblem {
    ForwardProblem forward;  // seq_k is the capacity
    int64_t blocks, slots;
    bool free_split;
    CacheScales scales;
};

DecodeProblem read_problem(NumberReader& numbers, Tensors tensors, DecodeKernelArgs& args) {
    ForwardProblem p{};
    p.batch = numbers.integer();
    p.seq_q = numbers.integer();
    p.seq_k = numbers.integer();
    p.heads_q = numbers.integer();
    p.heads_k = numbers.integer();
    p.d = numbers.integer();
    p.d_v = numbers.integer();
    p.total_q = numbers.integer();
    p.packed = tensors[cu_seqlens_q] != 0;
    const int64_t blocks = numbers.integer(), slots = numbers.integer();
    numbers.integer();  // the most pages of a sequence, which follow from the capacity
    const int64_t positions = numbers.integer(), rotary_half = numbers.integer();
    args.q_source_strides = args.q_strides = read_strides(numbers);
    args.k_cache_strides = read_strides(numbers);
    args.v_cache_strides = read_strides(numbers);
    args.o_strides = read_strides(numbers);
    args.new_k_strides = read_strides(numbers);
    args.new_v_strides = read_strides(numbers);
    args.page_table_stride = numbers.integer();
    args.cos_stride = numbers.integer();
    args.sin_stride = numbers.integer();
    args.lse_batch_stride = numbers.integer();
    args.lse_head_stride = numbers.integer();
    p.scale = static_cast<float>(numbers.number());
    p.softcap = static_cast<float>(numbers.number());
    p.window_left = numbers.integer();
    p.window_right = numbers.integer();
    args.interleaved = static_cast<int32_t>(numbers.integer());
    args.rotary_fp32 = static_cast<int32_t>(numbers.integer());
    const bool free_split = numbers.integer() != 0;
    const CacheScales scales = read_scales(numbers);
    require(blocks >= 0 && blocks <= INT_MAX && slots >= 0 && slots <= INT_MAX && positions >= 0 &&
                positions <= INT_MAX,
            "k_cache: blocks, slots and positions must be between 0 and 2^31 - 1");
    require(p.seq_k == 0 || blocks > 0, "k_cache: there is no page; give at least one");
    require(tensors[cos_table] == 0 || positions > 0,
            "cos: there is no position; give at least one");
    args.blocks = static_cast<int32_t>(blocks);
    args.positions = static_cast<int32_t>(positions);
    args.rotary_half = static_cast<int32_t>(rotary_half);
    return {p, blocks, slots, free_split, scales};
}

// Checks that the config's kernels can apply a call's scales. If the scale of the keys is a number,
// multiplies it into `factor`, by which Q K^T is multiplied.
void apply_scales(const FlashDecodeKernelConfig& config, Tensors tensors, const CacheScales& scales,
                  float& factor) {
    const bool has_tensor = tensors[k_scale] != 0 || tensors[v_scale] != 0;
    require(
        config.has_scales() || (!has_tensor && scales.k_value == 1.0f && scales.v_value == 1.0f),
        "k_scale, v_scale: the config's kernels have no scales; use one with cache_scaled");
    if (tensors[k_scale] == 0) factor *= scales.k_value;
}

// The most parts of a sequence. For an invariant split, this depends only on the device and the
// number of K/V heads. For a free split, there are enough parts to fill the device once with all
// sequences or, if that would leave much of it idle, a few times.
int64_t most_parts(const FlashDecodeKernelConfig& config, const DecodeProblem& problem,
                   const DeviceSpec& device) {
    const int64_t at_once = int64_t{device.sm_count} * config.parts_per_sm;
    int64_t invariant = std::clamp<int64_t>(at_once / problem.forward.heads_k, 1, kMostParts);
    // With a multiple of 8, every subtree of 8 parts has a neighbour of the same size.
    if (invariant > 8) invariant -= invariant % 8;
    if (!problem.free_split) return invariant;
    constexpr int64_t kRounds = 4;
    const int64_t heads = std::max<int64_t>(1, problem.forward.batch * problem.forward.heads_k);
    const int64_t once = at_once / heads;
    const bool fills = once * heads * 8 >= at_once * 7;
    return std::clamp<int64_t>(fills ? once : blocks_of(kRounds * at_once, heads), 1, invariant);
}

// The distances between the states of chunks, and the number of states per K/V head.
struct ChunkStates {
    int64_t head_rows = 0, batch_rows = 0, query_rows = 0;
};

// Memory for the parts of sequences with many rows. `most_parts` is the limit if there is one tile.
// With more tiles, each has fewer parts, so that parts times rows stay within most_parts tiles. For
// packed sequences the host knows only the total number of rows, each of which has at most
// `parts_of_capacity` parts.
ChunkStates chunk_states(const ForwardProblem& p, int64_t chunk_rows, int64_t most_parts,
                         int64_t parts_of_capacity) {
    const int64_t group = p.heads_q / p.heads_k, rows = p.seq_q * group;
    if (!p.packed) {
        const int64_t of_tile = std::max<int64_t>(1, most_parts / blocks_of(rows, chunk_rows));
        const int64_t parts = std::min(of_tile, parts_of_capacity);
        if (parts == 1) return {};
        return {p.batch * parts * rows, parts * rows, 0};
    }
    const int64_t parts = std::min(most_parts, parts_of_capacity);
    if (parts == 1) return {};
    const int64_t of_batches = p.batch * most_parts * chunk_rows;
    const int64_t of_queries = p.total_q * group * parts;
    if (of_batches < of_queries) return {of_batches, most_parts * chunk_rows, 0};
    return {of_queries, 0, group * parts};
}

// A run may be longer than a CTA's share by this factor, so that 33 parts on 32 CTAs do not take
// two rounds.
constexpr float kRoundingUp = 1.125f;
constexpr int kMostKeptLevels = 6;
constexpr int kReservedSmem = 1024;  // per CTA on an SM
// CTAs request runs from a counter if their share is at least this.
constexpr int64_t kLongShareBytes = 1920 << 10;

// Measured on an H200, like the constants below. For ragged calls, kRaggedTurns is the fewest runs
// for each CTA that the GPU holds. A call is ragged if it has at least kRaggedBytes and a sequence
// in it has more than kMostOfMean times the mean.
constexpr double kRaggedTurns = 2.4, kRaggedBytes = 192e6;
constexpr float kMostOfMean = 1.25f;
// A run has the largest power of two of parts that stays within this factor times its share. If
// there are many tiles, one run covers a whole tile, however many parts it has. If there are few
// tiles, other CTAs would wait for a longer run.
constexpr float kOfOneRun = 1.999f, kOfSeveralRuns = 1.25f;

// The most bytes of keys and values of a call for which L2 is to evict them before anything else.
// Calls with more bytes take 3% longer that way.
constexpr int64_t kPassingBytes = 320 << 20;
// The most bytes of keys and values that a sequence may hold in one K/V head for a single CTA to
// take all of it.
constexpr int64_t kMostWholeBytes = 512 << 10;
// For calls of whole runs: tiles per SM, above 1, up to which the next launch is held back until
// this one's CTAs are done, if a tile has room for kLeastHeldBytes. If CTAs of the next launch
// began earlier, they would share SMs, and their bandwidth, with CTAs of this launch that otherwise
// have an SM to themselves. With d_head 64, holding back gains nothing or costs time.
constexpr double kMostHeldTiles = 1.5;
constexpr int64_t kLeastHeldBytes = 128 << 10;
bool is_held(const FlashDecodeKernelConfig& config, double tiles_of_sm, int64_t tile_bytes) {
    return config.d_head > 64 && tiles_of_sm > 1.0 && tiles_of_sm <= kMostHeldTiles &&
           tile_bytes >= kLeastHeldBytes;
}
// Bytes of keys and values that a call prefetches before it knows its lengths. In a large call this
// many bytes are in flight at once; if sequences are shorter, at most this many are read in vain.
// With many sequences, this would be only a few keys of each.
constexpr int64_t kPrefetchedBytes = 4 << 20, kLeastPrefetchedKeys = 8;
// Limit for states that arrive at a merge, less other memory that a plan keeps zero.
constexpr int64_t kMostArrivingBytes = int64_t{kMostKeptBytes} - 1024;
// The most keys of a sequence that clusters merge, and of a run that has more than one part.
constexpr int64_t kMostClusterKeys = 8192, kMostClusterRunKeys = 256;

// Whether `ctas` CTAs still fit on an SM if each uses more shared memory and other CTAs use some as
// well.
bool holds(const FlashDecodeKernelConfig& config, int more_bytes, int ctas, int beside,
           const DeviceSpec& device) {
    const int bytes = config.smem_bytes() + more_bytes;
    return bytes <= device.max_smem_per_block &&
           ctas_that_fit(bytes, config.n_threads(), device.max_smem_per_sm - beside, 0) >= ctas;
}

std::vector<AddressPatch> addresses_of(Tensors tensors, bool has_states) {
    using Args = DecodeKernelArgs;
    const bool turns = tensors[cos_table] != 0;
    std::vector<AddressPatch> patches = {
        {offsetof(Args, q), turns ? in_workspace(has_states ? kQueries : 0) : in_tensor(q)},
        {offsetof(Args, k_cache), in_tensor(k_cache)},
        {offsetof(Args, v_cache), in_tensor(v_cache)},
        {offsetof(Args, cache_lens), in_tensor(cache_lens)},
        {offsetof(Args, o), in_tensor(o)},
        {offsetof(Args, lse), in_tensor(lse)},
        {offsetof(Args, page_table), in_tensor(page_table)},
        {offsetof(Args, new_k), in_tensor(new_k)},
        {offsetof(Args, new_v), in_tensor(new_v)},
        {offsetof(Args, cos), in_tensor(cos_table)},
        {offsetof(Args, sin), in_tensor(sin_table)},
        {offsetof(Args, sinks), in_tensor(sinks)},
        {offsetof(Args, cu_seqlens_q), in_tensor(cu_seqlens_q)},
        {offsetof(Args, kv_offset), in_tensor(kv_offset)},
    };
    if (has_states) {
        patches.push_back({offsetof(Args, part_o), in_workspace(kPartO)});
        patches.push_back({offsetof(Args, part_statistics), in_workspace(kPartStatistics)});
    }
    if (turns) {
        patches.push_back({offsetof(Args, q_source), in_tensor(q)});
        patches.push_back({offsetof(Args, q_rotated), in_workspace(has_states ? kQueries : 0)});
    }
    return patches;
}

// Appends `more` to a launch's arguments, and returns its offset.
template <class More>
size_t append_argument(Launch& launch, const More& more) {
    const size_t offset = launch.argument_bytes.size();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&more);
    launch.argument_bytes.insert(launch.argument_bytes.end(), bytes, bytes + sizeof more);
    return offset;
}

void add_scales(Launch& launch, const CacheScales& scales) {
    const size_t offset = append_argument(launch, scales);
    launch.addresses.push_back({offset + offsetof(CacheScales, k), in_tensor(k_scale)});
    launch.addresses.push_back({offset + offsetof(CacheScales, v), in_tensor(v_scale)});
}

void add_program(Launch& launch, const ProgramArgs& program) {
    const size_t offset = append_argument(launch, program);
    add_program_addresses(launch.addresses, first_read, offset);
}

constexpr const char* kTooMany = "batch x heads x parts must stay within 2^31 - 1";

// Plans one call. Each step decides some members by those that the steps before it have decided.
class DecodePlanner {
  public:
    DecodePlanner(const FlashDecodeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                  const DeviceSpec& device, const Semantics& semantics);
    Plan made() &&;

  private:
    void check_call() const;
    void set_problem();
    void split_rows();
    void split_keys();
    void split_chunks();
    void choose_runs();
    void set_shares();
    void set_even_shares();
    void keep_levels();
    void prefetch();
    void choose_cluster();
    void choose_merge();
    void let_states_arrive();
    void add_workspaces();
    void add_workspace(const char* name, int64_t bytes);
    void add_launches();
    void add_launch(Kernel kernel, int64_t blocks, int threads, int smem_bytes,
                    int64_t of_cluster = 1);
    void add_append();
    void add_warpgroups();
    void add_chunks();
    void add_others();
    void add_merge();
    void add_presence();

    const FlashDecodeKernelConfig& config;
    const Tensors tensors;
    const DeviceSpec& device;
    const Semantics& semantics;
    DecodeKernelArgs args;
    DecodeProblem problem;
    ProgramArgs program;
    const ForwardProblem& p = problem.forward;
    Plan plan;

    const bool canonical = config.canonical > 0;
    bool turns, is_paged;
    // In a rolling cache the first chunk may begin at a key that the cache has dropped.
    bool rolls;
    // Kernels: for many rows, with warpgroups and without, and for the others.
    bool has_warpgroups, has_chunks, has_others;
    int64_t chunk_keys, parts, rows, most_rows_of_all, other_rows;
    int64_t tiles, min_units, units, parts_of_capacity, all_parts;
    bool whole_tiles, others_are_split, has_states;
    int64_t chunk_parts, chunk_parts_of_capacity;
    ChunkStates chunks;
    // Of K/V heads of all sequences, of tiles or parts, and of CTAs that the device holds at once.
    int64_t heads, items, resident;
    int fitting;
    int64_t unit_bytes, all_tiles;
    bool few_rows, whole, has_shares;
    bool has_one_run = true;  // for each tile of equal sequences
    int64_t cluster, cluster_smem;
    bool clusters, merges, searches, arrives;
    int64_t merges_of_rows, arriving_bytes;
    // Whether runs are counted, and where the workspaces are.
    bool counts;
    size_t counter, states_arrive, tile_counter;
};

DecodePlanner::DecodePlanner(const FlashDecodeKernelConfig& config, NumberReader& numbers,
                             Tensors tensors, const DeviceSpec& device, const Semantics& semantics)
    : config(config), tensors(tensors), device(device), semantics(semantics) {
    std::memset(&args, 0, sizeof args);  // including padding: equal plans have equal bytes
    problem = read_problem(numbers, tensors, args);
    if (semantics.has_program()) program = read_program(numbers);
    numbers.end();
}

Plan DecodePlanner::made() && {
    check_call();
    set_problem();
    split_rows();
    split_keys();
    split_chunks();
    choose_runs();
    keep_levels();
    prefetch();
    choose_cluster();
    choose_merge();
    let_states_arrive();
    add_workspaces();
    add_launches();
    add_presence();
    return std::move(plan);
}

void DecodePlanner::check_call() const {
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    check_smem(std::max(config.smem_bytes(), config.chunk_smem_bytes()), device);
    check_problem(p, semantics, config.d_head, config.B_r, config.d_v);
    require(semantics.uneven || (p.d == config.d_head && p.d_v == config.d_head_v()),
            "uneven: this library's kernels want d = d_head");
}

void DecodePlanner::set_problem() {
    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.capacity = static_cast<int32_t>(p.seq_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.heads_per_group = args.heads_q / args.heads_k;
    args.d = static_cast<int32_t>(config.d_v > 0 ? p.d + (p.d_v << 16) : p.d);
    args.window_left = static_cast<int32_t>(std::min(p.window_left, int64_t{kUnlimited}));
    args.window_right = static_cast<int32_t>(std::min(p.window_right, int64_t{kUnlimited}));
    args.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
    args.score_argument = p.softcap > 0 ? 2 * kLog2E * (p.scale / p.softcap) : 0.0f;
    if (semantics.program_scores) {
        program.scale = p.softcap > 0 ? p.softcap : p.scale;
        args.scale_log2 = kLog2E;
    }
    apply_scales(config, tensors, problem.scales,
                 args.score_argument > 0.0f ? args.score_argument
                 : semantics.program_scores ? program.scale
                                            : args.scale_log2);
    turns = tensors[cos_table] != 0;
    if (turns) args.q_strides = {p.packed ? 0 : p.seq_q * p.heads_q * p.d, p.heads_q * p.d, p.d};
}

// Which kernels take which rows of a sequence.
void DecodePlanner::split_rows() {
    require(!canonical || canonical_tile(static_cast<int>(p.d), device.arch,
                                         static_cast<int>(p.d_v)) == config.B_c,
            "canonical: this d needs different tiles; use a config with a matching d_head");
    rolls = canonical && tensors[kv_offset] != 0;
    chunk_keys = p.seq_k + (rolls ? kCanonicalChunk - 1 : 0);
    parts = canonical ? std::max<int64_t>(1, blocks_of(chunk_keys, kCanonicalChunk))
                      : most_parts(config, problem, device);
    require(parts <= kMostParts, "canonical: a sequence may have room for 1,024 chunks of keys");
    rows = p.seq_q * args.heads_per_group;
    require(rows <= INT_MAX, "seq_q x heads of a group must stay within 2^31 - 1");
    require(config.chunk_cluster == 0 || rows <= kMostClusterRows,
            "chunk_cluster: a sequence may have at most 8 rows (queries x query heads of a K/V "
            "head), not " +
                std::to_string(rows) + "; take a config without chunk_cluster");
    // Sequences with many rows use a separate kernel. Without packing, all sequences have the same
    // number of rows.
    const int64_t most_rows = config.most_rows_without_chunks();
    is_paged = tensors[page_table] != 0;
    most_rows_of_all =
        rolls ? INT_MAX
              : most_rows_without_warpgroups(config, p, problem.blocks, problem.slots, is_paged,
                                             canonical || problem.free_split, args, device);
    has_warpgroups = rows > most_rows_of_all;
    if (config.chunk_warpgroups > 0) args.most_rows = static_cast<int32_t>(most_rows_of_all);
    const bool needs_others = p.packed || !has_warpgroups;
    has_chunks = needs_others && config.chunk_rows > 0 && rows > most_rows;
    has_others = needs_others && (p.packed || !has_chunks);
    other_rows = std::min(rows, has_chunks ? most_rows : most_rows_of_all);
    tiles = blocks_of(other_rows, config.B_r);
}

// Into how many parts the keys of the others' tiles may be split, and the places of their states.
void DecodePlanner::split_keys() {
    min_units = (canonical ? kCanonicalChunk : config.min_keys) / config.B_c;
    units = blocks_of(p.seq_k, config.B_c);
    parts_of_capacity = std::max<int64_t>(
        1, blocks_of(rolls ? blocks_of(chunk_keys, config.B_c) : units, min_units));
    // Whether there are enough canonical tiles to fill the device without splitting any. Each tile
    // then has one CTA that goes through all chunks, and there are no states to merge. This choice
    // changes no bit.
    whole_tiles =
        canonical && p.batch * p.heads_k * tiles >= kWholeTilesPerSm * int64_t{device.sm_count};
    others_are_split = has_others && !whole_tiles && std::min(parts, parts_of_capacity) > 1;
    args.most_parts = static_cast<int32_t>(parts);
    args.min_units = static_cast<int32_t>(min_units);
    all_parts = std::max<int64_t>(tiles, 1) * parts_of_capacity;
    args.most_slots = static_cast<int32_t>(!others_are_split ? 0
                                           : canonical       ? all_parts
                                                             : std::min(parts, all_parts));
    args.slot_rows = static_cast<int32_t>(std::min<int64_t>(config.B_r, other_rows));
    // If there are more tiles than half the number of parts, each tile has one part.
    args.merged_rows =
        static_cast<int32_t>(canonical ? other_rows : std::min(other_rows, parts / 2 * config.B_r));
}

void DecodePlanner::split_chunks() {
    // One CTA per SM: an SM holds about one CTA of this size.
    chunk_parts = std::max<int64_t>(1, device.sm_count / p.heads_k);
    const int64_t chunk_units = min_units * kChunkMinKeysFactor;
    chunk_parts_of_capacity = std::max<int64_t>(1, blocks_of(units, chunk_units));
    chunks = has_chunks ? chunk_states(p, config.chunk_rows, chunk_parts, chunk_parts_of_capacity)
                        : ChunkStates{};
    args.most_chunk_parts = static_cast<int32_t>(chunk_parts);
    args.min_chunk_units = static_cast<int32_t>(chunk_units);
    args.chunk_head_rows = chunks.head_rows;
    args.chunk_batch_rows = chunks.batch_rows;
    args.chunk_query_rows = chunks.query_rows;
    has_states = others_are_split || chunks.head_rows > 0;
    args.by_parts = divisor_of(parts);
    args.by_group = divisor_of(args.heads_per_group);
    args.by_page = divisor_of(std::max<int64_t>(1, problem.slots));
    args.by_heads_k = divisor_of(p.heads_k);
    args.by_merged_rows = divisor_of(std::max(1, args.merged_rows));
}

// How many runs a tile is, by its length.
void DecodePlanner::choose_runs() {
    // CTAs that the device holds at once. Each takes one run after another. Runs have one part
    // each, unless there may be more parts than CTAs.
    heads = p.batch * p.heads_k;
    items = !has_others ? 0
            : canonical ? heads * (others_are_split ? all_parts : tiles)
                        : heads * std::max(tiles, std::min(parts, tiles * parts_of_capacity));
    fitting = ctas_that_fit(config.smem_bytes(), config.n_threads(), device.max_smem_per_sm, 0);
    if (config.most_ctas() > 0) fitting = std::min(fitting, config.most_ctas());
    resident = fitting * int64_t{device.sm_count};
    // If warps have their own rows, there is room for the first level only.
    if (!config.own_rows)
        args.kept_level_bytes =
            args.slot_rows * config.d_head_v() * 4 + (args.slot_rows * 8 + 15) / 16 * 16;
    // If there are twice as many tiles as CTAs that run at once, sequences of equal length are one
    // run each, and few other sequences have more. The number of merging CTAs does not affect the
    // bits, so shapes may determine it. These CTAs begin while the others run.
    const double one_run = kRoundingUp * static_cast<double>(heads * (p.packed ? 1 : tiles));
    few_rows = one_run >= 2.0 * static_cast<double>(resident * config.rounds);
    // If there are enough tiles for most SMs, and none can have many keys, each tile is one run,
    // whatever the lengths. Then there is neither a search nor a merge launch.
    unit_bytes =
        int64_t{config.B_c} * (config.d_head + config.d_head_v()) * config.cache_element_bytes();
    all_tiles = heads * tiles;
    whole = config.has_whole_runs() && others_are_split && !canonical && !p.packed && !has_chunks &&
            units * unit_bytes <= kMostWholeBytes && 8 * all_tiles >= 5 * int64_t{device.sm_count};
    if (canonical) {
        args.from_large = args.from_ragged = std::numeric_limits<float>::infinity();
        args.share = whole_tiles ? kAllParts : 0.0f;
    }
    has_shares = !canonical && (whole || (items > resident && others_are_split));
    if (has_shares) set_shares();
}

void DecodePlanner::set_shares() {
    // If shapes determine the number of tiles, the GPU gets the number of runs with which it is
    // fastest for equal lengths. Otherwise a run is as long as a CTA's share. It is also that long
    // in a free split, which has already chosen its parts by speed.
    const bool even_runs = config.rounds == 1 && !problem.free_split && !whole && !has_chunks &&
                           (!p.packed || tiles == 1);
    args.from_large = args.from_ragged = std::numeric_limits<float>::infinity();
    if (even_runs) return set_even_shares();
    const float share =
        kRoundingUp * static_cast<float>(p.heads_k) / static_cast<float>(resident * config.rounds);
    args.share = config.rounds > 1 ? -share : share;
    args.share_of_large = -share;
    args.from_large = static_cast<float>(kLongShareBytes / unit_bytes) / share;
}

void DecodePlanner::set_even_shares() {
    const auto tiles_of_head = static_cast<float>(p.batch * tiles);
    const EqualTiles equal{.tiles = static_cast<double>(all_tiles),
                           .rows = static_cast<double>(args.slot_rows),
                           .slots = static_cast<double>(resident),
                           .unit_bytes = static_cast<double>(unit_bytes),
                           .min_units = min_units,
                           .most_parts = parts};
    const RunsBySize runs = runs_by_size(equal, units);
    const auto share_of = [&](int64_t of_tile) {
        const float share =
            (of_tile == 1 && 2 * all_tiles > resident ? kOfOneRun : kOfSeveralRuns) /
            (static_cast<float>(of_tile) * tiles_of_head);
        return of_tile * all_tiles > resident ? -share : share;
    };
    args.share = share_of(runs.small);
    args.share_of_large = share_of(runs.large);
    args.from_large = static_cast<float>(runs.from_large) * tiles_of_head;
    has_one_run = runs.large == 1;
    int64_t ragged = runs.large;
    while (2 * ragged <= parts &&
           static_cast<double>(ragged * all_tiles) < kRaggedTurns * static_cast<double>(resident))
        ragged *= 2;
    args.share_of_ragged = share_of(ragged);
    args.most_of_equal = kMostOfMean / tiles_of_head;
    args.from_ragged =
        static_cast<float>(kRaggedBytes / static_cast<double>(p.heads_k * unit_bytes));
}

// How many levels of a tile's states a CTA keeps in shared memory.
void DecodePlanner::keep_levels() {
    if (config.own_rows || !has_shares) return;
    const int beside = few_rows && !whole ? config.merge_smem_bytes() + kReservedSmem : 0;
    while (args.kept_levels < kMostKeptLevels &&
           holds(config, (args.kept_levels + 1) * args.kept_level_bytes, fitting, beside, device))
        ++args.kept_levels;
}

// What CTAs prefetch before their turn, and what the next launch waits for.
void DecodePlanner::prefetch() {
    if (whole) args.by_whole_runs = divisor_of(p.heads_k * tiles);
    if (whole && tiles == 1 && all_tiles > device.sm_count) args.flags |= kPrefetchesRuns;
    if (whole && tiles == 1 && all_tiles <= resident &&
        is_held(config, static_cast<double>(all_tiles) / device.sm_count, units * unit_bytes))
        args.flags |= kHoldsNextLaunch;
    // Before it may begin, the decode kernel prefetches keys and guesses lengths. Whole runs
    // prefetch keys differently, and are known without lengths.
    if (config.uses_pdl() && device.arch >= 90 && !whole && heads > 0) {
        const int64_t asked =
            std::min(kPrefetchedBytes / (heads * unit_bytes / config.B_c), p.seq_k);
        if (asked >= kLeastPrefetchedKeys)
            args.log2_prefetched_keys =
                static_cast<int16_t>(std::bit_width(static_cast<uint64_t>(asked)) - 1);
        // If rows are appended, the launch that provides the lengths is over by then.
        if (!p.packed && !semantics.program_masks && p.batch <= kMostGuessed &&
            tensors[new_k] == 0 && !rolls)
            args.flags |= kGuessesLengths;
    }
    args.passes = heads * units * unit_bytes <= kPassingBytes;
}

void DecodePlanner::choose_cluster() {
    // A cluster merges the parts of a tile if one CTA per SM is enough and no part is long. A
    // separate merge launch is faster if there are two CTAs per SM, or if there are several tiles
    // and one CTA on most SMs.
    cluster = std::max<int64_t>(1, std::min(parts, parts_of_capacity));
    cluster = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(cluster)));
    const int64_t part_keys = std::max(blocks_of(units, parts), min_units) * config.B_c;
    while (heads * cluster > device.sm_count && cluster > 2 &&
           part_keys << (args.cluster_run_levels + 1) <= kMostClusterRunKeys) {
        cluster /= 2;
        ++args.cluster_run_levels;
    }
    const int64_t received =
        16 +
        blocks_of(int64_t{args.slot_rows} * config.d_head_v() / 4, 8 * cluster) * 8 * cluster * 32;
    cluster_smem =
        config.smem_bytes() + received + int64_t{args.cluster_run_levels} * args.kept_level_bytes;
    clusters = !whole && config.cluster >= cluster && cluster > 1 && device.arch >= 90 &&
               others_are_split && p.seq_k <= kMostClusterKeys &&
               cluster_smem <= device.max_smem_per_block &&
               (tiles == 1 ? 1 : 2 * tiles) * heads * cluster <= device.sm_count;
    if (clusters) {
        args.cluster_levels = std::countr_zero(static_cast<uint64_t>(cluster));
        args.kept_levels = args.cluster_run_levels;
    }
}

void DecodePlanner::choose_merge() {
    merges = clusters ? chunks.head_rows > 0
                      : has_states && !whole && (config.chunk_rows > 0 || args.merged_rows > 0);

    merges_of_rows = heads * args.merged_rows;
    searches = few_rows || merges_of_rows > kRowsPerSm * int64_t{device.sm_count};
    // Before sm_90 the merge begins only when the decode kernel is done.
    args.warms_up = device.arch >= 90 && !searches && merges_of_rows <= device.sm_count / 2;
    if (searches)
        merges_of_rows =
            std::min(blocks_of(merges_of_rows, kMergeThreads / kWarpSize),
                     int64_t{device.sm_count} * (few_rows && has_one_run ? 1 : kSearchesPerSm));
}

void DecodePlanner::let_states_arrive() {
    // The states of a sequence's few parts arrive one by one at the merge, whose CTAs already wait
    // for them. This gains nothing with several sequences, or if this length has too many parts for
    // the clusters that serve the cache's shorter lengths.
    const int64_t arriving_parts = std::min(
        {int64_t{kMostArrivingParts}, parts, device.sm_count / std::max(heads, int64_t{1})});
    const int64_t arriving_rows = arriving_parts * args.slot_rows;
    arriving_bytes = heads * arriving_rows * (config.d_head_v() + 2) * int64_t{sizeof(float)};
    arrives = config.has_arrivals() && merges && args.warms_up != 0 && p.batch == 1 && tiles == 1 &&
              !p.packed && items <= resident && arriving_parts > 1 &&
              (p.seq_k > kMostClusterKeys || parts_of_capacity <= kMostArrivingParts) &&
              arriving_bytes <= kMostArrivingBytes;
    if (arrives) {
        args.most_arriving = static_cast<int32_t>(arriving_parts);
        args.arriving_rows = static_cast<int32_t>(arriving_rows);
    }
}

void DecodePlanner::add_workspace(const char* name, int64_t bytes) {
    plan.workspaces.push_back({name, static_cast<size_t>(bytes), Contents::undefined});
}

void DecodePlanner::add_workspaces() {
    args.chunk_states = heads * args.most_slots * args.slot_rows;
    const int64_t states = args.chunk_states + p.heads_k * chunks.head_rows;
    if (has_states) {
        add_workspace("part_o", states * config.d_head_v() * int64_t{sizeof(float)});
        add_workspace("part_statistics", states * 2 * int64_t{sizeof(float)});
    }
    const int64_t queries = p.packed ? p.total_q : p.batch * p.seq_q;
    if (turns) add_workspace("q_rotated", queries * p.heads_q * p.d * config.element_bytes());

    // The merge resets the counter to zero.
    counter = plan.workspaces.size();
    const auto most_units = static_cast<float>(p.batch * tiles * units);
    counts =
        merges && (args.share < 0 || (args.share_of_large < 0 && args.from_large <= most_units) ||
                   (args.share_of_ragged < 0 && args.from_ragged <= most_units));
    if (counts) plan.workspaces.push_back({"run_counter", sizeof(uint32_t), Contents::kept_zero});
    // The merge resets this workspace to zero, too.
    states_arrive = plan.workspaces.size();
    if (arrives)
        plan.workspaces.push_back(
            {"arriving", static_cast<size_t>(arriving_bytes), Contents::kept_zero});
    tile_counter = plan.workspaces.size();
    if (has_warpgroups) {
        plan.workspaces.push_back({"tile_counter", sizeof(uint32_t), Contents::kept_zero});
        if (const int64_t bytes = running_state_bytes(config, p, device); bytes > 0)
            add_workspace("running_states", bytes);
    }
}

void DecodePlanner::add_launch(Kernel kernel, int64_t blocks, int threads, int smem_bytes,
                               int64_t of_cluster) {
    const auto* argument = reinterpret_cast<const uint8_t*>(&args);
    require(blocks <= INT_MAX, kTooMany);
    plan.launches.push_back({
        .kernel = kernel,
        .grid = {static_cast<uint32_t>(blocks), 1, 1},
        .cluster = {static_cast<uint32_t>(of_cluster), 1, 1},
        .block = {static_cast<uint32_t>(threads), 1, 1},
        .smem_bytes = smem_bytes,
        .argument_bytes = {argument, argument + sizeof args},
        .addresses = addresses_of(tensors, has_states),
        .tensor_maps = {},
        // Each launch waits for the preceding one where it must. The launch before the first is
        // not part of this call.
        .programmatic = device.arch >= 90 && (config.early || !plan.launches.empty()),
    });
    if (config.has_scales()) add_scales(plan.launches.back(), problem.scales);
    if (semantics.has_program()) add_program(plan.launches.back(), program);
    if (counts)
        plan.launches.back().addresses.push_back(
            {offsetof(DecodeKernelArgs, run_counter), in_workspace(counter)});
    if (arrives)
        plan.launches.back().addresses.push_back(
            {offsetof(DecodeKernelArgs, arriving), in_workspace(states_arrive)});
}

void DecodePlanner::add_append() {
    if (tensors[new_k] == 0) return;
    const int64_t of_query = 2 * p.heads_k + (turns ? p.heads_q : 0);
    require(of_query * p.seq_q <= INT_MAX, "seq_q x heads must stay within 2^31 - 1");
    add_launch(append, p.batch * blocks_of(of_query * p.seq_q, kAppendThreads / kWarpSize),
               kAppendThreads, 0);
}

void DecodePlanner::add_launches() {
    add_append();
    // The longest launch comes first: CTAs of the next launch begin where CTAs of this one are
    // done.
    add_warpgroups();
    add_chunks();
    add_others();
    add_merge();
}

void DecodePlanner::add_warpgroups() {
    if (!has_warpgroups) return;
    const WarpgroupCall call{
        .problem = p,
        .blocks = problem.blocks,
        .slots = problem.slots,
        .is_paged = is_paged,
        .appends = tensors[new_k] != 0,
        .q = turns ? in_workspace(has_states ? kQueries : 0) : in_tensor(q),
        .k_cache = in_tensor(k_cache),
        .v_cache = in_tensor(v_cache),
        .o = in_tensor(o),
        .lse = in_tensor(lse),
        .cache_lens = in_tensor(cache_lens),
        .page_table = in_tensor(page_table),
        .sinks = in_tensor(sinks),
        .cu_seqlens_q = in_tensor(cu_seqlens_q),
        .tile_counter = in_workspace(tile_counter),
        .running_states = in_workspace(tile_counter + 1),
    };
    plan.launches.push_back(plan_warpgroups(config, warpgroups_of(config), most_rows_of_all, call,
                                            args, device, semantics));
    plan.launches.back().programmatic =
        device.arch >= 90 && (config.early || plan.launches.size() > 1);
}

void DecodePlanner::add_chunks() {
    if (!has_chunks) return;
    const int64_t all_rows = p.packed ? p.total_q * args.heads_per_group : p.batch * rows;
    const int64_t chunk_tiles = std::min(p.batch * blocks_of(rows, config.chunk_rows),
                                         all_rows / config.chunk_rows + p.batch);
    const int64_t chunk_items =
        p.heads_k * std::max(chunk_tiles, std::min(chunk_parts * p.batch,
                                                   chunk_tiles * chunk_parts_of_capacity));
    require(chunk_items <= INT_MAX, kTooMany);
    const int64_t at_once = ctas_that_fit(config.chunk_smem_bytes(), config.chunk_threads(),
                                          device.max_smem_per_sm, 0) *
                            int64_t{device.sm_count};
    add_launch(is_paged ? paged_chunk : chunk, std::min(chunk_items, at_once),
               config.chunk_threads(), config.chunk_smem_bytes());
}

void DecodePlanner::add_others() {
    require(items <= INT_MAX, kTooMany);
    if (clusters)
        add_launch(is_paged ? paged : dense, heads * tiles * cluster, config.n_threads(),
                   static_cast<int>(cluster_smem), cluster);
    else if (config.chunk_cluster > 0)
        add_launch(is_paged ? paged : dense, items * config.chunk_cluster, config.n_threads(),
                   config.smem_bytes(), config.chunk_cluster);
    else if (has_others)
        add_launch(is_paged ? paged : dense, std::min(whole ? all_tiles : items, resident),
                   config.n_threads(),
                   config.smem_bytes() + args.kept_levels * args.kept_level_bytes);
}

void DecodePlanner::add_merge() {
    if (config.chunk_rows > 0 && merges) {
        const int64_t all_rows = p.packed ? p.total_q : p.batch * p.seq_q;
        require(all_rows * p.heads_q <= INT_MAX, "rows x heads must stay within 2^31 - 1");
        add_launch(merge_rows,
                   std::min(all_rows * p.heads_q, kMergesPerSm * int64_t{device.sm_count}),
                   kMergeThreads, 0);
    } else if (merges) {
        add_launch(arrives    ? merge_arriving
                   : searches ? merge_rows
                              : merge,
                   merges_of_rows, kMergeThreads, 0);
    }
}

void DecodePlanner::add_presence() {
    require(!rolls || semantics.hides_earlier,
            "kv_offset: canonical kernels of this library have no window; use those of one");
    for (const DecodeTensor tensor :
         {page_table, new_k, new_v, cos_table, sin_table, kv_offset, k_scale, v_scale})
        plan.presence.push_back({tensor, tensors[tensor] != 0,
                                 "page_table, k, v, cos, sin, kv_offset, k_scale, v_scale: this "
                                 "launch was planned for a different set of these"});
    plan.presence.push_back(
        {cu_seqlens_q, semantics.packed,
         "packed: the call and this library's kernels must both use packed sequences, or neither"});
}

}  // namespace

Plan plan_decode(const FlashDecodeKernelConfig& config, NumberReader& numbers, Tensors tensors,
                 const DeviceSpec& device, const Semantics& semantics) {
    require(has_run_costs(), "plan: no costs are set for its GPU");
    return DecodePlanner(config, numbers, tensors, device, semantics).made();
}

}  // namespace flashsmith
