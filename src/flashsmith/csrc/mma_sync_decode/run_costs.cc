#include "mma_sync_decode/run_costs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace flashsmith {
namespace {

// What numbers of runs cost. The fields match RunCosts in families/mma_sync_decode/cost.py, which
// documents them and has the values for GPUs. Python sets the values for a call's GPU before
// planning.
struct RunCosts {
    double few_ctas, one_turn, uneven_slope, uneven_from, uneven_most, last_slope, last_start,
        last_least, last_least_fall, full_tiles, turn_bytes, merge_bytes, merged_row_bytes;
};
RunCosts run_costs{};

// Times were measured, on an H200, for up to this many runs per CTA that the GPU can hold at once.
constexpr double kMostTurns = 7.0;

// The time of a call of equal runs, relative to the time for its bytes. `turns` is the number of
// runs divided by the number of CTAs that the GPU can hold at once. With fewer runs than CTAs, some
// SMs may have two runs and others one. If there are few runs in the last wave, each gets more
// memory bandwidth, except with full tiles.
double time_over_bytes(double turns, bool full_tiles) {
    const RunCosts& costs = run_costs;
    if (turns <= 1.0) {
        const double uneven = costs.uneven_slope * (costs.uneven_from - turns);
        return std::max(costs.few_ctas / turns,
                        costs.one_turn + std::clamp(uneven, 0.0, costs.uneven_most));
    }
    const double full = std::floor(turns), rest = turns - full;
    const double last = std::max(std::min(1.0, costs.last_slope * rest + costs.last_start),
                                 costs.last_least - costs.last_least_fall * full);
    return (full + (rest == 0.0 ? 0.0 : full_tiles ? 1.0 : last)) / turns;
}

}  // namespace

bool has_run_costs() {
    return run_costs.one_turn > 0.0;
}

double EqualTiles::cost(int64_t runs_of_tile, double units) const {
    const double parts =
        std::clamp(units / static_cast<double>(min_units), 1.0, static_cast<double>(most_parts));
    const double of_tile = std::min(static_cast<double>(runs_of_tile), std::ceil(parts));
    const double turns = of_tile * tiles / slots;
    const bool full_tiles = rows > 8;
    const double bytes = tiles * units * unit_bytes * (full_tiles ? run_costs.full_tiles : 1.0);
    const double merge =
        of_tile > 1.0 ? run_costs.merge_bytes + tiles * rows * run_costs.merged_row_bytes : 0.0;
    return bytes * time_over_bytes(turns, full_tiles) +
           std::ceil(turns) * (full_tiles ? 2 : 1) * run_costs.turn_bytes + merge;
}

int64_t EqualTiles::best_runs(double units) const {
    int64_t best = 1;
    const double most = std::min(static_cast<double>(most_parts), kMostTurns * slots / tiles);
    for (int64_t runs = 2; static_cast<double>(runs) <= most; runs *= 2)
        if (cost(runs, units) < cost(best, units)) best = runs;
    return best;
}

RunsBySize runs_by_size(const EqualTiles& tiles, int64_t most_units) {
    constexpr double kStep = 1.25, kWorthwhile = 1.004;
    const int64_t fewest = tiles.best_runs(1.0);
    RunsBySize runs{fewest, fewest, 0.0};
    for (double units = kStep; units < static_cast<double>(most_units) * kStep; units *= kStep) {
        const int64_t best = tiles.best_runs(units);
        if (tiles.cost(runs.large, units) <= kWorthwhile * tiles.cost(best, units)) continue;
        runs = {runs.large, best, units};
    }
    return runs;
}

extern "C" __attribute__((visibility("default"))) bool flashsmith_set_plan_costs(
    const double* values, size_t count) {
    if (count * sizeof *values != sizeof run_costs) return false;
    std::memcpy(&run_costs, values, sizeof run_costs);
    return true;
}

}  // namespace flashsmith
