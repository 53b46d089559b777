// Chooses by cost how many runs a tile's keys are split into. Plain C++20 without CUDA headers.
#pragma once

#include <cstdint>

namespace flashsmith {

// Whether Python has set the costs for a call's GPU.
bool has_run_costs();

// Tiles of sequences of equal length, and the limits for splitting them.
struct EqualTiles {
    double tiles;        // over all K/V heads
    double rows;         // per tile
    double slots;        // CTAs that the GPU holds
    double unit_bytes;   // bytes of a unit, which is a block of B_c keys
    int64_t min_units;   // per part
    int64_t most_parts;  // per tile

    double cost(int64_t runs_of_tile, double units) const;
    int64_t best_runs(double units) const;
};

// The number of runs per tile: `large` for tiles of at least `from_large` units, `small` for
// others. Tiles with so few units that a third number would be better are ignored.
struct RunsBySize {
    int64_t small, large;
    double from_large;
};

RunsBySize runs_by_size(const EqualTiles& tiles, int64_t most_units);

}  // namespace flashsmith
