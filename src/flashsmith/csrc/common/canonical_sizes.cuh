// Tiles and chunks of canonical-1. Plain C++20 without CUDA types: the host compiler, the kernels
// and the tests read it.
#pragma once

namespace flashsmith {

// The version of the order that kernels with the knob `canonical` keep.
constexpr int kCanonicalVersion = 1;

// Keys of a tile, by d as the call has it, and by the architecture: 90 for 9.0.
constexpr int canonical_tile(int d, int arch) {
    const int tile = d <= 128 ? 64 : 32;
    return arch >= 90 ? 2 * tile : tile;
}

// Keys of a chunk: a multiple of every tile.
constexpr int kCanonicalChunk = 4096;

}  // namespace flashsmith
