// Stores a gradient from the accumulators of a warp to global memory.
#pragma once

#include "common/accumulators.cuh"
#include "common/ptx_functions.cuh"

namespace flashsmith {

// Transposes a 4x4 matrix that four neighbouring lanes hold: each lane passes a column and gets a
// row.
FS_DEVICE void transpose_4x4(uint32_t (&x)[4]) {
    const int odd = lane_index() % 2, high = lane_index() / 2 % 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? swapped : x[i];
        x[i + 1] = odd ? x[i + 1] : swapped;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t swapped = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
        x[i] = high ? swapped : x[i];
        x[i + 2] = high ? x[i + 2] : swapped;
    }
}

// `gradient` is the address of this warp's first row and column. Only the first `rows` rows and
// `columns` columns from there exist. Pairs of lanes exchange halves of two neighbouring 16x8
// tiles, so that four lanes write 32 bytes of a row, which is a whole sector. With kWide the four
// lanes transpose four tiles, and write 64 bytes of a row.
template <typename value_t, bool kWide = false, int kTiles>
FS_DEVICE void store_gradient(void* gradient, int64_t seq_stride, int rows, int columns,
                              bool is_fp32, const float (&acc)[1][kTiles][4], float scale) {
    const int lane = lane_index(), odd = lane % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const bool exists = row < rows;
        // 0 for tiles past the last one, whose columns do not exist.
        const auto packed = [&](int n) {
            return n < kTiles ? pack_16bit<value_t>(acc[0][n % kTiles][2 * r] * scale,
                                                    acc[0][n % kTiles][2 * r + 1] * scale)
                              : 0;
        };
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
        if constexpr (kWide) {
            uint16_t* const first =
                static_cast<uint16_t*>(gradient) + row * seq_stride + lane % 4 * 8;
#pragma unroll
            for (int n = 0; n < kTiles; n += 4) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = packed(n + i);
                transpose_4x4(x);
                if (exists && 8 * (n + lane % 4) < columns)
                    store_global_16B(first + 8 * n, uint4{x[0], x[1], x[2], x[3]});
            }
            continue;
        }
        uint16_t* const first =
            static_cast<uint16_t*>(gradient) + row * seq_stride + 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const uint32_t left = packed(n), right = packed(n + 1);
            const uint32_t swapped = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
            if (exists && 8 * (n + odd) < columns)
                store_global_8B(first + 8 * n, odd ? uint2{swapped, right} : uint2{left, swapped});
        }
    }
}

}  // namespace flashsmith
