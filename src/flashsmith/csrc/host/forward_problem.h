// A forward pass as the host knows it, and as kernels take it: what the families of this operation
// share. Plain C++20 without CUDA headers.
#pragma once

#include <cstdint>
#include <string>

#include "common/forward_args.cuh"
#include "host/tensor_maps.h"

namespace flashsmith {

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
    Addresses at;
    float scale;    // multiplies q k^T
    float softcap;  // 0: none
    int64_t window_left, window_right;
};

// What every family needs: that the problem is one for kernels of these semantics and tiles of
// `B_r` rows, and the problem as kernels take it. Both throw std::invalid_argument.
void require(bool condition, const std::string& message);
void check_problem(const ForwardProblem& problem, const Semantics& semantics, int d_head, int B_r);
ForwardKernelArgs forward_arguments(const ForwardProblem& problem, int B_r, int B_c);

// The same arguments for tensors elsewhere.
void point_at(ForwardKernelArgs& args, const Addresses& at);

// That offsets of packed sequences are given to kernels that take them, and to no others.
void check_kind(const Addresses& at, const Semantics& semantics);

}  // namespace flashsmith
