// What all kernels are compiled for and called with, whatever they compute: element types,
// Semantics, tensor maps. Plain C++20 without CUDA types: the host compiler, the kernels and the
// tests read it.
#pragma once

#include <compare>
#include <cstdint>

namespace flashsmith {

// The ScalarType codes that tensors carry.
enum class DType : int { FP16 = 5, BF16 = 15 };

// What a library's kernels compute, as far as it is decided at compile time. Zero is the plain
// case.
struct Semantics {
    // Of the keys that a query may see, whose first and last do not decrease from query to query
    // (struct Mask of the library's semantics.cuh): whether later queries no longer see what
    // earlier ones see; whether they see more; and whether a call gives window_left and
    // window_right.
    bool hides_earlier, hides_later, takes_limits;
    bool changes_scores;  // before the softmax, by struct Score of semantics.cuh
    bool packed;   // sequences of unequal length one after the other, told apart by cu_seqlens
    bool uneven;   // lengths need not be multiples of the tiles, nor d be d_head
    bool partial;  // of some of the keys: o is fp32, sinks are left to a merge; implies uneven

    constexpr auto operator<=>(const Semantics&) const = default;
    // Whether a kernel may meet a tile that is partly out of sight.
    constexpr bool masked() const { return hides_keys() || uneven; }
    constexpr bool hides_keys() const { return hides_earlier || hides_later; }
    // Whether the last queries see the most keys: all that earlier ones see, and more.
    constexpr bool is_triangular() const { return hides_later && !hides_earlier; }
};

// The same for device code, which calls no function of the host.
template <Semantics SEMANTICS>
inline constexpr bool kHidesKeys = SEMANTICS.hides_keys();
template <Semantics SEMANTICS>
inline constexpr bool kTriangular = SEMANTICS.is_triangular();

// No limit on this side of a window; longer than any sequence.
constexpr int32_t kUnlimited = 1 << 30;

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// Packed sequences end at this row of their tensor maps, see box_of_rows() in sm90/tma.cuh.
inline constexpr int kRowsOfMap = 1 << 30;

}  // namespace flashsmith
