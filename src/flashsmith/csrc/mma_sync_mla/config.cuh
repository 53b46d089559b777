// The config of a kernel of the mma_sync_mla family. Plain C++20 without CUDA types, because the
// host compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "common/types.cuh"
#include "mla/args.cuh"

namespace flashsmith {

constexpr int kMmaSyncMlaRows = 16;  // query rows of a CTA
constexpr int kMmaSyncMlaWarps = 4;  // each has a quarter of the columns of o
constexpr int kMmaSyncMlaThreads = kMmaSyncMlaWarps * kWarpSize;

// The fields, their order and their meaning match the Python class.
struct MmaSyncMlaKernelConfig {
    DType dtype;
    int d_head;    // columns of q and of the cache
    int B_c;       // keys of a block
    int stages;    // blocks in shared memory
    int min_keys;  // the fewest keys in a part of a sequence
    int most_parts;
    bool lazy_rescale;
    int d_v;  // columns of v and o: the first ones of a row of the cache
    CacheFormat cache;

    constexpr auto operator<=>(const MmaSyncMlaKernelConfig&) const = default;

    constexpr bool has_scale() const { return cache != CacheFormat::plain; }
    constexpr int cache_element_bytes() const { return is_8bit(cache) ? 1 : kElementBytes; }
    constexpr int64_t block_bytes() const { return int64_t{B_c} * d_head * cache_element_bytes(); }
    // The blocks, and the warps' shares of the scores in fp32, of which each score has two.
    constexpr int64_t smem_bytes() const {
        return stages * block_bytes() + int64_t{2} * kMmaSyncMlaRows * B_c * sizeof(float);
    }
};

}  // namespace flashsmith
