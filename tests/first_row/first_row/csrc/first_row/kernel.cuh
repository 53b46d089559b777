// One CTA copies the first row of v of one batch and head: to o, or, staged, to the workspace, from
// where a second launch takes it.
#pragma once

#include <cuda_runtime.h>

#include "first_row/config.cuh"

namespace flashsmith {

template <FirstRowKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticFirstRowConfig {
    static constexpr FirstRowKernelConfig CFG = CFG_;
    static constexpr int n_threads = 32 * CFG.n_warps;
    static_assert(n_threads <= CFG.d_head, "no_idle_threads: see `flashsmith explain`");
};

// Elements are moved as they are, 16 bits each.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads) first_row_kernel(const FirstRowArgs args) {
    const int batch = blockIdx.x / args.heads, head = blockIdx.x % args.heads;
    const auto* row = static_cast<const uint16_t*>(args.v) + batch * args.v_batch_stride +
                      head * args.v_head_stride;
    auto* o =
        static_cast<uint16_t*>(args.o) + batch * args.o_batch_stride + head * args.o_head_stride;
    for (int i = threadIdx.x; i < args.d; i += Kernel::n_threads) {
        if constexpr (Kernel::CFG.staged)
            args.sums[blockIdx.x * args.d + i] += row[i];
        else
            o[i] = row[i];
    }
}

// The second launch of staged kernels.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads) finish_row_kernel(const FirstRowArgs args) {
    const int batch = blockIdx.x / args.heads, head = blockIdx.x % args.heads;
    auto* o =
        static_cast<uint16_t*>(args.o) + batch * args.o_batch_stride + head * args.o_head_stride;
    for (int i = threadIdx.x; i < args.d; i += Kernel::n_threads)
        o[i] = static_cast<uint16_t>(args.sums[blockIdx.x * args.d + i]);
}

}  // namespace flashsmith
