// Applies struct Program of the library's semantics.cuh to a tile of scores that a backward pass
// recomputes.
#pragma once

#include "common/changed_scores.cuh"
#include "common/program_scores.cuh"

namespace flashsmith {

// The program's arguments in a launch, as a base class that is empty if there is no program.
template <bool kHasProgram>
struct ProgramOfLaunch {
    const ProgramArgs& program_args;

    template <class Args>
    FS_DEVICE explicit ProgramOfLaunch(const Args& args) : program_args(args.program) {}
};
template <>
struct ProgramOfLaunch<false> {
    template <class Args>
    FS_DEVICE explicit ProgramOfLaunch(const Args&) {}
};

// The functions of a program for the scores of one head of a sequence. Tiles have any shape: in the
// functions below, `query(m, n, e)` and `key(m, n, e)` are an element's positions in the sequence.
template <Semantics SEMANTICS>
struct BackwardProgram {
    const ProgramArgs& args;
    int batch, head, seq_q, seq_k;

    // Returns the new score. `score`, which holds the old one (raw, or the tanh of a softcap), is
    // replaced with the slope of the whole change, unless the program's own slope is 1. Without a
    // score function, the old score is returned and `score` stays unchanged.
    FS_DEVICE float change(float& score, program::Place q, program::Place k) const {
        if constexpr (!SEMANTICS.program_scores) return score;
        const float raw = score;
        const float changed =
            ProgramOf<SEMANTICS>::change(args, raw, batch, head, q, k, seq_q, seq_k);
        if constexpr (!kSlopeIsOne<SEMANTICS>)
            score = times_slope<SEMANTICS>(
                ProgramOf<SEMANTICS>::slope(args, raw, batch, head, q, k, seq_q, seq_k), score);
        return changed;
    }

    // P times the slope that change() stored. Where P is 0, the slope may be infinite or NaN.
    FS_DEVICE static float gradient(float p, float slope) {
        if constexpr (!kSlopeIsOne<SEMANTICS>) return p == 0.0f ? 0.0f : p * slope;
        return times_slope<SEMANTICS>(p, slope);
    }

    // Zeroes elements whose keys the program hides. The mask is evaluated in a loop that collects
    // bits, because unrolled code would hold everything that the mask reads in registers, in
    // addition to the scores.
    template <int kMTiles, int kNTiles, class Query, class Key>
    FS_DEVICE void hide(float (&x)[kMTiles][kNTiles][4], const Query& query, const Key& key) const {
        if constexpr (SEMANTICS.program_masks) {
            constexpr int kTiles = kMTiles * kNTiles, kTilesOfWord = 8;  // four bits each
#pragma unroll
            for (int word = 0; word < kTiles; word += kTilesOfWord) {
                const int tiles = kTiles - word < kTilesOfWord ? kTiles - word : kTilesOfWord;
                uint32_t seen = 0;
#pragma unroll 2
                for (int i = 0; i < tiles; ++i) {
                    const int m = (word + i) / kNTiles, n = (word + i) % kNTiles;
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const bool sees = ProgramOf<SEMANTICS>::sees(
                            args, batch, head, query(m, n, e), key(m, n, e), seq_q, seq_k);
                        seen |= uint32_t{sees} << (4 * i + e);
                    }
                }
#pragma unroll
                for (int i = 0; i < kTilesOfWord; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (word + i < kTiles && (seen >> (4 * i + e) & 1) == 0)
                            x[(word + i) / kNTiles][(word + i) % kNTiles][e] = 0.0f;
            }
        }
    }
};

}  // namespace flashsmith
