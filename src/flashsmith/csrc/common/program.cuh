// Functions for a library's struct Program: the score and mask functions of a caller, which
// flashsmith prints into semantics.cuh.
//
//     struct Program {
//         // Divides every key at which the mask may change from one key to the next.
//         static constexpr int kKeysAlike = ...;
//         // Whether change() reads tensors at indices that depend on the key. It then has the
//         // template parameter kReach, which reach() returns for a row and the keys from `key` to
//         // `last`. kMayBeBeyond: whether kBeyond is more than a rare case.
//         static constexpr bool kReadsAlongKeys = ...;
//         static constexpr bool kMayBeBeyond = ...;
//         static int reach(const ProgramArgs& args, int b, int h, Place row, Place key, int seq_q,
//                          int seq_k, Place last);
//         // The new score, in natural units. raw * args.scale is the score in natural units, after
//         // a softcap.
//         static float change(const ProgramArgs& args, float raw, int b, int h, Place row,
//                             Place key, int seq_q, int seq_k);
//         // The derivative of the new score with respect to the score, at the same score.
//         static float slope(const ProgramArgs& args, float raw, int b, int h, Place row,
//                            Place key, int seq_q, int seq_k);
//         // Whether the row sees the key.
//         static bool sees(const ProgramArgs& args, int b, int h, Place row, Place key, int seq_q,
//                          int seq_k);
//     };
//
// b is the sequence, h the query head. Rows and keys count from the first of their sequence, and
// are not negative. All are pure, and defined for any indices: tiles have rows and keys beyond the
// sequence.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/program_args.cuh"
#include "common/ptx_functions.cuh"
#include "common/score.cuh"

namespace flashsmith::program {

// An index as the sum of a part that many elements of a tile share and a part that the compiler
// knows, so that the compiler can compute with them separately.
struct Place {
    int base, column;
    FS_DEVICE Place(int index) : base(index), column(0) {}
    FS_DEVICE Place(int base, int column) : base(base), column(column) {}
};

// ---- numbers and tensors ------------------------------------------------------------------------

template <typename T>
FS_DEVICE T number(int32_t bits) {
    if constexpr (std::is_same_v<T, float>) return __int_as_float(bits);
    return static_cast<T>(bits);
}

// An index of a tensor. kCounts: it is not negative. kNarrow: the dimension's stride in bytes fits
// 31 bits, so that one instruction multiplies by it and adds the rest of the address.
template <bool kCounts, bool kNarrow>
struct Index {
    static constexpr bool kIsNarrow = kNarrow;
    int value;

    // A negative index counts from the end; others are clamped to the tensor, because nothing
    // outside it may be read.
    FS_DEVICE int inside(int size) const {
        int found = value;
        if constexpr (!kCounts) found = max(found < 0 ? found + size : found, 0);
        return min(found, size - 1);
    }
};
struct LongIndex {
    static constexpr bool kIsNarrow = false;
    int64_t value;

    FS_DEVICE int inside(int size) const {
        const int64_t counted = value < 0 ? value + size : value;
        return static_cast<int>(min(max(counted, int64_t(0)), int64_t(size - 1)));
    }
};

// What is known about the indices that increase with the keys of a tile, as bits. kInside: no index
// is clamped or counts from the end, and neighbouring keys read neighbouring elements. kBeyond: all
// keys read the same element, because their indices are clamped to one end.
constexpr int kAnywhere = 0, kInside = 1, kBeyond = 2;

// An index that increases with the keys. It is base + column of `unclamped` if it is inside the
// tensor, otherwise `value`.
template <bool kCounts, int kReach>
struct KeyIndex {
    static constexpr bool kIsNarrow = true, kIsInside = kReach == kInside;
    int value;
    Place unclamped;

    FS_DEVICE int inside(int size) const { return Index<kCounts, true>{value}.inside(size); }
};

// The key that stands for `key` in a KeyIndex's value.
template <int kReach>
FS_DEVICE Place read_key(Place key) {
    return kReach == kBeyond ? Place(key.base) : key;
}

// What is known about consecutive keys, given the index of the first and of the last. An index is a
// sum, `unclamped`, that may be clamped. If it equals the sum at both ends, it does so everywhere;
// if it is the same at both ends, it is the same everywhere.
template <int kDim>
FS_DEVICE int reach(const ProgramRead& from, int first, int last, int unclamped_first,
                    int unclamped_last) {
    const int end = from.sizes[kDim] - 1;
    // Without short-circuit operators, which would branch.
    const bool counts = min(first, last) >= 0;
    const bool follows = (first == unclamped_first) & (last == unclamped_last);
    const bool is_inside = counts & (max(first, last) <= end) & (from.strides[kDim] == 1);
    const bool is_beyond = counts & (min(first, end) == min(last, end));
    return (follows & is_inside ? kInside : 0) | (is_beyond ? kBeyond : 0);
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
    const char* address = static_cast<const char*>(from.address);
    // The dimensions that the key does not index come first: many elements share their part of the
    // address.
    const auto add = [&]<typename One>(int dim, One one, bool narrow) {
        if (One::kIsNarrow != narrow) return;
        if constexpr (requires { requires One::kIsInside; }) {
            // The compiler knows the column: loads of all columns share the rest of the address.
            address += one.unclamped.base * int64_t(sizeof(Element));
            address += one.unclamped.column * int(sizeof(Element));
            return;
        }
        const int64_t bytes = from.strides[dim] * int64_t(sizeof(Element));
        const int inside = one.inside(from.sizes[dim]);
        address += One::kIsNarrow ? int64_t(inside) * static_cast<int32_t>(bytes) : inside * bytes;
    };
    int dim = 0;
    (add(dim++, index, false), ...);
    dim = 0;
    (add(dim++, index, true), ...);
    return static_cast<T>(load<Element>(address));
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
FS_DEVICE float divide(float a, float b) {
    return __fdiv_rn(a, b);
}
FS_DEVICE float inverse(float a) {
    return __frcp_rn(a);
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

// Python's and PyTorch's a // b, rounded down; 0 for ints if b is 0.
template <typename T>
FS_DEVICE T floor_divide(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
        if (b == 0.0f) return __fdiv_rn(a, b);
        const float rest = fmodf(a, b);
        float quotient = __fdiv_rn(a - rest, b);
        if (rest != 0.0f && (rest < 0.0f) != (b < 0.0f)) quotient -= 1.0f;
        return rintf(quotient);
    } else {
        // The divisor -1 is a special case, because INT_MIN / -1 overflows.
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

// ---- functions of floats ------------------------------------------------------------------------
// CUDA's own functions, with an error of at most 2 units in the last place (CUDA Programming Guide,
// mathematical functions), except where a comment says otherwise. score.cuh has the tanh.

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
