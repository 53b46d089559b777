// Locations of tensor rows and of their statistics.
#pragma once

#include "backward/args.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// The address of row `row` of a tensor. `origin` and `seq_stride` count elements.
template <typename value_t>
FS_DEVICE const char* row_address(const void* tensor, int64_t origin, int64_t row,
                                  int64_t seq_stride) {
    return static_cast<const char*>(tensor) +
           (origin + row * seq_stride) * int64_t{sizeof(value_t)};
}

// Index of the statistics of a head and a sequence's first row.
template <Semantics SEMANTICS>
FS_DEVICE int64_t first_statistic(const BackwardKernelArgs& args, int batch, int head,
                                  int64_t first_row) {
    // Packed sequences begin at whole blocks, whatever their lengths.
    const int64_t begin = SEMANTICS.packed ? (first_row / kStatisticsRows + batch) * kStatisticsRows
                                           : batch * args.statistics_batch_stride;
    return begin + head * args.statistics_head_stride;
}

}  // namespace flashsmith
