#include "mma_sync_backward/plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "common/constants.cuh"
#include "host/forward_problem.h"

namespace flashsmith {
namespace {

constexpr uint32_t kRowsThreads = 256;
constexpr int64_t kMaxLength = int64_t{1} << 30;

// The operation's tensors, in its order.
enum Tensor : size_t {
    d_o,
    q,
    k,
    v,
    o,
    lse,
    dq,
    dk,
    dv,
    dsinks,
    dlse,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    n_tensors
};

// The kernels of a config, in the order of the family's templates.
enum Kernel : size_t { keys, second, prepare, gaps, sinks_kernel };

int64_t blocks_of(int64_t rows, int64_t tile) {
    return (rows + tile - 1) / tile;
}

struct Problem {
    ForwardProblem forward;  // o's strides are those of o, the forward's output
    BackwardKernelArgs args;
};

void read_strides(NumberReader& numbers, int64_t& batch, int64_t& seq, int64_t& head) {
    batch = numbers.integer();
    seq = numbers.integer();
    head = numbers.integer();
}

Problem read_problem(NumberReader& numbers, Tensors tensors) {
    ForwardProblem p{};
    p.batch = numbers.integer();
    p.seq_q = numbers.integer();
    p.seq_k = numbers.integer();
    p.heads_q = numbers.integer();
    p.heads_k = numbers.integer();
    p.d = numbers.integer();
    p.total_q = numbers.integer();
    p.total_k = numbers.integer();
    p.packed = tensors[cu_seqlens_q] != 0 && tensors[cu_seqlens_k] != 0;
    BackwardKernelArgs args;
    std::memset(&args, 0, sizeof args);  // padding too: equal plans have equal bytes
    read_strides(numbers, args.do_batch_stride, args.do_seq_stride, args.do_head_stride);
    read_strides(numbers, args.q_batch_stride, args.q_seq_stride, args.q_head_stride);
    read_strides(numbers, args.k_batch_stride, args.k_seq_stride, args.k_head_stride);
    read_strides(numbers, args.v_batch_stride, args.v_seq_stride, args.v_head_stride);
    read_strides(numbers, args.o_batch_stride, args.o_seq_stride, args.o_head_stride);
    read_strides(numbers, args.dq_batch_stride, args.dq_seq_stride, args.dq_head_stride);
    read_strides(numbers, args.dk_batch_stride, args.dk_seq_stride, args.dk_head_stride);
    read_strides(numbers, args.dv_batch_stride, args.dv_seq_stride, args.dv_head_stride);
    args.lse_batch_stride = numbers.integer();
    args.lse_head_stride = numbers.integer();
    args.dlse_batch_stride = numbers.integer();
    args.dlse_head_stride = numbers.integer();
    p.scale = static_cast<float>(numbers.number());
    p.softcap = static_cast<float>(numbers.number());
    p.window_left = numbers.integer();
    p.window_right = numbers.integer();
    args.grads_fp32 = static_cast<int32_t>(numbers.integer());
    numbers.end();

    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.seq_k = static_cast<int32_t>(p.seq_k);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.total_k = static_cast<int32_t>(p.total_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.d = static_cast<int32_t>(p.d);
    args.window_left = static_cast<int32_t>(std::min(p.window_left, kMaxLength));
    args.window_right = static_cast<int32_t>(std::min(p.window_right, kMaxLength));
    args.scale = p.scale;
    args.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
    args.softcap_scale_2log2e = p.softcap > 0 ? 2 * kLog2E * (p.scale / p.softcap) : 0.0f;
    return {p, args};
}

// Rows that a head's statistics take, padded to whole blocks, and of how many heads and batches.
struct Statistics {
    int64_t rows_per_head, rows;
};

Statistics place_statistics(const ForwardProblem& p, BackwardKernelArgs& args) {
    // Between packed sequences up to a block each is left out.
    const int64_t blocks =
        p.packed ? p.total_q / kStatisticsRows + p.batch + 1 : blocks_of(p.seq_q, kStatisticsRows);
    const int64_t rows = blocks * kStatisticsRows;
    args.statistics_head_stride = rows;
    args.statistics_batch_stride = p.packed ? 0 : p.heads_q * rows;
    return {rows, (p.packed ? 1 : p.batch) * p.heads_q * rows};
}

std::vector<AddressPatch> addresses(bool adds_dq) {
    using Args = BackwardKernelArgs;
    std::vector<AddressPatch> patches = {
        {offsetof(Args, d_o), in_tensor(d_o)},
        {offsetof(Args, q), in_tensor(q)},
        {offsetof(Args, k), in_tensor(k)},
        {offsetof(Args, v), in_tensor(v)},
        {offsetof(Args, o), in_tensor(o)},
        {offsetof(Args, lse), in_tensor(lse)},
        {offsetof(Args, dq), in_tensor(dq)},
        {offsetof(Args, dk), in_tensor(dk)},
        {offsetof(Args, dv), in_tensor(dv)},
        {offsetof(Args, dsinks), in_tensor(dsinks)},
        {offsetof(Args, dlse), in_tensor(dlse)},
        {offsetof(Args, sinks), in_tensor(sinks)},
        {offsetof(Args, cu_seqlens_q), in_tensor(cu_seqlens_q)},
        {offsetof(Args, cu_seqlens_k), in_tensor(cu_seqlens_k)},
        {offsetof(Args, lse_log2), in_workspace(0)},
        {offsetof(Args, D), in_workspace(1)},
    };
    if (adds_dq) patches.push_back({offsetof(Args, dq_sums), in_workspace(2)});
    return patches;
}

}  // namespace

Plan plan_backward(const FlashBackwardKernelConfig& config, NumberReader& numbers, Tensors tensors,
                   const DeviceSpec& device, const Semantics& semantics) {
    auto [p, args] = read_problem(numbers, tensors);
    require(device.arch >= 80, "mma.sync kernels need compute capability 8.0 or newer");
    check_smem(config.smem_bytes(), device);
    check_problem(p, semantics, config.d_head, kStatisticsRows);
    if (!semantics.uneven)
        require(p.d == config.d_head && p.seq_q % std::max(config.B_r, config.dq_rows()) == 0 &&
                    p.seq_k % std::max(config.B_r, config.B_c) == 0 && p.seq_k > 0,
                "uneven: this library's kernels want whole tiles and d = d_head");
    const bool wants_dq = tensors[dq] != 0, wants_keys = tensors[dk] != 0 || tensors[dv] != 0;
    const bool wants_sinks = tensors[dsinks] != 0;
    require(!wants_sinks || tensors[sinks] != 0, "dsinks: asked for without sinks; give them");

    const bool adds_dq = config.dq == DqMode::atomics && wants_dq;
    const Statistics statistics = place_statistics(p, args);
    const size_t bytes = static_cast<size_t>(statistics.rows) * sizeof(float);
    Plan plan;
    plan.workspaces = {{"lse_log2", bytes, Contents::undefined}, {"D", bytes, Contents::undefined}};
    if (adds_dq)
        plan.workspaces.push_back(
            {"dq_sums", bytes * static_cast<size_t>(config.d_head), Contents::zeroed});

    const auto* argument = reinterpret_cast<const uint8_t*>(&args);
    const auto add = [&](Kernel kernel, int64_t blocks, uint32_t threads, int smem_bytes) {
        require(blocks <= INT_MAX, "batch x heads x blocks must stay within 2^31 - 1");
        plan.launches.push_back({
            .kernel = kernel,
            .grid = {static_cast<uint32_t>(blocks), 1, 1},
            .cluster = {1, 1, 1},
            .block = {threads, 1, 1},
            .smem_bytes = smem_bytes,
            .argument_bytes = {argument, argument + sizeof args},
            .addresses = addresses(adds_dq),
            .tensor_maps = {},
        });
    };
    const int64_t heads_q = p.batch * p.heads_q, heads_k = p.batch * p.heads_k;
    const uint32_t threads = static_cast<uint32_t>(config.n_warps * kWarpSize);
    add(prepare, heads_q * blocks_of(p.seq_q, kStatisticsRows), kRowsThreads, 0);
    if (p.packed)
        add(gaps, blocks_of(p.total_q + p.total_k, kRowsThreads / kWarpSize), kRowsThreads, 0);
    if (wants_keys || adds_dq)
        add(keys, heads_k * blocks_of(p.seq_k, config.B_c), threads, config.keys_smem_bytes());
    if (adds_dq)
        add(second, heads_q * blocks_of(p.seq_q, config.B_r), threads,
            config.B_r * config.d_head * config.element_bytes());
    else if (wants_dq)
        add(second, heads_q * blocks_of(p.seq_q, config.dq_rows()), threads,
            config.queries_smem_bytes());
    if (wants_sinks) add(sinks_kernel, p.heads_q, kRowsThreads, 0);

    // What the launches depend on.
    for (const Tensor tensor : {dq, dk, dv, dsinks})
        plan.presence.push_back(
            {tensor, tensors[tensor] != 0, "gradients: this launch was planned for others"});
    plan.presence.push_back(
        {sinks, tensors[sinks] != 0, "sinks: planned for a call of the other kind"});
    for (const Tensor tensor : {cu_seqlens_q, cu_seqlens_k})
        plan.presence.push_back(
            {tensor, semantics.packed, "packed: this library's kernels are for the other kind"});
    return plan;
}

}  // namespace flashsmith
