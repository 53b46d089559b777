// Code that the GEMM kernels share: copying tiles, and storing gradients.
#pragma once

#include "backward/rows.cuh"
#include "mma_sync_backward/static_kernel_configuration.cuh"

namespace flashsmith {

// The layout of the sums of dq: the tiles of the warps' accumulators are stored one after another.
// From sm_90 on, one instruction adds all four elements of a lane. They are adjacent, and a warp
// adds 512 contiguous bytes at once. Before sm_90, the first elements of all lanes are followed by
// the second ones, and so on: 128 contiguous bytes at once.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kAddsVectors = true;
#else
constexpr bool kAddsVectors = false;
#endif
constexpr int kTileSums = 4 * kWarpSize;
constexpr int kLaneSums = kAddsVectors ? 4 : 1;  // distance between first sums of neighbouring
                                                 // lanes

FS_DEVICE void add_tile(float* sums, const float (&tile)[4]) {
    if constexpr (kAddsVectors) {
        add_global(sums, float4{tile[0], tile[1], tile[2], tile[3]});
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) add_global(sums + e * kWarpSize, tile[e]);
    }
}

FS_DEVICE void load_tile(float (&tile)[4], const float* sums) {
    if constexpr (kAddsVectors) {
        const uint4 x = load_global_16B(sums);
        tile[0] = __uint_as_float(x.x), tile[1] = __uint_as_float(x.y);
        tile[2] = __uint_as_float(x.z), tile[3] = __uint_as_float(x.w);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[e] = sums[e * kWarpSize];
    }
}

// The address of the first sums of a lane for a block of queries. `statistic` is the index of the
// first row of the block.
template <class Kernel>
FS_DEVICE float* first_dq_sums(const BackwardKernelArgs& args, int64_t statistic, int warp,
                               int lane) {
    return args.dq_sums + statistic * Kernel::dq_sum_columns +
           warp * Kernel::dq_elements * kWarpSize + lane * kLaneSums;
}

// Multiplies a warp's part of a gradient by the scale and stores it. 16-bit elements go to shared
// memory, where `tile` collects the whole tile; fp32 elements go to global memory. In tile (m, n),
// lane l has the columns 2 (l % 4) + {0, 1} of the rows l / 4 and l / 4 + 8. If warps share rows,
// their columns alternate.
template <class Layout, typename value_t, int kTurns, int kMTiles, int kNTiles>
FS_DEVICE void stage_gradient(uint32_t tile, const float (&acc)[kMTiles][kNTiles][4], float scale,
                              int first_row, int turn, int lane) {
    const typename Layout::Cursor cursor(tile, first_row + lane / 4, 2 * turn, lane % 4 * 4);
    const typename Layout::Cursor single(tile, first_row + lane / 4, turn, lane % 4 * 4);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_shared_4B(
                    (is_single_tile<kNTiles>(n) ? single : cursor)
                        .at(16 * m + 8 * r, tile_step<kTurns>(n)),
                    pack_16bit<value_t>(acc[m][n][2 * r] * scale, acc[m][n][2 * r + 1] * scale));
}

template <int kTurns, int kMTiles, int kNTiles>
FS_DEVICE void store_fp32_gradient(float* gradient, int64_t seq_stride, int rows, int d,
                                   const float (&acc)[kMTiles][kNTiles][4], float scale,
                                   int first_row, int turn, int lane) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row + 16 * m + 8 * r + lane / 4;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
                const int first_tile = is_single_tile<kNTiles>(n) ? turn : 2 * turn;
                const int column = 8 * (tile_step<kTurns>(n) + first_tile) + lane % 4 * 2;
                if (column >= d) continue;
                const uint2 pair = {__float_as_uint(acc[m][n][2 * r] * scale),
                                    __float_as_uint(acc[m][n][2 * r + 1] * scale)};
                store_global_8B(gradient + row * seq_stride + column, pair);
            }
        }
}

}  // namespace flashsmith
