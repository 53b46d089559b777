// What all kernels are compiled for and called with, whatever they compute: element types,
// Semantics, tensor maps. Plain C++20 without CUDA types: the host compiler, the kernels and the
// tests read it.
#pragma once

#include <compare>
#include <cstdint>

namespace flashsmith {

// The ScalarType codes that tensors carry.
enum class DType : int { FP16 = 5, BF16 = 15 };

// Which keys a query may see. Positions count from the bottom right: query i of seq_q stands at key
// i + seq_k - seq_q.
enum class MaskKind : int {
    none = 0,
    causal = 1,  // up to its own position
    window = 2,  // from window_left before to window_right after it
};

// What a library's kernels compute, as far as it is decided at compile time. Zero is the plain
// case.
struct Semantics {
    MaskKind mask;
    bool softcap;  // scores go through softcap * tanh(score / softcap)
    bool packed;   // sequences of unequal length one after the other, told apart by cu_seqlens
    bool uneven;   // lengths need not be multiples of the tiles, nor d be d_head
    bool partial;  // of some of the keys: o is fp32, sinks are left to a merge; implies uneven

    constexpr auto operator<=>(const Semantics&) const = default;
    // Whether a kernel may meet a tile that is partly out of sight.
    constexpr bool masked() const { return mask != MaskKind::none || uneven; }
};

// No limit on this side of a window; longer than any sequence.
constexpr int32_t kUnlimited = 1 << 30;

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// Packed sequences end at this row of their tensor maps, see box_of_rows() in sm90/tma.cuh.
inline constexpr int kRowsOfMap = 1 << 30;

}  // namespace flashsmith
