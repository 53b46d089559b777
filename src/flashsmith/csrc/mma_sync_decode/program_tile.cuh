// A tile of rows under the score and mask functions of a program.
//
// If there is a mask function, kernels visit only the steps that have a key visible to some row.
// They find these steps during the loop, from the tensors that the function reads, so that no list
// is made before the launch. Hidden steps contribute nothing, and parts begin and end at the same
// keys, so skipping steps changes no bit.
#pragma once

#include "common/program_scores.cuh"
#include "mma_sync_decode/run_tile.cuh"

namespace flashsmith {

// The largest number that divides every key index at which the mask may change from one key to the
// next, such as the block size of a table of blocks; 0 without a mask.
template <Semantics SEMANTICS, bool kHasMask = SEMANTICS.program_masks>
inline constexpr int kKeysAlike = 0;
template <Semantics SEMANTICS>
inline constexpr int kKeysAlike<SEMANTICS, true> = ProgramOf<SEMANTICS>::kKeysAlike;

template <class Kernel, bool kPaged>
struct ProgramTile : RunTile<Kernel, kPaged> {
    using Tile = RunTile<Kernel, kPaged>;
    using Tile::args, Tile::first_row, Tile::item, Tile::lane, Tile::rows, Tile::run_begin,
        Tile::warp, Tile::warp_row;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr bool kSkips = SEMANTICS.program_masks;
    // Whether warps read each other's keys or values in a stage. They then visit the same steps.
    static constexpr bool kSharesStages = Kernel::shares_stages || Kernel::canonical;
    // The keys of a step that are copied or left out together: all of them, or a warp's own.
    static constexpr int kVisitedKeys = kSharesStages ? Kernel::B_c : Kernel::warp_keys;
    // Whether the mask changes at most once among these keys. Their first and last key then show
    // whether any of them is visible, and each lane can check a different step.
    static constexpr bool kAlike = kKeysAlike<SEMANTICS> >= kVisitedKeys;

    using Tile::Tile;

    // Calls `function` with the program's arguments and the coordinates of this lane's scores,
    // whose first key is `key`. A sequence's keys include the ones that its cache has dropped.
    // Queries count from the call's first.
    template <class Function>
    FS_DEVICE void with_program(int key, const Function& function) const {
        const auto row = [&](int m, int r) { return warp_row() + 16 * m + 8 * r + lane / 4; };
        const int dropped = dropped_keys(args, item.batch);
        function(
            program(), sequence(dropped), lane,
            [&](int m, int r) { return this->query_of_row(row(m, r)); },
            [&](int m, int r) { return head_of_row(row(m, r)); }, key + dropped);
    }

    FS_DEVICE int head_of_row(int row) const {
        const int own = first_row + row;
        return item.head_k * args.heads_per_group + own -
               args.by_group.divide(own) * args.heads_per_group;
    }

    FS_DEVICE int first_visited_key(int step) const {
        return run_begin + step * Kernel::B_c + (kSharesStages ? 0 : warp * kVisitedKeys);
    }

    // For a range of steps that begins at `first`, which steps are visited, one bit each.
    struct KnownSteps {
        int first = -2 * kWarpSize;  // before any step's
        uint32_t bits = 0;
    };

    // The first step from `step` on that is visited, or `steps` if there is none. Must be called by
    // whole warps and, if warps share stages, by all warps of the CTA.
    FS_DEVICE int next_visited(int step, int steps, KnownSteps& known) const {
        if constexpr (kAlike) {
            while (step < steps) {
                if (static_cast<uint32_t>(step - known.first) >= kWarpSize)
                    known = {step, __ballot_sync(kWholeWarp, sees_step(step + lane))};
                const uint32_t bits = known.bits >> (step - known.first);
                if (bits != 0) return min(step + __ffs(bits) - 1, steps);
                step = known.first + kWarpSize;
            }
            return steps;
        }
        for (; step < steps; ++step)
            if (any_warp_sees(step)) return step;
        return steps;
    }

  private:
    // The program's arguments. Their scale is that of this K/V head if the cache has scales.
    FS_DEVICE decltype(auto) program() const {
        const auto& given = static_cast<const typename Kernel::Args&>(args).program;
        if constexpr (Kernel::has_scales && SEMANTICS.program_scores && !SEMANTICS.changes_scores) {
            ProgramArgs scaled = given;
            scaled.scale = scaled_by_k(args, given.scale, item.head_k);
            return scaled;
        } else {
            return (given);
        }
    }
    FS_DEVICE ProgramSequence sequence(int dropped) const {
        return {item.batch, item.sequence.queries, item.sequence.keys + dropped};
    }

    // Calls `function` with each range of rows [row, row_end) that the mask may treat differently,
    // until it returns true; returns whether any call did. Neighbouring rows are the heads of one
    // query.
    template <class Function>
    FS_DEVICE bool any_row(int row, int row_end, const Function& function) const {
        const int step = SEMANTICS.mask_by_head ? 1 : args.heads_per_group, last = row_end - 1;
#pragma unroll 1
        while (row <= last) {
            if (function(row)) return true;
            if (row == last) break;
            row = min(row + step, last);  // the last row may belong to another query
        }
        return false;
    }
    FS_DEVICE bool sees(int row, int key, const ProgramSequence& of) const {
        return ProgramOf<SEMANTICS>::sees(static_cast<const typename Kernel::Args&>(args).program,
                                          of.batch, head_of_row(row), this->query_of_row(row), key,
                                          of.seq_q, of.seq_k);
    }

    // Whether some row of the tile sees a key of the step; each lane may check a different step.
    FS_DEVICE bool sees_step(int step) const {
        const int dropped = dropped_keys(args, item.batch), key = first_visited_key(step) + dropped;
        const ProgramSequence of = sequence(dropped);
        bool seen = false;
        any_row(0, rows, [&](int row) {
            seen |= sees(row, key, of) | sees(row, key + kVisitedKeys - 1, of);
            return false;
        });
        return seen;
    }

    // Like sees_step(), but checked by a whole warp, or by all warps, each for its own rows. Warps
    // with the same rows get the same result.
    FS_DEVICE bool any_warp_sees(int step) const {
        const int dropped = dropped_keys(args, item.batch), key = first_visited_key(step) + dropped;
        const ProgramSequence of = sequence(dropped);
        const int row = warp_row(), row_end = Kernel::own_rows ? min(rows, row + 16) : rows;
        const bool seen = any_row(row, row_end, [&](int row) {
            bool its = false;
#pragma unroll
            for (int column = 0; column < kVisitedKeys; column += kWarpSize)
                its |= sees(row, key + column + lane % kVisitedKeys, of);
            return any_lane(its);
        });
        if constexpr (Kernel::own_rows) return __syncthreads_or(seen) != 0;
        return seen;
    }
};

}  // namespace flashsmith
