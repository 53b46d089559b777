// A tile's scores by struct Score of the library's semantics.cuh, which its shards include first.
#pragma once

#include "common/score.cuh"

namespace flashsmith {

// Raw scores become what they are before the softmax, but for the factor in its base.
template <Semantics SEMANTICS, int kMTiles, int kNTiles>
FS_DEVICE void change_scores(float (&scores)[kMTiles][kNTiles][4], float argument) {
    if constexpr (!SEMANTICS.changes_scores) return;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[m][n][e] = Score::change(scores[m][n][e], argument);
}

// A probability, or its gradient, times how a score changes where it has become `changed`.
template <Semantics SEMANTICS>
FS_DEVICE float times_slope(float x, float changed) {
    if constexpr (SEMANTICS.changes_scores) return x * Score::slope(changed);
    return x;
}

}  // namespace flashsmith
