// Attention over a cache of keys and values on mma.sync: the kernels of a call, in launch order.
//
//     append                   new keys and values, queries rotated by their positions
//     decode, or paged         states of rows over parts of a sequence's keys, or o
//     chunk, or paged_chunk    the same for sequences with many rows
//     warpgroups               o of sequences with even more rows, by wgmma
//     merge, or merge_rows     o from the states of sequences with several runs: one CTA per row,
//                              or CTAs that search for rows
#pragma once

#include "mma_sync_decode/append_kernel.cuh"
#include "mma_sync_decode/chunk_kernel.cuh"
#include "mma_sync_decode/merge_kernel.cuh"
#include "mma_sync_decode/part_kernel.cuh"
#include "mma_sync_decode/warpgroup_kernel.cuh"
