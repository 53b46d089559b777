// Writes 16-bit values to a row of a KV cache, in the cache's format.
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

FS_DEVICE float to_float(__half x) {
    return __half2float(x);
}
FS_DEVICE float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

// The scale of a K/V head.
FS_DEVICE float scale_of_head(const float* scales, int step, float value, int head) {
    return scales == nullptr ? value : scales[head * step];
}

// The parameters of a format of 8-bit floats.
template <CacheFormat kFormat>
struct CodeFormat {
    static constexpr bool kIsE4M3 = kFormat == CacheFormat::e4m3;
    static constexpr int kFractionBits = kIsE4M3 ? 3 : 2, kBias = kIsE4M3 ? 7 : 15;
    static constexpr float kLargest = kIsE4M3 ? 448.0f : 57344.0f;
    static constexpr float kSmallestNormal = kIsE4M3 ? 0x1p-6f : 0x1p-14f;
    // Adjacent fp32 numbers of this magnitude are as far apart as subnormal codes.
    static constexpr float kSubnormalUnits = kIsE4M3 ? 0x1p14f : 0x1p7f;
};

// Converts a number to the bits of an 8-bit float, its code, without the instruction that does this
// from sm_89 on. Rounds to nearest even, and saturates to the largest finite code.
template <CacheFormat kFormat>
FS_DEVICE uint32_t computed_code(float x) {
    using Format = CodeFormat<kFormat>;
    if (x != x) return 0x7f;
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
    const float size = fminf(fabsf(x), Format::kLargest);
    if (size < Format::kSmallestNormal) {
        const float sum = __fadd_rn(size, Format::kSubnormalUnits);
        return sign | (__float_as_uint(sum) - __float_as_uint(Format::kSubnormalUnits));
    }
    constexpr int kDropped = 23 - Format::kFractionBits;
    uint32_t bits = __float_as_uint(size);
    bits += (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
    return sign | ((bits >> kDropped) - ((127 - Format::kBias) << Format::kFractionBits));
}

// The codes of two numbers, the first one's in the low byte.
template <CacheFormat kFormat>
FS_DEVICE uint16_t codes_of(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes;
    if constexpr (CodeFormat<kFormat>::kIsE4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
#else
    return static_cast<uint16_t>(computed_code<kFormat>(first) | computed_code<kFormat>(second)
                                                                     << 8);
#endif
}

// Divides a 16-bit value by a scale, and returns the bits of the result in the cache's format.
template <typename value_t>
FS_DEVICE uint16_t scaled_bits(value_t x, float scale) {
    return static_cast<uint16_t>(pack_16bit<value_t>(__fdiv_rn(to_float(x), scale), 0.0f));
}

// A row that stores values unchanged.
template <typename value_t, CacheFormat kFormat>
struct StoredRow {
    value_t* elements;

    FS_DEVICE void put(int i, value_t x) const { elements[i] = x; }
    FS_DEVICE void put_bits(int i, uint16_t bits) const {
        reinterpret_cast<uint16_t*>(elements)[i] = bits;
    }
};

// A row that stores values divided by a scale, with 16 bits each.
template <typename value_t>
struct StoredRow<value_t, CacheFormat::scaled> {
    value_t* elements;
    float scale;

    FS_DEVICE void put(int i, value_t x) const {
        reinterpret_cast<uint16_t*>(elements)[i] = scaled_bits(x, scale);
    }
    FS_DEVICE void put_bits(int i, uint16_t bits) const {
        value_t x;
        reinterpret_cast<uint16_t&>(x) = bits;
        put(i, x);
    }
};

// A row that stores values divided by a scale as 8-bit floats.
template <typename value_t, CacheFormat kFormat>
    requires kIs8Bit<kFormat>
struct StoredRow<value_t, kFormat> {
    uint8_t* elements;
    float scale;

    FS_DEVICE void put(int i, value_t x) const {
        elements[i] = static_cast<uint8_t>(codes_of<kFormat>(__fdiv_rn(to_float(x), scale), 0.0f));
    }
    FS_DEVICE void put_bits(int i, uint16_t bits) const {
        value_t x;
        reinterpret_cast<uint16_t&>(x) = bits;
        put(i, x);
    }
};

}  // namespace flashsmith
