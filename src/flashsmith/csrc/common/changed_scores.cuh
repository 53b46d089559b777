// Applies struct Score of the library's semantics.cuh to a tile's scores. Shards include
// semantics.cuh first.
#pragma once

#include "common/score.cuh"

namespace flashsmith {

// Turns raw scores into the scores that enter the softmax, except for the base-2 scale factor.
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

// Multiplies a probability, or its gradient, by the derivative of the score change. `changed` is
// the score after the change.
template <Semantics SEMANTICS>
FS_DEVICE float times_slope(float x, float changed) {
    if constexpr (SEMANTICS.changes_scores) return x * Score::slope(changed);
    return x;
}

}  // namespace flashsmith
