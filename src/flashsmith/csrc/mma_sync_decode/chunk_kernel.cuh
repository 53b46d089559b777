// Kernels for sequences with many rows, such as chunks of a prompt. A warp has 16 rows of the tile
// over all keys of the part and writes them from its registers (own_rows.cuh).
//
// Another kernel handles the other sequences of the call. Which kernel handles a sequence depends
// only on its own queries, so its bits do not depend on the rest of the batch.
#pragma once

#include "mma_sync_decode/part_kernel.cuh"

namespace flashsmith {

template <class Kernel>
__global__ void __launch_bounds__(ChunkKernelConfig<Kernel>::n_threads, 1)
    decode_chunk_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<ChunkKernelConfig<Kernel>, false>(args, shared_address(shared_memory));
}

template <class Kernel>
__global__ void __launch_bounds__(ChunkKernelConfig<Kernel>::n_threads, 1)
    decode_paged_chunk_kernel(const typename Kernel::Args args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<ChunkKernelConfig<Kernel>, true>(args, shared_address(shared_memory));
}

}  // namespace flashsmith
