// The config of a kernel of the wgmma_mla family, and the kernels' arguments. Plain C++20 without
// CUDA types, because the host compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/types.cuh"

namespace flashsmith {

constexpr int kMlaRows = 64;   // query rows of a CTA
constexpr int kMlaKeys = 64;   // keys of a block
constexpr int kMlaStages = 2;  // blocks in flight, one for each consumer warpgroup
constexpr int kMlaConsumers = 2;
constexpr int kMlaThreads = kWarpgroupThreads * (kMlaConsumers + 1);
constexpr int kMlaMergeThreads = 256;
constexpr int kMlaAppendThreads = 256;

// The fields, their order and their meaning are those of the Python class.
struct WgmmaMlaKernelConfig {
    DType dtype;
    int d_head;    // columns of q and of the cache
    int min_keys;  // of a part of a sequence
    int most_parts;
    int producer_registers;
    int consumer_registers;
    int rescale_threshold;
    int d_v;  // columns of v and o: the first ones of a row of the cache

    constexpr auto operator<=>(const WgmmaMlaKernelConfig&) const = default;

    // Q, two blocks of keys, P, and a page for barriers, maxima and sums.
    constexpr int64_t tile_bytes() const {
        const int64_t rows = kMlaRows + kMlaStages * kMlaKeys;
        return (rows * d_head + int64_t{kMlaRows} * kMlaKeys) * kElementBytes;
    }
    static constexpr int kPage = 3072;
    constexpr int64_t smem_bytes() const { return tile_bytes() + kPage; }
};

// Strides in elements; the last dimension is contiguous.
struct MlaStrides {
    int64_t batch, row, head;
};

struct MlaKernelArgs {
    TensorMap cache;  // as rows of one long sequence
    const void* q;
    void* o;
    float* lse;                   // may be null
    const int32_t* cache_lens;    // before the call appends
    const int32_t* page_table;    // null: a sequence's keys are in its own block
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
    int32_t heads;          // of q; the cache has one
    int32_t capacity;       // keys per sequence
    int32_t blocks, slots;  // of the cache; a sequence or a page, and its keys
    int32_t map_rows;       // rows of the map from one block of the cache to the next
    int32_t box_keys;       // keys of one copy, all in one block of the cache
    int32_t tiles;          // per sequence
    int32_t most_parts;     // of a tile; 1: nothing is split
    int32_t window_left, window_right;
    float scale_log2;  // scale * log2(e)
};

using mla_kernel_fn = void (*)(const MlaKernelArgs);

}  // namespace flashsmith
