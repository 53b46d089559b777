// The arguments of struct Program of a library's semantics.cuh: the tensors and numbers that a
// caller's functions read. Plain C++20 without CUDA types, because the host compiler, the kernels
// and the tests all read this file.
#pragma once

#include <cstdint>

namespace flashsmith {

constexpr int kMostReads = 8, kMostReadDims = 4, kMostProgramNumbers = 16;

// A tensor that a program reads. Strides count elements. Dimensions beyond its rank have size 1.
struct ProgramRead {
    const void* address;
    int64_t strides[kMostReadDims];
    int32_t sizes[kMostReadDims];
};

// Kernels of programs take these after their other arguments.
struct ProgramArgs {
    ProgramRead reads[kMostReads];
    int32_t numbers[kMostProgramNumbers];  // int32 or fp32 values, as bits
    float scale;     // converts a score of Q K^T (with a softcap, its tanh) to natural units
    int32_t* lists;  // with a mask: the K/V blocks that tiles visit; see common/block_lists.cuh
};

// The ints before the entries of a list of blocks, and the threads of the kernels that write lists.
constexpr int kBlockListHeader = 8, kListThreads = 128;

}  // namespace flashsmith
