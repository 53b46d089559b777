// Hardware sizes and constants that kernels and the host share. Plain C++20 without CUDA types.
#pragma once

#include <cstdint>

namespace flashsmith {

// Threads of a CTA that merges the parts of split keys.
constexpr int kPartMergeThreads = 256;

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;

constexpr int kElementBytes = 2;  // of fp16 and bf16

constexpr int kWarpSize = 32;
constexpr int kWarpsPerWarpgroup = 4;
constexpr int kWarpgroupThreads = kWarpsPerWarpgroup * kWarpSize;
constexpr int kWarpRows = 16;  // rows of a wgmma result per warp
constexpr int kWarpgroupRows = kWarpsPerWarpgroup * kWarpRows;

// Columns of shared memory for a tile of `columns`: whole panels of 32. The last ones of tiles of
// 72 and 80 columns are filled with zeros.
constexpr int tile_columns(int columns) {
    return (columns + 31) / 32 * 32;
}

// CTAs that fit on an SM with `max_smem_bytes` of shared memory. `registers` is the compiler's
// count per thread; 0 ignores the register file.
constexpr int ctas_that_fit(int64_t smem_bytes, int threads, int max_smem_bytes, int registers) {
    constexpr int kReservedSmemPerCta = 1024, kRegistersPerSm = 65536;
    constexpr int kMaxThreadsPerSm = 2048, kMaxCtasPerSm = 32;
    const auto less = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const int64_t by_smem = max_smem_bytes / (smem_bytes + kReservedSmemPerCta);
    int64_t ctas = less(less(by_smem, kMaxThreadsPerSm / threads), kMaxCtasPerSm);
    // Registers are allocated in units of 8 per thread.
    if (registers > 0) ctas = less(ctas, kRegistersPerSm / ((registers + 7) / 8 * 8 * threads));
    return static_cast<int>(ctas);
}

}  // namespace flashsmith
