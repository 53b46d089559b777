// A forward pass as the host knows it, and as kernels take it: what the families of this operation
// share. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/forward_args.cuh"
#include "host/plan.h"

namespace flashsmith {

// The operation's tensors, in its order.
struct ForwardTensor {
    static constexpr size_t q = 0, k = 1, v = 2, o = 3, lse = 4, row_max = 5, sinks = 6,
                            cu_seqlens_q = 7, cu_seqlens_k = 8, seqused_k = 9, k_begin = 10;
};

// Of a (batch, seq, heads, d) tensor, or a packed (total, heads, d) one with batch stride 0. They
// count elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, seq, head;
};

// A window or a causal mask without a limit on a side has kUnlimited there.
struct ForwardProblem {
    int64_t batch, seq_q, seq_k;  // packed: how many sequences, and the longest
    int64_t heads_q, heads_k, d;
    int64_t total_q, total_k;  // packed: rows of all sequences together; else 0
    Strides q, k, v, o;
    float scale;    // multiplies q k^T
    float softcap;  // 0: none
    int64_t window_left, window_right;
    bool packed;  // offsets of sequences are given
};

ForwardProblem read_forward_problem(NumberReader& numbers, Tensors tensors);

// What every family needs: that the problem is one for kernels of these semantics and tiles of
// `B_r` rows, and the problem as kernels take it, addresses left out. Both throw
// std::invalid_argument.
void check_problem(const ForwardProblem& problem, const Semantics& semantics, int d_head, int B_r);
ForwardKernelArgs forward_arguments(const ForwardProblem& problem, int B_r, int B_c);

// A problem whose query heads of a group are rows of one tile (the knob pack_gqa), as tiles have
// it: K/V heads of so many rows. And the queries that a tile's rows are of, at least in part.
ForwardProblem in_rows(ForwardProblem problem, bool pack_gqa);
int tokens_of(int B_r, const ForwardProblem& problem, bool pack_gqa);

// Tiles of `tile` rows.
int32_t tiles_of(int64_t rows, int tile);

// How many of a call's tiles are computed in `parts` parts of their keys, where `at_once` are
// computed at the same time: those of a last round that leaves SMs idle, or, causal, all of them
// where the longest tile takes longer than an SM's share of the work. It follows from the lengths
// of the call, packed from the longest sequence's: never from those of single sequences.
int64_t tiles_to_split(const ForwardProblem& problem, const Semantics& semantics, int parts,
                       int B_r, int B_c, int64_t tiles, int64_t at_once);

// The arguments and the plan of a kernel that computes `split` of its tiles in parts, by their
// size: where it has such tiles, a workspace and a second launch, of the kernel that merges them.
void set_parts(ForwardKernelArgs& args, int64_t split, int parts, int B_r);
void add_merge(Plan& plan, size_t problem_offset, int64_t split, int parts, int B_r, int d_head);

// Where addresses belong in arguments that have the ForwardKernelArgs at `problem_offset`.
std::vector<AddressPatch> forward_addresses(const Semantics& semantics, size_t problem_offset = 0);

// That packed calls, and no others, are given where sequences begin; and partial ones which keys
// count, but neither sinks nor memory for maxima.
std::vector<Presence> forward_presence(const Semantics& semantics);

// That the device can hold a CTA with so much shared memory.
void check_smem(int64_t smem_bytes, const DeviceSpec& device);

}  // namespace flashsmith
