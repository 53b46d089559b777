// Applies struct Program of the library's semantics.cuh to a tile's scores.
#pragma once

#include <type_traits>

#include "common/key_mask.cuh"
#include "common/program.cuh"

namespace flashsmith {

struct Program;  // only libraries of programs define it

// The same, as a name that depends on the semantics: kernels without a program never look into it.
template <Semantics SEMANTICS>
using ProgramOf = std::conditional_t<kHasProgram<SEMANTICS>, Program, void>;

// Whether new scores grow as the old ones do, as with a bias.
template <Semantics SEMANTICS, bool kHasScore = SEMANTICS.program_scores>
inline constexpr bool kSlopeIsOne = true;
template <Semantics SEMANTICS>
inline constexpr bool kSlopeIsOne<SEMANTICS, true> = ProgramOf<SEMANTICS>::kSlopeIsOne;

// The sequence that a tile of scores belongs to.
struct ProgramSequence {
    int batch, seq_q, seq_k;
};

// Turns raw scores, or those that struct Score has changed, into the program's scores in natural
// units. `row(m, r)` is a row of the lane within its sequence, `head(m, r)` its query head,
// `first_key` the key of the tile's first column.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Row, class Head>
FS_DEVICE void change_by_program(float (&scores)[kMTiles][kNTiles][4], const ProgramArgs& args,
                                 const ProgramSequence& of, int lane, const Row& row,
                                 const Head& head, int first_key) {
    if constexpr (SEMANTICS.program_scores) {
        const int first_column = first_key + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int q = row(m, r), h = head(m, r);
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = scores[m][n][2 * r + e];
                        x = ProgramOf<SEMANTICS>::change(args, x, of.batch, h, q,
                                                         program::Place{first_column, 8 * n + e},
                                                         of.seq_q, of.seq_k);
                    }
            }
    }
}

// Sets the scores of keys that the program hides to -inf. They are selected: a hidden score may be
// NaN. The mask is evaluated in a loop that yields bits, because unrolled code would hold all that
// it reads in registers, together with the scores.
template <Semantics SEMANTICS, int kMTiles, int kNTiles, class Row, class Head>
FS_DEVICE void hide_by_program(float (&scores)[kMTiles][kNTiles][4], const ProgramArgs& args,
                               const ProgramSequence& of, int lane, const Row& row,
                               const Head& head, int first_key) {
    if constexpr (SEMANTICS.program_masks) {
        constexpr int kTilesOfWord = 8;  // four bits each
        const int first_column = first_key + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const int q[2] = {row(m, 0), row(m, 1)}, h[2] = {head(m, 0), head(m, 1)};
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
