#include "row_merge/plan.h"

#include <climits>
#include <cstddef>
#include <string>

namespace flashsmith {
namespace {

constexpr int kColumnUnit = 8;

// The tensors of the operation in their order: the first part, the outputs, the other parts, the
// sinks.
constexpr size_t kO = 2, kLse = 3, kSinks = 2 * kMostParts + 2;
constexpr size_t out_of(size_t part) {
    return part == 0 ? 0 : 2 * part + 2;
}

MergedTensor read_tensor(NumberReader& numbers) {
    // A braced list evaluates its elements from left to right, so they are read in order.
    return {numbers.integer(), numbers.integer(), numbers.integer()};
}
MergedStatistic read_statistic(NumberReader& numbers) {
    return {numbers.integer(), numbers.integer()};
}

}  // namespace

Plan plan_row_merge(const RowMergeKernelConfig& config, NumberReader& numbers, Tensors,
                    const DeviceSpec&, const Semantics&) {
    RowMergeKernelArgs args{};
    const int64_t batch = numbers.integer(), seq = numbers.integer(), heads = numbers.integer(),
                  d = numbers.integer(), n_parts = numbers.integer();
    args.first_fp32 = static_cast<int32_t>(numbers.integer());
    args.others_fp32 = static_cast<int32_t>(numbers.integer());
    args.o_fp32 = static_cast<int32_t>(numbers.integer());
    args.o_strides = read_tensor(numbers);
    for (MergedTensor& strides : args.outs_strides) strides = read_tensor(numbers);
    args.lse_strides = read_statistic(numbers);
    for (MergedStatistic& strides : args.lses_strides) strides = read_statistic(numbers);
    numbers.end();
    require(d > 0 && d <= config.d_head && d % kColumnUnit == 0,
            "d is " + std::to_string(d) + "; the config serves multiples of 8 up to " +
                std::to_string(config.d_head));
    require(n_parts > 0 && n_parts <= kMostParts, "a launch merges 1 to 8 parts");
    require(batch >= 0 && batch <= INT_MAX && seq >= 0 && seq <= INT_MAX && heads > 0 &&
                heads <= INT_MAX && batch * heads <= INT_MAX && batch * heads * seq <= INT_MAX,
            "rows of all heads and sequences must stay within 2^31 - 1");
    args.rows = static_cast<int32_t>(batch * heads * seq);
    args.seq = static_cast<int32_t>(seq);
    args.heads = static_cast<int32_t>(heads);
    args.d = static_cast<int32_t>(d);
    args.n_parts = static_cast<int32_t>(n_parts);

    using Args = RowMergeKernelArgs;
    const int64_t threads = args.rows * int64_t{config.d_head / 4};
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = 0,
        .grid = {static_cast<uint32_t>((threads + config.n_threads() - 1) / config.n_threads()), 1,
                 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(config.n_threads()), 1, 1},
        .smem_bytes = 0,
        .argument_bytes = {bytes, bytes + sizeof args},
        .addresses = {{offsetof(Args, o), in_tensor(kO)},
                      {offsetof(Args, lse), in_tensor(kLse)},
                      {offsetof(Args, sinks), in_tensor(kSinks)}},
        .tensor_maps = {},
    };
    Plan plan;
    for (size_t part = 0; part < kMostParts; ++part) {
        launch.addresses.push_back(
            {offsetof(Args, outs) + part * sizeof(void*), in_tensor(out_of(part))});
        launch.addresses.push_back(
            {offsetof(Args, lses) + part * sizeof(void*), in_tensor(out_of(part) + 1)});
        for (const size_t tensor : {out_of(part), out_of(part) + 1})
            plan.presence.push_back({tensor, part < static_cast<size_t>(n_parts),
                                     "this plan is for a different number of parts"});
    }
    plan.launches.push_back(launch);
    return plan;
}

}  // namespace flashsmith
