#include "wgmma_mla/plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

#include "mla/problem.h"
#include "sm90/copied_tensor.h"

namespace flashsmith {
namespace {

constexpr int kArch = 90;
// Boxes of fewer keys than the rows that a swizzle covers would break its pattern.
constexpr int64_t kFewestBoxKeys = 8;
// The fixed cost of a CTA (start, end, and merging its rows), as the number of keys that take the
// same time.
constexpr int64_t kKeysPerCta = 192;
// For how many keys the number of CTAs of a tile is the fastest one. The host does not know the
// lengths, and a cache has room for more keys than most sequences have.
constexpr int64_t kTypicalKeys = 8192;

// How many CTAs a tile has if its rows see all keys. Fewer keys need fewer.
int64_t runs_at_most(const WgmmaMlaKernelConfig& config, const MlaKernelArgs& args) {
    if (config.run_keys == 0) return args.most_parts;
    const int64_t keys = int64_t{tiles_of(args.capacity, kMlaKeys)} * kMlaKeys;
    const int64_t runs =
        std::max<int64_t>((keys + config.run_keys - 1) / config.run_keys, args.least_runs);
    return std::min<int64_t>(runs, args.most_parts);
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

}  // namespace

Plan plan_mla(const WgmmaMlaKernelConfig& config, NumberReader& numbers, Tensors tensors,
              const DeviceSpec& device, const Semantics& semantics) {
    const MlaProblem p = read_mla_problem(numbers, tensors);
    numbers.end();
    require(device.arch == kArch, "wgmma kernels run on compute capability 9.0 only");
    check_smem(config.smem_bytes(), device);
    check_mla(p, config.d_head, config.d_v, kMlaRows, semantics);
    check_no_scale(p, tensors);
    require(!p.is_paged || p.capacity == 0 || std::gcd(p.slots, kMlaKeys) >= kFewestBoxKeys,
            "page_table: pages of " + std::to_string(p.slots) +
                " keys; these kernels take multiples of 8");
    const CacheRows rows = cache_rows(p);
    MlaKernelArgs args = mla_arguments(p);
    args.map_rows = static_cast<int32_t>(rows.of_block);
    args.box_keys =
        static_cast<int32_t>(p.is_paged ? std::gcd(p.slots, kMlaKeys) : int64_t{kMlaKeys});
    const MlaSplit split{kMlaKeys, config.min_keys, config.most_parts, device.sm_count,
                         kKeysPerCta};
    const int64_t tiles = set_tiles(args, p, kMlaRows, split);
    args.least_runs = static_cast<int32_t>(
        split.fastest(tiles, args.most_parts, std::min(p.capacity, kTypicalKeys)));

    Launch main = mla_launch(kMlaMain, tiles * runs_at_most(config, args), kMlaThreads, args);
    main.smem_bytes = static_cast<int>(config.smem_bytes());
    main.tensor_maps.push_back(cache_map(config, p, rows, args.box_keys));
    return mla_plan(std::move(main), args, tiles, kMlaRows, config.d_v, tensors, semantics.packed,
                    true);
}

}  // namespace flashsmith
