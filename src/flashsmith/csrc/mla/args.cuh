// The arguments of kernels of attention over a latent cache. Plain C++20 without CUDA types,
// because the host compiler and the kernels both read this file.
#pragma once

#include <cstdint>

#include "common/program_args.cuh"
#include "common/types.cuh"

namespace flashsmith {

constexpr int kMlaMergeThreads = 256;
constexpr int kMlaAppendThreads = 256;

// Strides in elements; the last dimension is contiguous.
struct MlaStrides {
    int64_t batch, row, head;
};

struct MlaKernelArgs {
    TensorMap cache;  // the cache as one long sequence; only for kernels that use TMA
    const void* q;
    void* o;
    float* lse;                   // may be null
    const int32_t* cache_lens;    // number of keys before the call appends
    const int32_t* page_table;    // null if the cache is dense, with one block per sequence
    const int32_t* cu_seqlens_q;  // null unless packed
    const float* sinks;           // (heads): may be null
    const void* new_rows;         // null: nothing is appended
    void* cache_rows;
    float* parts;  // fp32 outputs of the parts' rows, then their log-sum-exps
    MlaStrides q_strides, o_strides, new_strides, cache_strides;
    int64_t lse_batch_stride, lse_head_stride, page_table_stride;
    int64_t part_rows;      // of all parts
    int32_t batch, seq_q;   // packed: the longest sequence
    int32_t total_q;        // packed
    int32_t heads;          // heads of q; the cache has a single head
    int32_t capacity;       // keys per sequence
    int32_t blocks, slots;  // of the cache: how many sequences or pages, and keys in each
    int32_t map_rows;       // TMA: rows of the map from one block of the cache to the next
    int32_t box_keys;       // TMA: keys of one copy, all in one block of the cache
    int32_t tiles;          // per sequence
    int32_t most_parts;     // most parts of a tile; 1: tiles are not split
    int32_t window_left, window_right;
    float scale_log2;  // scale * log2(e)
    // For kernels whose CTAs compute several parts: how many CTAs a tile has at least, if it has as
    // many parts.
    int32_t least_runs;
};

// The arguments of kernels whose cache has a scale. It multiplies a row as a key and as a value.
struct RowScale {
    const float* on_device;  // may be null
    float value;             // the scale if `on_device` is null
};
struct MlaScaledArgs : MlaKernelArgs {
    RowScale row_scale;
};

// The arguments of kernels that run a caller's program. The kernels that append and merge do not
// read it.
struct MlaProgramArgs : MlaKernelArgs {
    ProgramArgs program;
};
struct MlaScaledProgramArgs : MlaScaledArgs {
    ProgramArgs program;
};

using mla_kernel_fn = void (*)(const MlaKernelArgs);

}  // namespace flashsmith
