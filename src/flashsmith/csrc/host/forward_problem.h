// A forward pass on the host, and its kernel arguments: code that all families of this operation
// use. Plain C++20 without CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/forward_args.cuh"
#include "host/plan.h"

namespace flashsmith {

// The tensors of the operation, in order.
struct ForwardTensor {
    static constexpr size_t q = 0, k = 1, v = 2, o = 3, lse = 4, row_max = 5, sinks = 6,
                            cu_seqlens_q = 7, cu_seqlens_k = 8, seqused_k = 9, k_begin = 10;
    static constexpr size_t first_read = 11;  // with a program: the first tensor that it reads
};

// The strides of a tensor (batch, seq, heads, d), or of a packed tensor (total, heads, d), whose
// batch stride is 0. They count elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, seq, head;
};

// A forward pass. kUnlimited stands for a side on which a window or causal mask has no limit.
struct ForwardProblem {
    int64_t batch, seq_q, seq_k;       // packed: number of sequences, maximum lengths
    int64_t heads_q, heads_k, d, d_v;  // d of q and k; d_v of v and o, or 0 if it equals d
    int64_t total_q, total_k;          // packed: the rows of all sequences; otherwise 0
    Strides q, k, v, o;
    float scale;    // multiplies q k^T
    float softcap;  // 0: none
    int64_t window_left, window_right;
    bool packed;  // whether sequence offsets are given
};

ForwardProblem read_forward_problem(NumberReader& numbers, Tensors tensors);

// check_problem() checks that kernels with these semantics and tiles of `B_r` rows can compute the
// problem; `d_v` is the config's, or 0 if v must be as wide as q and k. forward_arguments()
// makes its kernel arguments, without addresses. Both throw std::invalid_argument.
void check_problem(const ForwardProblem& problem, const Semantics& semantics, int d_head, int B_r,
                   int d_v = 0);
ForwardKernelArgs forward_arguments(const ForwardProblem& problem, int B_r, int B_c);

// in_rows() returns the problem in terms of rows of tiles: with the knob pack_gqa, the query heads
// of a group are rows of one tile, so there are fewer heads with more rows. tokens_of() returns how
// many queries have at least one row in a tile.
ForwardProblem in_rows(ForwardProblem problem, bool pack_gqa);
int tokens_of(int B_r, const ForwardProblem& problem, bool pack_gqa);

// How many tiles of `tile` rows there are.
int32_t tiles_of(int64_t rows, int tile);

// The number of a call's tiles whose keys are split into `parts` parts, if `at_once` tiles run at
// the same time. These are the tiles of the last round, if it would leave SMs idle. In a causal
// call, all tiles are split if the longest one takes longer than an SM's share of the work. The
// result depends on the lengths of the call (if packed, on the longest sequence), never on the
// lengths of single sequences.
int64_t tiles_to_split(const ForwardProblem& problem, const Semantics& semantics, int parts,
                       int B_r, int B_c, int64_t tiles, int64_t at_once);

// Sets the arguments and the plan for a kernel that computes `split` of its tiles in parts. If
// `split` is not 0, the plan gets a workspace and a second launch, which merges the parts.
void set_parts(ForwardKernelArgs& args, int64_t split, int parts, int B_r);
void add_merge(Plan& plan, size_t problem_offset, int64_t split, int parts, int B_r, int d_v);

// Where addresses must be written in kernel arguments that contain ForwardKernelArgs at the offset
// `problem_offset`.
std::vector<AddressPatch> forward_addresses(const Semantics& semantics, size_t problem_offset = 0);

// Which tensors must be given, and which must not. Only packed calls have sequence offsets. Partial
// calls have no sinks and no row_max; other calls have no k_begin and no seqused_k.
std::vector<Presence> forward_presence(const Semantics& semantics);

// Checks that a CTA with this much shared memory fits on the device.
void check_smem(int64_t smem_bytes, const DeviceSpec& device);

}  // namespace flashsmith
