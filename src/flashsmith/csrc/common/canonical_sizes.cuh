// Tile and chunk sizes of canonical-1. Plain C++20 without CUDA types, because the host compiler,
// the kernels and the tests read it.
#pragma once

namespace flashsmith {

// Version of the order that kernels with the knob `canonical` implement.
constexpr int kCanonicalVersion = 1;

// Keys per tile, for the call's d and the architecture (90 for 9.0).
constexpr int canonical_tile(int d, int arch) {
    const int tile = d <= 128 ? 64 : 32;
    return arch >= 90 ? 2 * tile : tile;
}

// Keys per chunk: a multiple of every tile size.
constexpr int kCanonicalChunk = 4096;

}  // namespace flashsmith
