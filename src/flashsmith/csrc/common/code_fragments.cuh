// Operands of MMAs from keys and values that are stored as 8-bit floats, one byte each.
//
// Every code is exact in fp16 and in bf16, so a product is bitwise the same as with a 16-bit cache.
// ldmatrix gives a lane four neighbouring elements of a key, of which two belong to another lane.
// From sm_90 on, the queries' columns are permuted in the same way: there the tensor cores add the
// 16 products of a step in one sum, so the order does not affect the bits. Earlier ones add 8 and
// then 8, so keys are read pair by pair. Values are read with ldmatrix, which transposes pairs of
// columns: of every 16 columns, one tile of the product gets the even ones and the other tile the
// odd ones, so a lane has four neighbouring ones. restore_columns() restores the order.
#pragma once

#include "common/accumulators.cuh"
#include "common/layout.cuh"
#include "common/types.cuh"
#include "common/warp_mma.cuh"

namespace flashsmith {

// Whether the tensor cores add the products of a k16-step in one sum, and whether there is an
// instruction that converts e4m3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kAdds16AtOnce = true;
#else
constexpr bool kAdds16AtOnce = false;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4M3 = true;
#else
constexpr bool kConvertsE4M3 = false;
#endif

FS_DEVICE uint32_t load_shared_4B_volatile(uint32_t smem) {
    uint32_t x;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
    return x;
}

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

// Two codes as fp16, which has all of their values.
template <CacheFormat kFormat>
FS_DEVICE uint32_t halves_of(uint16_t two_codes) {
    if constexpr (kFormat == CacheFormat::e5m2)
        return __byte_perm(two_codes, 0, 0x1404);  // an e5m2 code is the upper byte of an fp16
    uint32_t halves = 0;
    if constexpr (kConvertsE4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two_codes));
    return halves;
}
template <CacheFormat kFormat>
constexpr bool kHasHalves = kFormat == CacheFormat::e5m2 || kConvertsE4M3;

template <CacheFormat kFormat>
FS_DEVICE float2 floats_of(uint16_t two_codes) {
    if constexpr (kHasHalves<kFormat>)
        return floats_of_halves(halves_of<kFormat>(two_codes));
    else
        return floats_of_e4m3(two_codes);
}

// The two halves of a word of four codes.
struct CodePairs {
    uint16_t low, high;

    FS_DEVICE explicit CodePairs(uint32_t codes) {
        asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(codes));
    }
};

// Two codes as 16-bit floats.
template <typename value_t, CacheFormat kFormat>
FS_DEVICE uint32_t widen_two(uint16_t two_codes) {
    if constexpr (std::is_same_v<value_t, __half> && kHasHalves<kFormat>)
        return halves_of<kFormat>(two_codes);
    const float2 x = floats_of<kFormat>(two_codes);
    return pack_16bit<value_t>(x.x, x.y);
}

// Two columns of two keys, as 16-bit floats: the even column and the odd one.
template <typename value_t, CacheFormat kFormat>
FS_DEVICE void widen_columns(uint32_t codes, uint32_t& even, uint32_t& odd) {
    if constexpr (std::is_same_v<value_t, __half>) {
        const CodePairs columns(__byte_perm(codes, 0, 0x3120));
        even = widen_two<value_t, kFormat>(columns.low);
        odd = widen_two<value_t, kFormat>(columns.high);
    } else {
        const CodePairs keys(codes);
        const float2 first = floats_of<kFormat>(keys.low), second = floats_of<kFormat>(keys.high);
        even = pack_16bit<value_t>(first.x, second.x);
        odd = pack_16bit<value_t>(first.y, second.y);
    }
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

// The same with ldmatrix: of a step's 16 columns, lane t of a quad has 4 t to 4 t + 3 and uses them
// in place of 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
template <class Layout, typename value_t, CacheFormat kFormat>
struct CodeQuadsB {
    typename Layout::Cursor cursor;

    FS_DEVICE CodeQuadsB(uint32_t tile, int lane) : cursor(tile, lane % 16, 0) {}

    FS_DEVICE void load(uint32_t (&two_tiles)[4], int step, int pair) const {
        uint32_t of_tiles[2];
        ldmatrix_x2(of_tiles, cursor.at(16 * pair, step));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const CodePairs codes(of_tiles[i]);
            two_tiles[2 * i] = widen_two<value_t, kFormat>(codes.low);
            two_tiles[2 * i + 1] = widen_two<value_t, kFormat>(codes.high);
        }
    }
};

// Like RowsA, with the columns of CodeQuadsB. The loads are volatile, because ptxas would join two
// of them, whose registers are not neighbours in the MMA's operand, and move them in every step.
template <class Layout, int kMTiles>
struct QuadRowsA {
    using Fragment = uint32_t[kMTiles][4];
    typename Layout::Cursor cursor;

    FS_DEVICE QuadRowsA(uint32_t tile, int lane, int first_row)
        : cursor(tile, first_row + lane / 4, lane % 4 / 2, lane % 2 * 8) {}

    FS_DEVICE void load(Fragment& fragment, int step) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                fragment[m][i] =
                    load_shared_4B_volatile(cursor.at(16 * m + i % 2 * 8, 2 * step) + i / 2 * 4);
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
        for (int i = 0; i < 2; ++i)
            widen_columns<value_t, kFormat>(of_keys[i], two_tiles[i], two_tiles[2 + i]);
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

template <CacheFormat kFormat>
constexpr bool kReadsQuads = kIs8Bit<kFormat> && kAdds16AtOnce;

// The A operand of queries whose columns are in the order of key_operand().
template <class Layout, int kMTiles, CacheFormat kFormat>
using QueryRows =
    std::conditional_t<kReadsQuads<kFormat>, QuadRowsA<Layout, kMTiles>, RowsA<Layout, kMTiles>>;

template <class Layout, typename value_t, CacheFormat kFormat>
FS_DEVICE auto key_operand(uint32_t tile, int lane) {
    if constexpr (kReadsQuads<kFormat>)
        return CodeQuadsB<Layout, value_t, kFormat>(tile, lane);
    else if constexpr (kIs8Bit<kFormat>)
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
