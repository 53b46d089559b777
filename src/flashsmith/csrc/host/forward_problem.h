// A forward pass on the host, and its conversion to kernel arguments: the code that the families of
// this operation share. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/forward_args.cuh"
#include "host/plan.h"

namespace flashsmith {

// The operation's tensors, in order.
struct ForwardTensor {
    static constexpr size_t q = 0, k = 1, v = 2, o = 3, lse = 4, row_max = 5, sinks = 6,
                            cu_seqlens_q = 7, cu_seqlens_k = 8, seqused_k = 9, k_begin = 10;
    static constexpr size_t first_read = 11;  // kernels of a program: the tensors that it reads
};

// Strides of a (batch, seq, heads, d) tensor, or of a packed (total, heads, d) one with batch
// stride 0. They count elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, seq, head;
};

// A forward pass. If a window or causal mask has no limit on a side, kUnlimited stands for it.
struct ForwardProblem {
    int64_t batch, seq_q, seq_k;  // packed: number of sequences, maximum lengths
    int64_t heads_q, heads_k, d;
    int64_t total_q, total_k;  // packed: total rows of all sequences; otherwise 0
    Strides q, k, v, o;
    float scale;    // multiplies q k^T
    float softcap;  // 0: none
    int64_t window_left, window_right;
    bool packed;  // sequence offsets are given
};

ForwardProblem read_forward_problem(NumberReader& numbers, Tensors tensors);

// check_problem() checks that kernels of these semantics, with tiles of `B_r` rows, can compute the
// problem. forward_arguments() returns it as kernel arguments without addresses. Both throw
// std::invalid_argument.
void check_problem(const ForwardProblem& problem, const Semantics& semantics, int d_head, int B_r);
ForwardKernelArgs forward_arguments(const ForwardProblem& problem, int B_r, int B_c);

// in_rows() returns the problem as tiles have it with the knob pack_gqa, where a group's query
// heads are rows of one tile: K/V heads with more rows. tokens_of() returns the number of queries
// to which a tile's rows belong, at least in part.
ForwardProblem in_rows(ForwardProblem problem, bool pack_gqa);
int tokens_of(int B_r, const ForwardProblem& problem, bool pack_gqa);

// The number of tiles of `tile` rows.
int32_t tiles_of(int64_t rows, int tile);

// The number of a call's tiles that are computed in `parts` parts of their keys, if `at_once` tiles
// run at a time. These are the tiles of a last round that leaves SMs idle. In a causal call all
// tiles are split if the longest one takes longer than an SM's share of the work. The result
// depends on the lengths of the call (packed: the longest sequence), never on those of single
// sequences.
int64_t tiles_to_split(const ForwardProblem& problem, const Semantics& semantics, int parts,
                       int B_r, int B_c, int64_t tiles, int64_t at_once);

// Set the arguments and the plan of a kernel that computes `split` of its tiles in parts. If there
// are such tiles, the plan gets a workspace and a second launch, of the kernel that merges the
// parts.
void set_parts(ForwardKernelArgs& args, int64_t split, int parts, int B_r);
void add_merge(Plan& plan, size_t problem_offset, int64_t split, int parts, int B_r, int d_head);

// The patches for the addresses in arguments that have the ForwardKernelArgs at `problem_offset`.
std::vector<AddressPatch> forward_addresses(const Semantics& semantics, size_t problem_offset = 0);

// The tensors that must be given or absent. Only packed calls have sequence offsets. Partial calls
// have neither sinks nor row_max, and other calls neither k_begin nor seqused_k.
std::vector<Presence> forward_presence(const Semantics& semantics);

// Checks that the device can hold a CTA with this much shared memory.
void check_smem(int64_t smem_bytes, const DeviceSpec& device);

}  // namespace flashsmith
