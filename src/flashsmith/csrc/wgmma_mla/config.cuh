// The config of a kernel of the wgmma_mla family. Plain C++20 without CUDA types, because the host
// compiler and the kernels both read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "common/constants.cuh"
#include "mla/args.cuh"

namespace flashsmith {

constexpr int kMlaRows = 64;   // query rows of a CTA
constexpr int kMlaKeys = 64;   // keys of a block
constexpr int kMlaStages = 2;  // blocks in flight, one for each consumer warpgroup
constexpr int kMlaConsumers = 2;
constexpr int kMlaThreads = kWarpgroupThreads * (kMlaConsumers + 1);

// The fields, their order and their meaning match the Python class.
struct WgmmaMlaKernelConfig {
    DType dtype;
    int d_head;    // columns of q and of the cache
    int min_keys;  // the fewest keys in a part of a sequence
    int most_parts;
    int producer_registers;
    int consumer_registers;
    int rescale_threshold;
    int d_v;           // columns of v and o: the first ones of a row of the cache
    int run_keys;      // of the parts that a CTA computes one after another; 0: one part
    bool panel_waits;  // panels of a block are waited for one by one
    int panels_ahead;  // whose scores precede the product with the other's P; 0: see consumer.cuh
    bool evict_keys;   // the L2 evicts keys before the rows of parts

    constexpr auto operator<=>(const WgmmaMlaKernelConfig&) const = default;

    // Q, two blocks of keys, P, and a page for barriers, maxima and sums.
    constexpr int64_t tile_bytes() const {
        const int64_t rows = kMlaRows + kMlaStages * kMlaKeys;
        return (rows * d_head + int64_t{kMlaRows} * kMlaKeys) * kElementBytes;
    }
    static constexpr int kPage = 3072;
    constexpr int64_t smem_bytes() const { return tile_bytes() + kPage; }
};

}  // namespace flashsmith
