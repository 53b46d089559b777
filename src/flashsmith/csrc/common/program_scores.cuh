// Applies struct Program of the library's semantics.cuh to a tile's scores.
#pragma once

#include <type_traits>

#include "common/key_mask.cuh"
#include "common/program.cuh"

namespace flashsmith {

struct Program;  // only libraries of programs define it

// `Program` as a name that depends on the semantics, so that kernels without a program do not need
// its definition.
template <Semantics SEMANTICS>
using ProgramOf = std::conditional_t<kHasProgram<SEMANTICS>, Program, void>;

// Whether the derivative of the new score with respect to the old one is 1, as with a bias.
template <Semantics SEMANTICS, bool kHasScore = SEMANTICS.program_scores>
inline constexpr bool kSlopeIsOne = true;
template <Semantics SEMANTICS>
inline constexpr bool kSlopeIsOne<SEMANTICS, true> = ProgramOf<SEMANTICS>::kSlopeIsOne;

// The sequence that a tile of scores belongs to.
struct ProgramSequence {
    int batch, seq_q, seq_k;
};

// The scores of a tile, and the coordinates of this lane's scores, which a program needs. `row(m,
// r)` is a row of the lane within its sequence, as an int or a Place, `head(m, r)` its query head,
// `first_column` the key of the lane's first column. If rows are Places of one base, the compiler
// computes a function of key - row once for each diagonal of the lane's elements.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Row, class Head>
struct ProgramTileScores {
    using Program = ProgramOf<SEMANTICS>;
    using Place = program::Place;

    float (&scores)[kMTiles][kNTiles][4];
    const ProgramArgs& args;
    const ProgramSequence& of;
    const Row& row;
    const Head& head;
    int first_column;

    // Turns raw scores into the program's. `change(raw, b, h, row, key, seq_q, seq_k)` computes
    // one.
    template <class Change>
    FS_DEVICE void change_by(const Change& change) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Place q = row(m, r);
                const int h = head(m, r);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = scores[m][n][2 * r + e];
                        x = change(x, of.batch, h, q, Place{first_column, 8 * n + e}, of.seq_q,
                                   of.seq_k);
                    }
            }
    }
    template <int kReach>
    FS_DEVICE void change_within() {
        change_by([&](const auto&... at) { return Program::template change<kReach>(args, at...); });
    }

    // What is known about the tensor indices of all elements of this lane, as bits.
    FS_DEVICE int reach() const {
        int found = program::kInside | program::kBeyond;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                found &=
                    Program::reach(args, of.batch, head(m, r), row(m, r), Place(first_column),
                                   of.seq_q, of.seq_k, Place(first_column, 8 * (kNTiles - 1) + 1));
        return found;
    }
};

// Turns scores, raw or changed by struct Score, into the program's scores in natural units.
// `first_key` is the key of the tile's first column; see ProgramTileScores for the others.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Row, class Head>
FS_DEVICE void change_by_program(float (&scores)[kMTiles][kNTiles][4], const ProgramArgs& args,
                                 const ProgramSequence& of, int lane, const Row& row,
                                 const Head& head, int first_key) {
    if constexpr (SEMANTICS.program_scores) {
        using Program = ProgramOf<SEMANTICS>;
        ProgramTileScores<SEMANTICS, kMTiles, kNTiles, Row, Head> tile{
            scores, args, of, row, head, first_key + lane % 4 * 2};
        if constexpr (!Program::kReadsAlongKeys) {
            tile.change_by([&](const auto&... at) { return Program::change(args, at...); });
        } else {
            // One branch for the whole warp.
            const int reach = tile.reach();
            if (!any_lane((reach & program::kInside) == 0))
                tile.template change_within<program::kInside>();
            else if (Program::kMayBeBeyond && !any_lane((reach & program::kBeyond) == 0))
                tile.template change_within<program::kBeyond>();
            else
                tile.template change_within<program::kAnywhere>();
        }
    }
}

// Sets the scores of keys that the program hides to -inf, by selection, because a hidden score may
// be NaN. The mask is evaluated in a loop that collects bits, because unrolled code would hold
// everything that the mask reads in registers, in addition to the scores.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Row, class Head>
FS_DEVICE void hide_by_program(float (&scores)[kMTiles][kNTiles][4], const ProgramArgs& args,
                               const ProgramSequence& of, int lane, const Row& row,
                               const Head& head, int first_key) {
    if constexpr (SEMANTICS.program_masks) {
        constexpr int kTilesOfWord = 8;  // four bits each
        const int first_column = first_key + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const program::Place q[2] = {row(m, 0), row(m, 1)};
            const int h[2] = {head(m, 0), head(m, 1)};
#pragma unroll
            for (int word = 0; word < kNTiles; word += kTilesOfWord) {
                const int tiles = kNTiles - word < kTilesOfWord ? kNTiles - word : kTilesOfWord;
                uint32_t seen = 0;
#pragma unroll 2
                for (int n = 0; n < tiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int k = first_column + 8 * (word + n) + e % 2;
                        const bool sees = ProgramOf<SEMANTICS>::sees(
                            args, of.batch, h[e / 2], q[e / 2], k, of.seq_q, of.seq_k);
                        seen |= uint32_t{sees} << (4 * n + e);
                    }
#pragma unroll
                for (int n = 0; n < kTilesOfWord; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (word + n < kNTiles && (seen >> (4 * n + e) & 1) == 0)
                            scores[m][word + n][e] = -INFINITY;
            }
        }
    }
}

}  // namespace flashsmith
