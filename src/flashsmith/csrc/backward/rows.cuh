// The addresses of the tensors' rows, and the indices of their statistics.
#pragma once

#include "backward/args.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// The call's widths: one for q and k, one for v and o.
template <class Kernel>
FS_DEVICE int d_of_qk(const BackwardKernelArgs& args) {
    return kPairWidth<Kernel> > 0 ? args.widths.qk : args.d;
}
template <class Kernel>
FS_DEVICE int d_of_v(const BackwardKernelArgs& args) {
    return kPairWidth<Kernel> > 0 ? args.widths.v : args.d;
}

// The address of the row `row` of a tensor. `origin` and `seq_stride` count elements.
template <typename value_t>
FS_DEVICE const char* row_address(const void* tensor, int64_t origin, int64_t row,
                                  int64_t seq_stride) {
    return static_cast<const char*>(tensor) +
           (origin + row * seq_stride) * int64_t{sizeof(value_t)};
}

// The index of the statistics of the first row of a sequence, for one head.
template <Semantics SEMANTICS>
FS_DEVICE int64_t first_statistic(const BackwardKernelArgs& args, int batch, int head,
                                  int64_t first_row) {
    // The statistics of a packed sequence begin with a whole block, whatever the lengths are.
    const int64_t begin = SEMANTICS.packed ? (first_row / kStatisticsRows + batch) * kStatisticsRows
                                           : batch * args.statistics_batch_stride;
    return begin + head * args.statistics_head_stride;
}

}  // namespace flashsmith
