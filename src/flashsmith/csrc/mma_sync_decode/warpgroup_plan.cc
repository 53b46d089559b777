#include "mma_sync_decode/warpgroup_plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "mma_sync_decode/warpgroup_config.cuh"
#include "sm90/copied_tensor.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;
// The share of the SMs, in tenths, that the tiles of these sequences must fill, since only the
// other kernels split a tile's keys. On an H200 these kernels reach 0.4 of the speed that they have
// with full SMs, and canonical ones 0.2.
constexpr int64_t kTenthsOfSms = 6, kCanonicalTenths = 3;

int64_t blocks_of(int64_t rows, int64_t tile) {
    return (rows + tile - 1) / tile;
}

Strides strides_of(const DecodeStrides& strides) {
    return {strides.batch, strides.row, strides.head};
}

// A cache as rows of one long sequence, and how many rows apart its blocks are.
struct CacheRows {
    Strides strides;
    int64_t of_block, total;
};

CacheRows cache_rows(const DecodeStrides& strides, int64_t blocks, int64_t slots) {
    CacheRows rows{strides_of(strides), 1, blocks};
    if (slots == 1) {
        rows.strides.seq = strides.batch;
        return rows;
    }
    if (blocks > 1) rows.of_block = strides.row > 0 ? strides.batch / strides.row : 0;
    rows.total = (blocks - 1) * rows.of_block + slots;
    return rows;
}

// Whether TMA accepts a stride; in a dimension of size 1 any stride is accepted.
bool suits(int64_t stride, int64_t size) {
    return size <= 1 || (stride > 0 && stride * kElementBytes % kStrideUnit == 0 &&
                         stride * kElementBytes < kStrideLimit);
}

bool suits(const DecodeStrides& strides, int64_t batch, int64_t rows, int64_t heads) {
    return suits(strides.batch, batch) && suits(strides.row, rows) && suits(strides.head, heads);
}

bool suits_as_rows(const DecodeStrides& strides, int64_t blocks, int64_t slots, int64_t heads) {
    if (!suits(strides, blocks, slots, heads)) return false;
    if (blocks > 1 && slots > 1 && strides.batch % strides.row != 0) return false;
    const CacheRows rows = cache_rows(strides, blocks, slots);
    // The kernel stores distances in a cache as 32-bit counts of 16 bytes.
    const int64_t units =
        (rows.total * rows.strides.seq + heads * strides.head) * kElementBytes / kStrideUnit;
    return rows.total < INT_MAX &&
           static_cast<uint64_t>(rows.strides.seq) * kElementBytes < kWrap &&
           units < int64_t{UINT_MAX};
}

// The keys of a box, which lies in one block of the cache and in one tile.
int64_t box_keys(const FlashDecodeKernelConfig& config, int64_t slots, bool is_paged) {
    const int64_t keys = warpgroup_keys(config);
    return is_paged ? std::gcd(slots, keys) : keys;
}

}  // namespace

int64_t most_rows_without_warpgroups(const FlashDecodeKernelConfig& config, const ForwardProblem& p,
                                     int64_t blocks, int64_t slots, bool is_paged,
                                     bool may_depend_on_batch, const DecodeKernelArgs& args,
                                     const DeviceSpec& device) {
    if (config.chunk_warpgroups == 0 || device.arch != kArch) return INT_MAX;
    const int64_t queries = p.packed ? p.total_q : p.batch * p.seq_q;
    const int64_t sequences = p.packed ? 1 : p.batch, rows = p.packed ? p.total_q : p.seq_q;
    if (!suits(args.q_strides, sequences, rows, p.heads_q) ||
        !suits(args.o_strides, sequences, rows, p.heads_q) ||
        !suits_as_rows(args.k_cache_strides, blocks, slots, p.heads_k) ||
        !suits_as_rows(args.v_cache_strides, blocks, slots, p.heads_k))
        return INT_MAX;
    const int64_t group = p.heads_q / p.heads_k;
    const int64_t tenths = config.canonical > 0 ? kCanonicalTenths : kTenthsOfSms;
    // The number of rows that fill this share of the device with tiles. The tiles' number of
    // warpgroups depends on the batch.
    const int64_t filled = device.sm_count * tenths / 10 * kWarpgroupRows * 2;
    // A sequence of fewer queries would leave most rows of its tiles empty.
    const int64_t least = (kWarpgroupRows - 1) * group;
    if (may_depend_on_batch && queries * p.heads_q >= filled) return least;
    return std::max(least, filled / p.heads_k);
}

int64_t running_state_bytes(const FlashDecodeKernelConfig& config, const ForwardProblem& p,
                            const DeviceSpec& device) {
    // A single chunk needs no workspace: its state covers all keys.
    if (config.canonical == 0 || p.seq_k <= kCanonicalChunk) return 0;
    const WgmmaForwardKernelConfig its = warpgroup_config(config);
    return int64_t{device.sm_count} * its.n_warpgroups * its.running_state_bytes();
}

Launch plan_warpgroups(const FlashDecodeKernelConfig& config, size_t kernel, int64_t most_rows,
                       const WarpgroupCall& call, const DecodeKernelArgs& decode,
                       const DeviceSpec& device, const Semantics& semantics) {
    using Args = WarpgroupKernelArgs;
    const WgmmaForwardKernelConfig its = warpgroup_config(config);
    check_smem(its.smem_bytes(), device);
    ForwardProblem p = call.problem;
    p.q = strides_of(decode.q_strides);
    p.o = strides_of(decode.o_strides);
    const CacheRows k = cache_rows(decode.k_cache_strides, call.blocks, call.slots);
    const CacheRows v = cache_rows(decode.v_cache_strides, call.blocks, call.slots);

    Args args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    args.forward.problem = forward_arguments(p, its.B_r, its.B_c);
    args.forward.problem.d = static_cast<int32_t>(p.d_v);
    args.forward.problem.lse_batch_stride = decode.lse_batch_stride;
    args.forward.problem.lse_head_stride = decode.lse_head_stride;
    args.forward.heads_per_kv_head.divisor = static_cast<uint32_t>(p.heads_q / p.heads_k);
    args.page_table_stride = decode.page_table_stride;
    args.capacity = decode.capacity;
    args.appends = call.appends ? 1 : 0;
    args.blocks = decode.blocks;
    args.k_rows = static_cast<int32_t>(k.of_block);
    args.v_rows = static_cast<int32_t>(v.of_block);
    args.box_keys = static_cast<int32_t>(box_keys(config, call.slots, call.is_paged));
    args.gathers = args.box_keys < kFewestBoxKeys ? 1 : 0;
    const auto of_cache = [](const DecodeStrides& its) {
        const auto in_units = [](int64_t elements) {
            return static_cast<uint32_t>(elements * kElementBytes / kStrideUnit);
        };
        return CacheStrides{in_units(its.batch), in_units(its.row), in_units(its.head)};
    };
    args.k_strides = of_cache(decode.k_cache_strides);
    args.v_strides = of_cache(decode.v_cache_strides);
    args.most_rows = static_cast<int32_t>(most_rows);
    args.section_keys =
        static_cast<int32_t>((int64_t{its.section_mib} << 20) / ((p.d + p.d_v) * kElementBytes));
    args.by_page = decode.by_page;
    args.d = static_cast<int32_t>(p.d);

    // Each sequence has at most one tile that is not full.
    const int64_t queries = p.packed ? p.total_q : p.batch * p.seq_q;
    const int64_t tiles =
        std::min(p.batch * blocks_of(p.seq_q, its.B_r), queries / its.B_r + p.batch) * p.heads_q;
    require(tiles <= INT_MAX, "batch x heads x Q blocks must stay within 2^31 - 1");
    const int64_t ctas = std::min<int64_t>(tiles, device.sm_count);
    constexpr size_t kForward = offsetof(Args, forward),
                     kProblem = kForward + offsetof(HopperForwardKernelArgs, problem);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = kernel,
        .grid = {static_cast<uint32_t>(ctas), 1, 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(its.n_threads()), 1, 1},
        .smem_bytes = static_cast<int>(its.smem_bytes()),
        .argument_bytes = {bytes, bytes + sizeof args},
        .addresses =
            {
                {offsetof(Args, cache_lens), call.cache_lens},
                {offsetof(Args, page_table), call.page_table},
                {offsetof(Args, k_cache), call.k_cache},
                {offsetof(Args, v_cache), call.v_cache},
                {kProblem + offsetof(ForwardKernelArgs, o), call.o},
                {kProblem + offsetof(ForwardKernelArgs, lse), call.lse},
                {kProblem + offsetof(ForwardKernelArgs, sinks), call.sinks},
                {kProblem + offsetof(ForwardKernelArgs, cu_seqlens_q), call.cu_seqlens_q},
                {kForward + offsetof(HopperForwardKernelArgs, tile_counter), call.tile_counter},
            },
        .tensor_maps = {},
    };
    if (running_state_bytes(config, p, device) > 0)
        launch.addresses.push_back(
            {kProblem + offsetof(ForwardKernelArgs, parts), call.running_states});

    const int64_t q_rows = p.packed ? p.total_q : p.seq_q;
    const auto add_map = [&](const char* name, const Place& place, size_t offset, Strides strides,
                             int64_t rows, int64_t heads, int box_rows, bool packed,
                             int64_t columns) {
        const CopiedTensor tensor{name,   place.index, kForward + offset, strides, rows,
                                  heads,  rows,        box_rows,          0,       false,
                                  columns};
        TensorMapSpec map = tensor_map(its.d_head, its.dtype, p, packed, tensor);
        map.place = place;
        launch.tensor_maps.push_back(std::move(map));
    };
    if (ctas == 0) return launch;
    using Hopper = HopperForwardKernelArgs;
    const int box = args.box_keys;
    add_map("q", call.q, offsetof(Hopper, q), p.q, q_rows, p.heads_q, kWarpgroupRows,
            semantics.packed, p.d);
    if (p.seq_k > 0) {
        add_map("k_cache", call.k_cache, offsetof(Hopper, k), k.strides, k.total, p.heads_k, box,
                true, p.d);
        add_map("v_cache", call.v_cache, offsetof(Hopper, v), v.strides, v.total, p.heads_k, box,
                true, p.d_v);
    } else {
        // Without keys nothing is copied, but a tensor map needs an address.
        add_map("k_cache", call.q, offsetof(Hopper, k), p.q, 1, 1, box, true, p.d);
        add_map("v_cache", call.q, offsetof(Hopper, v), p.q, 1, 1, box, true, p.d_v);
    }
    add_map("o", call.o, offsetof(Hopper, o), p.o, q_rows, p.heads_q, kWarpRows, semantics.packed,
            p.d_v);
    return launch;
}

}  // namespace flashsmith
