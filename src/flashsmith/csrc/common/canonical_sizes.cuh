// Tile and chunk sizes of canonical-1. Plain C++20 without CUDA types, because the host compiler,
// the kernels and the tests read it.
#pragma once

namespace flashsmith {

// The version of the canonical order that kernels with the knob `canonical` implement.
constexpr int kCanonicalVersion = 1;

// Keys per tile, for the call's d, the architecture (90 for 9.0) and the d of v (0: the same as d).
// If the widths of q and v differ, the tile must be the one that the kernels use, which also
// depends on the narrower width.
constexpr int canonical_tile(int d, int arch, int d_v = 0) {
    const bool differ = d_v > 0 && d_v != d;
    const int wider = d_v > d ? d_v : d, narrower = differ && d_v < d ? d_v : d;
    if (wider > 256) return 32;
    const int tile = wider <= 128 && (!differ || narrower <= 64) ? 64 : 32;
    return arch >= 90 ? 2 * tile : tile;
}

// Keys per chunk: a multiple of every tile size.
constexpr int kCanonicalChunk = 4096;

}  // namespace flashsmith
