// Operands of MMAs from keys and values that are stored as 8-bit floats, one byte each.
//
// Every code is exact in fp16 and in bf16, so a product is bitwise the same as with a 16-bit cache.
// Keys are read pair by pair, because ldmatrix would give a lane four neighbouring elements, which
// belong to two lanes. Values are read with ldmatrix, which transposes pairs of columns: of every
// 16 columns, one tile of the product gets the even ones and the other tile the odd ones.
// restore_columns() restores the order.
#pragma once

#include "common/accumulators.cuh"
#include "common/layout.cuh"
#include "common/types.cuh"
#include "common/warp_mma.cuh"

namespace flashsmith {

FS_DEVICE uint32_t load_shared_2B(uint32_t smem) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(smem) : "memory");
    return x;
}

// ---- codes in 16 bits ---------------------------------------------------------------------------

FS_DEVICE float2 floats_of_halves(uint32_t halves) {
    float2 x;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(halves));
    return x;
}

// Converts two e4m3 codes before sm_89, which has an instruction for this. fp16 has one more
// exponent bit and a different bias. A NaN, which has the largest exponent and fraction, would be
// 480.
FS_DEVICE float2 floats_of_e4m3(uint32_t two_codes) {
    const uint32_t x = __byte_perm(two_codes, 0, 0x1404);
    const float2 y = floats_of_halves((x & 0x80008000u) | (x & 0x7f007f00u) >> 1);
    const auto scaled = [](float half) {
        constexpr float kLargest = 448.0f, kOfBias = 256.0f;
        const float value = half * kOfBias;
        return fabsf(value) > kLargest ? NAN : value;
    };
    return {scaled(y.x), scaled(y.y)};
}

// The codes in the low half, as 16-bit floats.
template <typename value_t, CacheFormat kFormat>
FS_DEVICE uint32_t widen_two(uint32_t two_codes) {
    uint32_t halves;
    if constexpr (kFormat == CacheFormat::e5m2) {
        halves = __byte_perm(two_codes, 0, 0x1404);  // an e5m2 code is the upper byte of an fp16
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two_codes)));
#else
        const float2 x = floats_of_e4m3(two_codes);
        return pack_16bit<value_t>(x.x, x.y);
#endif
    }
    if constexpr (std::is_same_v<value_t, __half>) return halves;
    const float2 x = floats_of_halves(halves);
    return pack_16bit<value_t>(x.x, x.y);
}

// ---- operands -----------------------------------------------------------------------------------

// Like RowsB: n along the rows and k along the columns, from `first_row` and `first_chunk` on.
template <class Layout, typename value_t, CacheFormat kFormat>
struct CodeRowsB {
    typename Layout::Cursor cursor;

    FS_DEVICE CodeRowsB(uint32_t tile, int lane, int first_row = 0, int first_chunk = 0)
        : cursor(tile, first_row + lane / 4, first_chunk, lane % 4 * 2) {}

    FS_DEVICE void load(uint32_t (&two_tiles)[4], int step, int pair) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t address = cursor.at(16 * pair + i / 2 * 8, step) + i % 2 * 8;
            two_tiles[i] = widen_two<value_t, kFormat>(load_shared_2B(address));
        }
    }
};

// Like ColumnsB: k along the rows. The first tile has the even ones of 16 columns.
template <class Layout, int kTurns, typename value_t, CacheFormat kFormat>
struct CodeColumnsB {
    typename Layout::Cursor cursor;

    FS_DEVICE CodeColumnsB(uint32_t tile, int lane, int turn = 0) : cursor(tile, lane % 16, turn) {}

    FS_DEVICE void load(uint32_t (&two_tiles)[4], int step, int pair) const {
        uint32_t of_keys[2];
        ldmatrix_x2_transposed(of_keys, cursor.at(16 * step, kTurns * pair));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t even_odd = __byte_perm(of_keys[i], 0, 0x3120);
            two_tiles[i] = widen_two<value_t, kFormat>(even_odd);
            two_tiles[2 + i] = widen_two<value_t, kFormat>(even_odd >> 16);
        }
    }
};

// Gives each lane its columns of products with ColumnsB. Of 16 columns, lane t of a quad
// has 4 t to 4 t + 3; it gets 2 t, 2 t + 1 and those eight further on. Bit 1 of a column, which
// selects an element of a tile, is swapped with bit 2, the lane's lower bit, and then with bit 3.
template <int kMTiles, int kNTiles>
FS_DEVICE void restore_columns(float (&o)[kMTiles][kNTiles][4], int lane) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float columns[2][2];  // the even and the odd columns
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    float low = o[m][n + odd][2 * r], high = o[m][n + odd][2 * r + 1];
#pragma unroll
                    for (int bit = 1; bit <= 2; bit *= 2) {
                        const bool is_high = (lane & bit) != 0;
                        const float other = __shfl_xor_sync(0xffffffffu, is_high ? low : high, bit);
                        low = is_high ? other : low;
                        high = is_high ? high : other;
                    }
                    columns[0][odd] = low, columns[1][odd] = high;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) o[m][n + i][2 * r + odd] = columns[i][odd];
            }
}

// ---- either kind of cache -----------------------------------------------------------------------

template <class Layout, typename value_t, CacheFormat kFormat>
FS_DEVICE auto key_operand(uint32_t tile, int lane) {
    if constexpr (kIs8Bit<kFormat>)
        return CodeRowsB<Layout, value_t, kFormat>(tile, lane);
    else
        return RowsB<Layout>(tile, lane);
}
template <class Layout, int kTurns, typename value_t, CacheFormat kFormat>
FS_DEVICE auto value_operand(uint32_t tile, int lane, int turn = 0) {
    if constexpr (kIs8Bit<kFormat>)
        return CodeColumnsB<Layout, kTurns, value_t, kFormat>(tile, lane, turn);
    else
        return ColumnsB<Layout, kTurns>(tile, lane, turn);
}

}  // namespace flashsmith
