#include "slot_write/plan.h"

#include <climits>
#include <cstddef>
#include <cstring>
#include <string>

namespace flashsmith {
namespace {

constexpr int kColumnUnit = 8;

// Throws std::invalid_argument if the kernel has no such width.
void check_width(const char* name, int64_t width, int columns) {
    require(width > 0 && width <= columns && width % kColumnUnit == 0,
            std::string(name) + " is " + std::to_string(width) +
                "; the config serves multiples of 8 up to " + std::to_string(columns));
}

static_assert(sizeof(SlotWriteScaledArgs) == sizeof(SlotWriteKernelArgs) + sizeof(CacheScales));
// The tensors of the operation, in order.
constexpr size_t kK = 0, kV = 1, kKCache = 2, kVCache = 3, kSlotMapping = 4, kKScale = 5,
                 kVScale = 6;

}  // namespace

Plan plan_slot_write(const SlotWriteKernelConfig& config, NumberReader& numbers, Tensors tensors,
                     const DeviceSpec&, const Semantics&) {
    SlotWriteScaledArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
    const int64_t count = numbers.integer(), heads = numbers.integer(), d = numbers.integer(),
                  d_v = numbers.integer(), blocks = numbers.integer(), slots = numbers.integer();
    // A braced list evaluates its elements from left to right, so they are read in order.
    args.k_strides = {numbers.integer(), numbers.integer()};
    args.v_strides = {numbers.integer(), numbers.integer()};
    args.k_cache_strides = {numbers.integer(), numbers.integer(), numbers.integer()};
    args.v_cache_strides = {numbers.integer(), numbers.integer(), numbers.integer()};
    CacheScales& scales = args.scales;
    scales.k_value = static_cast<float>(numbers.number());
    scales.v_value = static_cast<float>(numbers.number());
    scales.k_step = static_cast<int32_t>(numbers.integer());
    scales.v_step = static_cast<int32_t>(numbers.integer());
    numbers.end();
    require(config.has_scales() || (tensors[kKScale] == 0 && tensors[kVScale] == 0 &&
                                    scales.k_value == 1.0f && scales.v_value == 1.0f),
            "k_scale, v_scale: the config's kernel has no scales; use one with cache_scaled");
    check_width("d", d, config.d_head);
    check_width("d_v", d_v, config.v_columns());
    require(config.d_v > 0 || d_v == d,
            "d_v is " + std::to_string(d_v) + ", and d " + std::to_string(d) +
                "; the config's kernel has one width: use one with a d_v");
    require(count >= 0 && heads > 0 && count <= INT_MAX / 2 && heads <= INT_MAX / 2 &&
                count * 2 * heads <= INT_MAX,
            "rows of all heads of k and v must stay within 2^31 - 1");
    require(blocks >= 0 && slots >= 0 && blocks <= INT_MAX && slots <= INT_MAX &&
                blocks * slots <= INT_MAX,
            "the slots of a cache must stay within 2^31 - 1");
    args.count = static_cast<int32_t>(count);
    args.heads = static_cast<int32_t>(heads);
    args.d = static_cast<int32_t>(d);
    args.slots_per_block = static_cast<int32_t>(slots);
    args.d_v = static_cast<int32_t>(d_v);
    args.total_slots = static_cast<int32_t>(blocks * slots);

    using Args = SlotWriteKernelArgs;
    const int64_t threads = count * 2 * heads * (config.most_columns() / kColumnUnit);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Plan plan;
    plan.launches.push_back(Launch{
        .kernel = 0,
        .grid = {static_cast<uint32_t>((threads + config.n_threads() - 1) / config.n_threads()), 1,
                 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(config.n_threads()), 1, 1},
        .smem_bytes = 0,
        .argument_bytes = {bytes, bytes + (config.has_scales() ? sizeof args
                                                               : sizeof(SlotWriteKernelArgs))},
        .addresses = {{offsetof(Args, k), in_tensor(kK)},
                      {offsetof(Args, v), in_tensor(kV)},
                      {offsetof(Args, k_cache), in_tensor(kKCache)},
                      {offsetof(Args, v_cache), in_tensor(kVCache)},
                      {offsetof(Args, slot_mapping), in_tensor(kSlotMapping)}},
        .tensor_maps = {},
    });
    if (config.has_scales()) {
        std::vector<AddressPatch>& addresses = plan.launches.back().addresses;
        const size_t scales_offset = sizeof(SlotWriteKernelArgs);
        addresses.push_back({scales_offset + offsetof(CacheScales, k), in_tensor(kKScale)});
        addresses.push_back({scales_offset + offsetof(CacheScales, v), in_tensor(kVScale)});
    }
    return plan;
}

}  // namespace flashsmith
