// A gradient from the accumulators of a warp to global memory.
#pragma once

#include "common/accumulators.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// `gradient` is where the warp's first row and column belong; of the rows and columns from there on
// only so many exist. Lanes in pairs swap halves of two neighbouring 16x8 tiles, so that four lanes
// write 32 bytes of a row, a whole sector.
template <typename value_t, int kTiles>
FS_DEVICE void store_gradient(void* gradient, int64_t seq_stride, int rows, int columns,
                              bool is_fp32, const float (&acc)[1][kTiles][4], float scale) {
    const int lane = lane_index(), odd = lane % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const bool exists = row < rows;
        if (is_fp32) {
            float* const first = static_cast<float*>(gradient) + row * seq_stride + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                if (exists && 8 * n < columns)
                    store_global_8B(first + 8 * n,
                                    uint2{__float_as_uint(acc[0][n][2 * r] * scale),
                                          __float_as_uint(acc[0][n][2 * r + 1] * scale)});
            continue;
        }
        uint16_t* const first =
            static_cast<uint16_t*>(gradient) + row * seq_stride + 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const auto packed = [&](int n) {
                return pack_16bit<value_t>(acc[0][n][2 * r] * scale, acc[0][n][2 * r + 1] * scale);
            };
            const uint32_t left = packed(n), right = packed(n + 1);
            const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
            if (exists && 8 * (n + odd) < columns)
                store_global_8B(first + 8 * n, odd ? uint2{swapped, right} : uint2{left, swapped});
        }
    }
}

}  // namespace flashsmith
