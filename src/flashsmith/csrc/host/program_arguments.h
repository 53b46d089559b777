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

// Scores of such kernels are in natural units when they enter the softmax. `scale` turns a raw
// score, or the tanh of a softcap, into natural units.
void scale_for_program(ForwardKernelArgs& args, ProgramArgs& program, const Semantics& semantics,
                       float scale);

// The patches for the addresses of the tensors that a program reads. They are the call's last
// kMostReads tensors, from `first_tensor` on; `offset` is that of ProgramArgs in the arguments.
void add_program_addresses(std::vector<AddressPatch>& patches, size_t first_tensor, size_t offset);

}  // namespace flashsmith
