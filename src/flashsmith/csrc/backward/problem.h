// A backward pass on the host: code that all families of this operation use. Plain C++20 without
// CUDA headers.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "backward/args.cuh"
#include "common/constants.cuh"
#include "common/program_args.cuh"
#include "host/forward_problem.h"
#include "host/program_arguments.h"

namespace flashsmith {

// The tensors of the operation, in order.
enum BackwardTensor : size_t {
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
    first_read,  // with a program: the first tensor that it reads
};

inline int64_t blocks_of(int64_t rows, int64_t tile) {
    return (rows + tile - 1) / tile;
}

// The problem, and its kernel arguments without the addresses of tensors and workspaces.
struct BackwardProblem {
    ForwardProblem forward;  // its strides of o are those of the forward pass's output
    BackwardKernelArgs args;
    ProgramArgs program;  // used only in libraries with a program
};

inline void read_strides(NumberReader& numbers, int64_t& batch, int64_t& seq, int64_t& head) {
    batch = numbers.integer();
    seq = numbers.integer();
    head = numbers.integer();
}

// `read_more` reads the numbers between the window and the program.
template <class ReadMore>
BackwardProblem read_backward_problem(NumberReader& numbers, bool packed,
                                      const Semantics& semantics, const ReadMore& read_more) {
    ForwardProblem p{};
    p.batch = numbers.integer();
    p.seq_q = numbers.integer();
    p.seq_k = numbers.integer();
    p.heads_q = numbers.integer();
    p.heads_k = numbers.integer();
    p.d = numbers.integer();
    p.d_v = numbers.integer();
    p.total_q = numbers.integer();
    p.total_k = numbers.integer();
    p.packed = packed;
    BackwardKernelArgs args;
    std::memset(&args, 0, sizeof args);  // zeroes padding too: equal plans have equal bytes
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
    read_more(args);
    ProgramArgs program;
    std::memset(&program, 0, sizeof program);
    if (semantics.has_program()) program = read_program(numbers);
    numbers.end();

    args.batch = static_cast<int32_t>(p.batch);
    args.seq_q = static_cast<int32_t>(p.seq_q);
    args.seq_k = static_cast<int32_t>(p.seq_k);
    args.total_q = static_cast<int32_t>(p.total_q);
    args.total_k = static_cast<int32_t>(p.total_k);
    args.heads_q = static_cast<int32_t>(p.heads_q);
    args.heads_k = static_cast<int32_t>(p.heads_k);
    args.d = static_cast<int32_t>(p.d);
    args.window_left = static_cast<int32_t>(std::min(p.window_left, int64_t{kUnlimited}));
    args.window_right = static_cast<int32_t>(std::min(p.window_right, int64_t{kUnlimited}));
    args.scale = p.scale;
    args.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
    args.score_argument = p.softcap > 0 ? 2 * kLog2E * (p.scale / p.softcap) : 0.0f;
    if (semantics.program_scores) {
        program.scale = p.softcap > 0 ? p.softcap : p.scale;
        args.scale_log2 = kLog2E;
    }
    return {p, args, program};
}

inline BackwardProblem read_backward_problem(NumberReader& numbers, Tensors tensors,
                                             const Semantics& semantics) {
    const bool packed = tensors[cu_seqlens_q] != 0 && tensors[cu_seqlens_k] != 0;
    return read_backward_problem(numbers, packed, semantics, [&](BackwardKernelArgs& args) {
        args.grads_fp32 = static_cast<int32_t>(numbers.integer());
    });
}

// The rows of statistics per head, padded to whole blocks, and in total over heads and batches.
struct Statistics {
    int64_t rows_per_head, rows;
};

inline Statistics place_statistics(const ForwardProblem& p, BackwardKernelArgs& args) {
    // In packed calls up to a block per sequence is unused: first_statistic() puts the first rows
    // of the last sequence at most total_q / kStatisticsRows + batch - 1 blocks after the
    // beginning.
    const int64_t blocks =
        p.packed ? p.total_q / kStatisticsRows + p.batch : blocks_of(p.seq_q, kStatisticsRows);
    const int64_t rows = blocks * kStatisticsRows;
    args.statistics_head_stride = rows;
    args.statistics_batch_stride = p.packed ? 0 : p.heads_q * rows;
    return {rows, (p.packed ? 1 : p.batch) * p.heads_q * rows};
}

// With `adds_dq`, there is a third workspace for the sums of dq.
inline std::vector<AddressPatch> backward_addresses(bool adds_dq) {
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

// The offset of a program's arguments. offsetof() is not defined for a derived struct.
constexpr size_t kAfterProblem = sizeof(BackwardKernelArgs);
static_assert(sizeof(BackwardProgramArgs) == kAfterProblem + sizeof(ProgramArgs));

// Passes the program to the launch of backward_prepare_kernel, if this kernel takes it.
inline void pass_program_to_prepare(Launch& launch, const ProgramArgs& program,
                                    const Semantics& semantics) {
    if (!prepare_takes_program(semantics)) return;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&program);
    launch.argument_bytes.insert(launch.argument_bytes.end(), bytes, bytes + sizeof program);
    add_program_addresses(launch.addresses, first_read, kAfterProblem);
}

// A kernel that writes lists of blocks, and how many warps it needs.
struct ListKernel {
    size_t kernel;
    int64_t warps;
};

// Adds the launches that write lists of blocks before the launch that visits these blocks, which
// must be the plan's last launch so far. Also adds the lists' workspace of `ints` int32. `offset`
// is the offset of ProgramArgs in the arguments of the visiting launch. The kernels take
// BackwardProgramArgs.
inline void add_lists(Plan& plan, const BackwardKernelArgs& args, const ProgramArgs& program,
                      std::initializer_list<ListKernel> kernels, int64_t ints, size_t offset) {
    Launch main = std::move(plan.launches.back());
    plan.launches.pop_back();
    const Place lists = in_workspace(plan.workspaces.size());
    plan.workspaces.push_back(
        {"block_lists", static_cast<size_t>(ints) * sizeof(int32_t), Contents::undefined});
    main.addresses.push_back({offset + offsetof(ProgramArgs, lists), lists});
    BackwardProgramArgs all;
    std::memset(&all, 0, sizeof all);  // zeroes padding too: equal plans have equal bytes
    static_cast<BackwardKernelArgs&>(all) = args;
    all.program = program;
    const auto* argument = reinterpret_cast<const uint8_t*>(&all);
    for (const auto [kernel, warps] : kernels) {
        const int64_t ctas = main.is_empty() ? 0 : blocks_of(warps, kListThreads / kWarpSize);
        require(ctas <= INT_MAX, "program: it needs too many lists of blocks; split the batch");
        plan.launches.push_back({
            .kernel = kernel,
            .grid = {static_cast<uint32_t>(ctas), 1, 1},
            .cluster = {1, 1, 1},
            .block = {kListThreads, 1, 1},
            .smem_bytes = 0,
            .argument_bytes = {argument, argument + sizeof all},
            .addresses = backward_addresses(false),
            .tensor_maps = {},
        });
        std::vector<AddressPatch>& addresses = plan.launches.back().addresses;
        add_program_addresses(addresses, first_read, kAfterProblem);
        addresses.push_back({kAfterProblem + offsetof(ProgramArgs, lists), lists});
    }
    plan.launches.push_back(std::move(main));
}

// Checks that a call passes the same optional tensors (gradients, sinks and sequence offsets) as
// the call that was planned.
inline std::vector<Presence> backward_presence(Tensors tensors, const Semantics& semantics) {
    std::vector<Presence> presence;
    for (const BackwardTensor tensor : {dq, dk, dv, dsinks})
        presence.push_back({tensor, tensors[tensor] != 0,
                            "gradients: this launch was planned for different ones"});
    presence.push_back(
        {sinks, tensors[sinks] != 0,
         "sinks: this launch was planned with sinks and called without, or the reverse"});
    for (const BackwardTensor tensor : {cu_seqlens_q, cu_seqlens_k})
        presence.push_back({tensor, semantics.packed,
                            "packed: the call and this library's kernels must both use packed "
                            "sequences, or neither"});
    return presence;
}

}  // namespace flashsmith
