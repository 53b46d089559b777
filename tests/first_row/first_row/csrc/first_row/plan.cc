#include "first_row/plan.h"

#include <cstddef>

namespace flashsmith {
namespace {

// The operation's tensors, in its order.
constexpr size_t kV = 0, kO = 1;

Launch launch_of(size_t kernel, const FirstRowKernelConfig& config, const FirstRowArgs& args,
                 int64_t rows) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&args);
    Launch launch{
        .kernel = kernel,
        .grid = {static_cast<uint32_t>(rows), 1, 1},
        .cluster = {1, 1, 1},
        .block = {static_cast<uint32_t>(32 * config.n_warps), 1, 1},
        .smem_bytes = 0,
        .argument_bytes = {bytes, bytes + sizeof args},
        .addresses = {{offsetof(FirstRowArgs, v), in_tensor(kV)},
                      {offsetof(FirstRowArgs, o), in_tensor(kO)}},
        .tensor_maps = {},
    };
    if (config.staged) launch.addresses.push_back({offsetof(FirstRowArgs, sums), in_workspace(0)});
    return launch;
}

}  // namespace

Plan plan_first_row(const FirstRowKernelConfig& config, NumberReader& numbers, Tensors,
                    const DeviceSpec&, const Semantics&) {
    const int64_t batch = numbers.integer(), seq = numbers.integer(), heads = numbers.integer(),
                  d = numbers.integer();
    FirstRowArgs args{};
    args.heads = static_cast<int32_t>(heads);
    args.d = static_cast<int32_t>(d);
    args.v_batch_stride = numbers.integer();
    numbers.integer();  // from row to row: only the first is read
    args.v_head_stride = numbers.integer();
    args.o_batch_stride = numbers.integer();
    args.o_head_stride = numbers.integer();
    numbers.end();
    require(seq > 0, "seq_k: there is no first row; give at least one");
    require(d <= config.d_head, "d: above the config's d_head");
    const int64_t rows = batch * heads;
    Plan plan;
    plan.launches.push_back(launch_of(0, config, args, rows));
    if (config.staged) {
        plan.workspaces = {
            {"sums", static_cast<size_t>(rows * d) * sizeof(uint32_t), Contents::zeroed}};
        plan.launches.push_back(launch_of(1, config, args, rows));
    }
    return plan;
}

}  // namespace flashsmith
