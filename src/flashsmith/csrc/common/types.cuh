// Types shared by all kernels and their callers: element types, Semantics, tensor maps. Plain C++20
// without CUDA types, because the host compiler, the kernels and the tests read it.
#pragma once

#include <compare>
#include <cstdint>

namespace flashsmith {

// PyTorch's ScalarType codes.
enum class DType : int { FP16 = 5, BF16 = 15 };

// The format of a KV cache's elements: either q's dtype, with or without scales, or 8-bit floats,
// always with scales.
enum class CacheFormat : int { plain = 0, scaled = 1, e4m3 = 2, e5m2 = 3 };

constexpr bool is_8bit(CacheFormat format) {
    return format == CacheFormat::e4m3 || format == CacheFormat::e5m2;
}

// The factors by which a cache's stored keys and values are multiplied.
struct CacheScales {
    const float *k, *v;      // on the device: one number, or one for each K/V head; may be null
    int32_t k_step, v_step;  // elements from one head's number to the next: 0 or 1
    float k_value, v_value;  // the factor if `k` or `v` is null
};

// The part of a library's semantics that is fixed at compile time. If all fields are 0, attention
// has no mask and no other changes.
struct Semantics {
    // From query to query, neither the first nor the last visible key decreases (struct Mask of the
    // library's semantics.cuh). hides_earlier: later queries lose keys that earlier ones see.
    // hides_later: later queries see additional keys. takes_limits: a call passes window_left and
    // window_right.
    bool hides_earlier, hides_later, takes_limits;
    bool changes_scores;  // struct Score of semantics.cuh changes scores before the softmax
    bool packed;   // sequences of different lengths are concatenated; cu_seqlens has their offsets
    bool uneven;   // lengths need not be multiples of the tile sizes, and d need not equal d_head
    bool partial;  // only some keys are used: o is fp32, and a merge adds sinks; implies uneven
    // What struct Program of semantics.cuh, which comes from the caller's functions, does: change
    // scores after struct Score, hide keys in addition to struct Mask, or both. Whether it hides a
    // key may depend on the batch or on the query head. Implies uneven.
    bool program_scores, program_masks, mask_by_batch, mask_by_head;

    constexpr auto operator<=>(const Semantics&) const = default;
    // Whether a kernel may encounter a partly masked tile.
    constexpr bool masked() const { return hides_keys() || uneven; }
    constexpr bool hides_keys() const { return hides_earlier || hides_later; }
    // Whether a program's mask may show different blocks in different sequences of the batch.
    constexpr bool lists_by_batch() const { return mask_by_batch || packed || partial; }
    constexpr bool has_program() const { return program_scores || program_masks; }
    // Whether each query sees all keys that earlier queries see, and possibly more.
    constexpr bool is_triangular() const { return hides_later && !hides_earlier; }
};

// These properties as constants for device code, which cannot call host functions.
template <CacheFormat kFormat>
inline constexpr bool kIs8Bit = is_8bit(kFormat);
template <Semantics SEMANTICS>
inline constexpr bool kHidesKeys = SEMANTICS.hides_keys();
template <Semantics SEMANTICS>
inline constexpr bool kTriangular = SEMANTICS.is_triangular();
template <Semantics SEMANTICS>
inline constexpr bool kHasProgram = SEMANTICS.has_program();
template <Semantics SEMANTICS>
inline constexpr bool kListsByBatch = SEMANTICS.lists_by_batch();

// The value of a window limit that means no limit. It exceeds any sequence length.
constexpr int32_t kUnlimited = 1 << 30;

// The output of cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// Packed sequences end at this row of their tensor maps; see box_of_rows() in sm90/tma.cuh.
inline constexpr int kRowsOfMap = 1 << 30;

}  // namespace flashsmith
