// Attention over a cache of keys and values on mma.sync: the kernels of a call, in the order they
// run.
//
//     append                   new keys and values, queries turned by their positions
//     decode, or paged         states of rows over parts of a sequence's keys, or o
//     chunk, or paged_chunk    the same of sequences with many rows
//     merge, or merge_rows     o from the states, of sequences with several runs: a CTA for each
//                              row, or CTAs that look for them
#pragma once

#include "mma_sync_decode/append_kernel.cuh"
#include "mma_sync_decode/chunk_kernel.cuh"
#include "mma_sync_decode/merge_kernel.cuh"
#include "mma_sync_decode/part_kernel.cuh"
