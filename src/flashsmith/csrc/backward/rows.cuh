// Where the rows of tensors and their statistics lie.
#pragma once

#include "backward/args.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// Row `row` of a tensor, and how far its rows are apart, bytes.
template <typename value_t>
FS_DEVICE const char* row_address(const void* tensor, int64_t origin, int64_t row,
                                  int64_t seq_stride) {
    return static_cast<const char*>(tensor) +
           (origin + row * seq_stride) * int64_t{sizeof(value_t)};
}

// The statistics of a sequence's first row and a head.
template <Semantics SEMANTICS>
FS_DEVICE int64_t first_statistic(const BackwardKernelArgs& args, int batch, int head,
                                  int64_t first_row) {
    // Whole blocks between packed sequences, whatever their lengths.
    const int64_t begin = SEMANTICS.packed ? (first_row / kStatisticsRows + batch) * kStatisticsRows
                                           : batch * args.statistics_batch_stride;
    return begin + head * args.statistics_head_stride;
}

}  // namespace flashsmith
