// Functions for a library's struct Program: the score and mask functions of a caller, which
// flashsmith prints into semantics.cuh.
//
//     struct Program {
//         // The new score. `score` is the scaled score in natural units, after a softcap.
//         template <class Score, class Key>
//         static float change(const ProgramArgs& args, Score score, int b, int h, int q, Key key,
//                             int seq_q, int seq_k);
//         // The derivative of the new score at the same `score`.
//         template <class Score, class Key>
//         static float slope(const ProgramArgs& args, Score score, int b, int h, int q, Key key,
//                            int seq_q, int seq_k);
//         // Whether row q sees key k.
//         template <class Key>
//         static bool sees(const ProgramArgs& args, int b, int h, int q, Key key, int seq_q,
//                          int seq_k);
//     };
//
// b is the sequence, h the query head. q and k count from the first row and key of their sequence.
// A score is a float or a Scaled, a key an int or a Column.
// All are pure, and defined for any indices: tiles have rows and keys beyond the sequence.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/program_args.cuh"
#include "common/ptx_functions.cuh"
#include "common/score.cuh"

namespace flashsmith::program {

// ---- numbers and tensors ------------------------------------------------------------------------

template <typename T>
FS_DEVICE T number(int32_t bits) {
    if constexpr (std::is_same_v<T, float>) return __int_as_float(bits);
    return static_cast<T>(bits);
}

// The offset of an index in its dimension. A negative index counts from the end; others are clamped
// to the tensor, because nothing outside it may be read.
template <typename Index>
FS_DEVICE int64_t offset_of(const ProgramRead& from, int dim, Index index) {
    const int size = from.sizes[dim];
    if constexpr (sizeof(Index) == 4) {
        const int counted = index < 0 ? index + size : index;
        return min(max(counted, 0), size - 1) * from.strides[dim];
    } else {
        const int64_t counted = index < 0 ? index + size : index;
        return min(max(counted, int64_t(0)), int64_t(size - 1)) * from.strides[dim];
    }
}

template <typename Element>
FS_DEVICE Element load(const void* address) {
    const auto* element = static_cast<const Element*>(address);
    // Nothing writes these tensors during the launch. The compiler may merge or hoist such loads.
    if constexpr (std::is_same_v<Element, bool>)
        return __ldg(reinterpret_cast<const uint8_t*>(element)) != 0;
    else if constexpr (std::is_same_v<Element, __half>)
        return __ushort_as_half(__ldg(reinterpret_cast<const unsigned short*>(element)));
    else if constexpr (std::is_same_v<Element, __nv_bfloat16>)
        return __ushort_as_bfloat16(__ldg(reinterpret_cast<const unsigned short*>(element)));
    else if constexpr (std::is_same_v<Element, int64_t>)
        return __ldg(reinterpret_cast<const long long*>(element));
    else
        return __ldg(element);
}

// The element at these indices, as a bool, int, int64_t or float.
template <typename T, typename Element, typename... Index>
FS_DEVICE T read(const ProgramRead& from, Index... index) {
    int64_t offset = 0;
    int dim = 0;
    ((offset += offset_of(from, dim++, index)), ...);
    return static_cast<T>(load<Element>(static_cast<const Element*>(from.address) + offset));
}

// ---- lazy values --------------------------------------------------------------------------------
// They convert to a float or int where they are used in another way than their operators.

// A product. Further factors are mostly the same for all scores, so that the compiler can combine
// them outside the loop over scores.
struct Scaled {
    float raw, factor;
    FS_DEVICE operator float() const { return raw * factor; }
};
// The key of a column of a tile: that of the tile's first column in the lane, and a distance that
// is a constant where loops are unrolled.
struct Column {
    int first, distance;
    FS_DEVICE operator int() const { return first + distance; }
};
// A linear function of a column's distance.
struct Linear {
    float first, step;
    int distance;
    FS_DEVICE operator float() const { return fmaf(step, static_cast<float>(distance), first); }
};

template <typename T>
inline constexpr bool kIsScaled = std::is_same_v<T, Scaled>;
template <typename T>
inline constexpr bool kIsLinear = std::is_same_v<T, Linear>;
template <typename A, typename B = float>
concept HasLazy = kIsScaled<A> || kIsScaled<B> || kIsLinear<A> || kIsLinear<B>;

template <typename A, typename B>
    requires HasLazy<A, B>
FS_DEVICE auto operator*(A a, B b) {
    if constexpr (kIsScaled<A>)
        return Scaled{a.raw, a.factor * float(b)};
    else if constexpr (kIsScaled<B>)
        return Scaled{b.raw, b.factor * float(a)};
    else if constexpr (kIsLinear<A> && kIsLinear<B>)
        return float(a) * float(b);
    else if constexpr (kIsLinear<A>)
        return Linear{a.first * b, a.step * b, a.distance};
    else
        return Linear{b.first * a, b.step * a, b.distance};
}
template <typename A>
    requires HasLazy<A>
FS_DEVICE A operator-(A a) {
    if constexpr (kIsScaled<A>)
        return {a.raw, -a.factor};
    else
        return {-a.first, -a.step, a.distance};
}
template <typename A, typename B>
    requires HasLazy<A, B>
FS_DEVICE auto operator+(A a, B b) {
    if constexpr (kIsScaled<A>)
        return fmaf(a.raw, a.factor, float(b));
    else if constexpr (kIsScaled<B>)
        return fmaf(b.raw, b.factor, float(a));
    else if constexpr (kIsLinear<A> && kIsLinear<B>)
        return float(a) + float(b);
    else if constexpr (kIsLinear<A>)
        return Linear{a.first + b, a.step, a.distance};
    else
        return Linear{b.first + a, b.step, b.distance};
}
template <typename A, typename B>
    requires HasLazy<A, B>
FS_DEVICE auto operator-(A a, B b) {
    return a + -b;
}

// key - x and x - key as floats. Unlike the difference of ints, they are not expected to wrap
// around.
FS_DEVICE Linear key_minus(Column key, int x) {
    return {static_cast<float>(key.first - x), 1.0f, key.distance};
}
FS_DEVICE float key_minus(int key, int x) {
    return static_cast<float>(key - x);
}
template <typename Key>
FS_DEVICE auto minus_key(int x, Key key) {
    return -key_minus(key, x);
}

// ---- arithmetic ---------------------------------------------------------------------------------

// Ints wrap around, as PyTorch's do. Unsigned arithmetic does so; overflow of signed C++ ints is
// undefined.
template <typename T>
using Unsigned = std::make_unsigned_t<T>;

template <typename T>
FS_DEVICE T add(T a, T b) {
    return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b));
}
template <typename T>
FS_DEVICE T subtract(T a, T b) {
    return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b));
}
template <typename T>
FS_DEVICE T multiply(T a, T b) {
    return static_cast<T>(Unsigned<T>(a) * Unsigned<T>(b));
}
template <typename T>
FS_DEVICE T negative(T a) {
    return static_cast<T>(Unsigned<T>(0) - Unsigned<T>(a));
}
template <typename T>
FS_DEVICE T left_shift(T a, T b) {
    return static_cast<T>(Unsigned<T>(a) << (b & 31));
}
template <typename T>
FS_DEVICE T right_shift(T a, T b) {
    return a >> (b & 31);
}

template <typename T>
FS_DEVICE T abs(T a) {
    if constexpr (std::is_same_v<T, float>)
        return fabsf(a);
    else
        return a < 0 ? negative(a) : a;
}

// NaN if either is NaN.
template <typename T>
FS_DEVICE T minimum(T a, T b) {
    if constexpr (std::is_same_v<T, float>) return a != a || a < b ? a : b;
    return a < b ? a : b;
}
template <typename T>
FS_DEVICE T maximum(T a, T b) {
    if constexpr (std::is_same_v<T, float>) return a != a || b < a ? a : b;
    return b < a ? a : b;
}

// Python's and PyTorch's a // b, rounded down; 0 for ints where b is 0.
template <typename T>
FS_DEVICE T floor_divide(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
        if (b == 0.0f) return __fdiv_rn(a, b);
        const float rest = fmodf(a, b);
        float quotient = __fdiv_rn(a - rest, b);
        if (rest != 0.0f && (rest < 0.0f) != (b < 0.0f)) quotient -= 1.0f;
        return rintf(quotient);
    } else {
        // The divisor -1 is apart because the lowest int has no quotient by it.
        if (b == 0) return 0;
        if (b == -1) return negative(a);
        const T quotient = a / b, rest = a % b;
        return quotient - (rest != 0 && (rest < 0) != (b < 0));
    }
}

// Python's and PyTorch's a % b, which has b's sign; 0 for ints where b is 0.
template <typename T>
FS_DEVICE T remainder(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
        const float rest = fmodf(a, b);
        return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
    } else {
        if (b == 0 || b == -1) return 0;
        const T rest = a % b;
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
}

// a times the approximate reciprocal of b. With a relative error of at most 3e-7, unless b is
// subnormal or above 2^126.
template <typename A>
FS_DEVICE auto divide(A a, float b) {
    return a * reciprocal_approx(b);
}

// ---- functions of floats ------------------------------------------------------------------------
// CUDA's own functions, with an error of at most 2 units in the last place (CUDA Programming Guide,
// mathematical functions), except where a comment says otherwise.

FS_DEVICE float exp(float a) {
    return expf(a);
}
FS_DEVICE float exp2(float a) {
    return exp2f(a);
}
FS_DEVICE float log(float a) {
    return logf(a);
}
FS_DEVICE float log2(float a) {
    return log2f(a);
}
FS_DEVICE float log1p(float a) {
    return log1pf(a);
}
FS_DEVICE float sqrt(float a) {
    return __fsqrt_rn(a);
}
FS_DEVICE float rsqrt(float a) {
    return rsqrtf(a);
}
FS_DEVICE float sin(float a) {
    return sinf(a);
}
FS_DEVICE float cos(float a) {
    return cosf(a);
}
FS_DEVICE float erf(float a) {
    return erff(a);
}
FS_DEVICE float floor(float a) {
    return floorf(a);
}
FS_DEVICE float ceil(float a) {
    return ceilf(a);
}
// Halves to even.
FS_DEVICE float round(float a) {
    return rintf(a);
}
FS_DEVICE float trunc(float a) {
    return truncf(a);
}

// With a relative error of at most 8e-7; see score.cuh.
FS_DEVICE float tanh(float a) {
    constexpr float kTwiceLog2E = 2.8853900817779268f;
    return tanh_of_2log2e(a * kTwiceLog2E);
}
FS_DEVICE float tanh(Scaled a) {
    constexpr float kTwiceLog2E = 2.8853900817779268f;
    return tanh_of_2log2e(a * kTwiceLog2E);
}

// 1 / (1 + e^-a). Where e^-a overflows, the reciprocal of infinity is 0, which is right.
FS_DEVICE float sigmoid(float a) {
    return __fdividef(1.0f, 1.0f + expf(-a));
}

// ---- types --------------------------------------------------------------------------------------

// Towards zero from float to int, and != 0 to bool.
template <typename To, typename From>
FS_DEVICE To cast(From a) {
    return static_cast<To>(a);
}

}  // namespace flashsmith::program
