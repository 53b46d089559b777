// The FlashAttention-2 backward pass on mma.sync: the kernels of a pass, in the order they run.
//
//     prepare                  statistics of the rows
//     gaps                     packed: zeros outside of sequences
//     lists                    with the mask of a program: which blocks each of the next two visits
//     backward                 dk, dv; with atomics what each block of keys adds to dq
//     queries or finish        dq: computed by blocks of queries, or rounded from its sums
//     sinks                    dsinks
#pragma once

#include "backward/list_kernels.cuh"
#include "backward/rows_kernels.cuh"
#include "mma_sync_backward/finish_kernel.cuh"
#include "mma_sync_backward/keys_kernel.cuh"
#include "mma_sync_backward/queries_kernel.cuh"
