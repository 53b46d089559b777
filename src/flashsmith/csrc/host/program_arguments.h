// The arguments of a library's struct Program, from the numbers and tensors of a call. Plain C++20
// without CUDA headers.
#pragma once

#include <cstddef>
#include <vector>

#include "common/forward_args.cuh"
#include "common/program_args.cuh"
#include "host/plan.h"

namespace flashsmith {

// Reads the numbers that follow the operation's own in a call with a program: the count of tensors
// and the sizes and strides of each, then the count of numbers and each of them.
ProgramArgs read_program(NumberReader& numbers);

// For kernels with a program, whose scores are in natural units when they enter the softmax.
// `scale` turns a raw score, or the tanh of a softcap, into natural units.
void scale_for_program(ForwardKernelArgs& args, ProgramArgs& program, const Semantics& semantics,
                       float scale);

// The patches for the addresses of the tensors that a program reads. They are the call's last
// kMostReads tensors, from `first_tensor` on; `offset` is the offset of ProgramArgs in the
// arguments.
void add_program_addresses(std::vector<AddressPatch>& patches, size_t first_tensor, size_t offset);

// The number of a call's lists of blocks: one for each tile of a head, times the sequences and
// heads between which the mask distinguishes.
int64_t number_of_lists(const Semantics& semantics, int64_t batch, int64_t heads_q,
                        int64_t tiles_per_head);

// Adds the two launches that write lists of at most `n_blocks` blocks, before the main one, and the
// lists' workspace. The kernels are `first_kernel` and the next one. `offset` is the offset of
// ProgramArgs in the main launch's arguments, which all three take.
void add_lists(Plan& plan, size_t first_kernel, int64_t lists, int64_t n_blocks, size_t offset);

}  // namespace flashsmith
