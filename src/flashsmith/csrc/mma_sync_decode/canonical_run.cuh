// A run of canonical kernels: whole chunks of a sequence's keys, which are its parts
// (docs/bits.md).
//
// A stage is a tile of the canonical order. Tiles and chunks that a program hides from all rows are
// left out: they would change no bit. Each warp multiplies the queries by its own keys, and P by
// its own columns of all values. Warps exchange the rows' maxima, P and its sums through shared
// memory, with two barriers per tile. Every warp knows the statistics of all rows.
#pragma once

#include "common/canonical.cuh"
#include "common/changed_scores.cuh"
#include "common/code_fragments.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_decode/run_copies.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct CanonicalRun : RunCopies<Kernel, kPaged> {
    using Base = RunCopies<Kernel, kPaged>;
    using value_t = typename Kernel::value_t;
    using Base::args, Base::first_key, Base::full_begin, Base::full_end, Base::item,
        Base::keys_of_row, Base::kStages, Base::K_tile, Base::lane, Base::page_of, Base::rows,
        Base::kSkips, Base::next_visited, Base::smem, Base::start_step, Base::states, Base::warp;
    using typename Base::Copies, typename Base::KeysLayout, typename Base::NextRows,
        typename Base::ValuesLayout, typename Base::Visits;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kMTiles = Kernel::row_tiles;
    // Groups of 16 columns; warp i of n has groups i, i + n ...
    static constexpr int kGroups = Kernel::d_v / 16;
    static constexpr int kOwnGroups = (kGroups + Kernel::n_warps - 1) / Kernel::n_warps;
    // The keys whose scores a warp computes: those that it copies or, if warps share the stages, 16
    // of a stage, so that the last warps have none.
    static constexpr int kOwnKeys = Kernel::shares_stages ? 16 : Kernel::warp_keys;
    static constexpr int kScoringWarps = Kernel::B_c / kOwnKeys;
    static constexpr int kKeyGroups = kOwnKeys / 16;
    // The number of groups of 16 keys in one stage of a ring. A stage holds B_c keys if the warps
    // share the stages, and otherwise one warp's keys.
    static constexpr int kCopiedGroups = Kernel::shares_stages ? Kernel::B_c / 16 : kKeyGroups;
    using Scores = float[kMTiles][kOwnKeys / 8][4];
    using Sums = float[kMTiles][2 * kOwnGroups][4];
    using PLayout = SmemLayout<Kernel::B_r, Kernel::B_c, true>;
    using Rows = CanonicalRows<kMTiles>;
    using Queries = QueryRows<typename Kernel::QueriesLayout, kMTiles, Kernel::cache>;

    using Base::Base;

    // Stores the position where the CTA's next search begins. `address` is its address in shared
    // memory.
    FS_DEVICE void run(Copies copies, WorkCursor cursor, uint32_t address) const {
        const int first_step = copies.first_step, steps = copies.steps;
        NextRows next_rows = copies.next_rows;
        int next_entry = copies.pages.entries[kPaged ? kStages - 1 : 0];
        if (thread_index() == 0) {
            RunInfo::save(smem + Kernel::target_offset, item, args.heads_per_group);
            cursor.index += gridDim.x;
            cursor.save(address);
        }
        cp_async_wait<kStages - 2>();
        __syncthreads();  // the queries have arrived
        const Queries queries(smem + Kernel::queries_offset, lane, 0);
        int step = first_step, stage = 0, steps_until = 0;
        [[maybe_unused]] Visits visits;
        if constexpr (kSkips) {
            visits = copies.visits;
            step = visits.steps[0];
            next_entry = visits.entry;
        }
        const int steps_of_chunk = item.sequence.chunk / Kernel::B_c;
        Rows all(this->scale_log2());  // state over all chunks so far; empty until a chunk has keys
        Sums all_o;
        zero(all_o);
        Scores scores;
        if (step < steps && has_keys()) multiply_keys(step, stage, queries, scores);
        for (int part = item.first_part; part < item.end_part; ++part) {
            Rows chunk(this->scale_log2());
            Sums o;
            zero(o);
            steps_until += steps_of_chunk;
            while (step < min(steps, steps_until)) {
                if (has_keys()) store_maxima(scores);
                __syncthreads();  // maxima and the stage are complete; the previous stage has been
                                  // read
                const int copied = kSkips ? visits.steps[kStages - 1] : step + kStages - 1;
                int after = copied + 1;
                if (copied < steps) {
                    start_step(copied, stage_before(stage), next_entry, next_rows);
                    if constexpr (kSkips) after = next_visited(after, steps, visits.known);
                    if (!kSkips || after < steps) next_entry = page_of(after);
                }
                cp_async_commit();
                raise(chunk, o);
                if (has_keys()) store_probabilities(chunk, scores);
                // The next tile's scores are computed before this tile's P V: they need only this
                // warp's keys, or a stage that all warps have copied.
                const int next = stage == kStages - 1 ? 0 : stage + 1;
                cp_async_wait<kStages - 2>();
                if constexpr (Kernel::shares_stages)
                    __syncthreads();  // the next stage, P and its sums are complete
                else
                    __syncwarp();
                const int next_step = kSkips ? visits.advance(min(after, steps)) : step + 1;
                if (next_step < steps && has_keys())
                    multiply_keys(next_step, next, queries, scores);
                if constexpr (!Kernel::shares_stages)
                    __syncthreads();  // P and its sums are complete
                add_sums(chunk);
                multiply_values(stage, o);
                stage = next;
                step = next_step;
            }
            chunk.finish_chunk();
            merge(all, all_o, chunk, o);
        }
        if constexpr (Kernel::has_codes) restore_columns(all_o, lane);
        finish(all, all_o);
        __syncthreads();  // the next run will overwrite the data that is read here
    }

  private:
    FS_DEVICE static int stage_before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

    // ---- a tile ----

    FS_DEVICE bool has_keys() const {
        return kScoringWarps == Kernel::n_warps || warp < kScoringWarps;
    }
    // The first of the keys whose scores this warp computes.
    FS_DEVICE int own_key(int step) const {
        if constexpr (Kernel::shares_stages)
            return this->run_begin + step * Kernel::B_c + warp * kOwnKeys;
        return first_key(step);
    }
    FS_DEVICE uint32_t own_keys(int stage) const {
        using Panel = typename KeysLayout::template Panel<false>;
        return K_tile(stage) + (Kernel::shares_stages ? warp * kOwnKeys * Panel::kRowBytes : 0);
    }

    FS_DEVICE void multiply_keys(int step, int stage, const Queries& queries,
                                 Scores& scores) const {
        zero(scores);
        multiply<value_t, Kernel::d_steps>(
            scores, queries,
            key_operand<KeysLayout, value_t, Kernel::cache>(own_keys(stage), lane));
        change_scores<SEMANTICS>(scores, this->score_argument());
        const int key = own_key(step);
        if constexpr (kHasProgram<SEMANTICS>)
            this->with_program(
                key, [&](const auto&... at) { change_by_program<SEMANTICS>(scores, at...); });
        if (key < full_begin || key + kOwnKeys > full_end) {
            const auto seen = [&](int m, int r) { return keys_of_row(16 * m + 8 * r + lane / 4); };
            mask_keys<SEMANTICS>(scores, lane, key, seen, -INFINITY);
        }
        if constexpr (kHasProgram<SEMANTICS>)
            this->with_program(
                key, [&](const auto&... at) { hide_by_program<SEMANTICS>(scores, at...); });
    }
    FS_DEVICE uint32_t maximum(int of_warp, int row) const {
        return smem + Kernel::maxima_offset + (of_warp * Kernel::B_r + row) * 4;
    }
    FS_DEVICE void store_maxima(const Scores& scores) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float its = quad_max(Rows::largest(scores, m, r));
                if (lane % 4 == 0)
                    store_shared_4B(maximum(warp, 16 * m + 8 * r + lane / 4), __float_as_uint(its));
            }
    }
    // Updates the maxima. Each warp computes them separately, with the same result.
    FS_DEVICE void raise(Rows& chunk, Sums& o) const {
        float maxima[kMTiles][2], factors[kMTiles][2];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                maxima[m][r] = -INFINITY;
#pragma unroll
                for (int w = 0; w < kScoringWarps; ++w)
                    maxima[m][r] = fmaxf(maxima[m][r],
                                         load_shared_float(maximum(w, 16 * m + 8 * r + lane / 4)));
            }
        if (chunk.raise_to(maxima, factors)) Rows::rescale(o, factors);
    }
    // The address of a sum over 16 keys. Each of a quad's four lanes has a separate one.
    FS_DEVICE uint32_t sum_of(int group, int row) const {
        return smem + Kernel::sums_offset + ((group * Kernel::B_r + row) * 4 + lane % 4) * 4;
    }
    FS_DEVICE void store_probabilities(const Rows& chunk, Scores& scores) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 16 * m + 8 * r + lane / 4;
#pragma unroll
                for (int g = 0; g < kKeyGroups; ++g) {
                    float (&left)[4] = scores[m][2 * g], (&right)[4] = scores[m][2 * g + 1];
                    const float sum = chunk.exponentiate_16_keys(left, right, m, r);
                    store_shared_4B(sum_of(warp * kKeyGroups + g, row), __float_as_uint(sum));
                    const int column = 16 * (warp * kKeyGroups + g);
                    store_shared_4B(P_at(row, column),
                                    pack_16bit<value_t>(left[2 * r], left[2 * r + 1]));
                    store_shared_4B(P_at(row, column + 8),
                                    pack_16bit<value_t>(right[2 * r], right[2 * r + 1]));
                }
            }
    }
    // The address of this lane's elements of a row, in the tile of eight keys that begins at `key`.
    FS_DEVICE uint32_t P_at(int row, int key) const {
        using Wide = typename PLayout::template Panel<false>;
        using Narrow = typename PLayout::template Panel<true>;
        const uint32_t tile = smem + Kernel::P_offset, chunk = key / 8;
        if constexpr (PLayout::kWidePanels > 0)
            return tile + chunk / 8 * Wide::kBytes + Wide::offset(row, chunk % 8) + lane % 4 * 4;
        else
            return tile + Narrow::offset(row, chunk) + lane % 4 * 4;
    }
    FS_DEVICE void add_sums(Rows& chunk) const {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 16 * m + 8 * r + lane / 4;
                float sum = load_shared_float(sum_of(0, row));
#pragma unroll
                for (int g = 1; g < Kernel::B_c / 16; ++g)
                    sum = __fadd_rn(sum, load_shared_float(sum_of(g, row)));
                chunk.add(m, r, sum);
            }
    }
    FS_DEVICE bool has_group(int t) const {
        return kGroups % Kernel::n_warps == 0 || warp + t * Kernel::n_warps < kGroups;
    }
    // Multiplies 16 keys at a time, from the stages of all warps.
    FS_DEVICE void multiply_values(int stage, Sums& o) const {
        const RowsA<PLayout, kMTiles> p(smem + Kernel::P_offset, lane, 0);
#pragma unroll
        for (int step = 0; step < Kernel::B_c / 16; ++step) {
            uint32_t fragment[kMTiles][4];
            p.load(fragment, step);
            // The stage of the ring of the warp that copied these keys.
            const uint32_t tile = smem + Kernel::ring_offset +
                                  step / kCopiedGroups * Kernel::ring_bytes +
                                  stage * Kernel::stage_bytes + KeysLayout::kBytes;
            const auto v = value_operand<ValuesLayout, Kernel::n_warps, value_t, Kernel::cache>(
                tile, lane, warp);
#pragma unroll
            for (int t = 0; t < kOwnGroups; ++t) {
                if (!has_group(t)) continue;
                uint32_t two_tiles[4];
                v.load(two_tiles, step % kCopiedGroups, t);
                const uint32_t low[2] = {two_tiles[0], two_tiles[1]};
                const uint32_t high[2] = {two_tiles[2], two_tiles[3]};
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<value_t>(o[m][2 * t], fragment[m], low);
                    mma_m16n8k16<value_t>(o[m][2 * t + 1], fragment[m], high);
                }
            }
        }
    }

    // ---- chunks ----

    // Merges a chunk's state into the state of the chunks before it.
    FS_DEVICE static void merge(Rows& all, Sums& all_o, Rows& chunk, const Sums& o) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const StateMerge merge =
                    chunk.merge_after(m, r, all.row_max[m][r], all.row_sum[m][r]);
                all.row_max[m][r] = chunk.row_max[m][r];
                all.row_sum[m][r] = chunk.row_sum[m][r];
#pragma unroll
                for (int n = 0; n < 2 * kOwnGroups; ++n)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e)
                        all_o[m][n][e] = merge.merged(all_o[m][n][e], o[m][n][e]);
            }
    }
    // Stores rows of the output, or a chunk's state for the merge kernel.
    FS_DEVICE void finish(const Rows& all, const Sums& o) const {
        const RunInfo run(smem + Kernel::target_offset);
        const PartStates<Kernel> memory = states(run);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 16 * m + 8 * r + lane / 4;
                if (row >= rows) continue;
                const int of_head = run.tile * Kernel::B_r + row;
                const RowStatistics statistics{all.offset(m, r), all.row_sum[m][r]};
                const bool is_first = warp == 0 && lane % 4 == 0;
                if (!run.has_all_parts()) {
                    float* const sums = memory.sums(run.first_part, of_head);
                    store_columns(o, m, r, [&](int column, float x, float y) {
                        store_global_8B(sums + column, {as_uint(x), as_uint(y)});
                    });
                    if (is_first)
                        store_global_8B(memory.statistics(run.first_part, of_head),
                                        {as_uint(statistics.offset), as_uint(statistics.sum)});
                    continue;
                }
                const int query = args.by_group.divide(of_head);
                const int head =
                    run.head_k * args.heads_per_group + of_head - query * args.heads_per_group;
                const CanonicalEnd end(statistics,
                                       args.sinks == nullptr ? nullptr : args.sinks + head);
                char* const first = row_of_o(args, run.batch, run.first_query, query, head, 0);
                const auto scaled = [&](float sum) {
                    return canonical_element<Kernel>(args, sum, end.factor, run.head_k);
                };
                store_columns(o, m, r, [&](int column, float x, float y) {
                    if (column < d_of_v<Kernel>(args))
                        store_global_4B(first + column * kElementBytes,
                                        pack_16bit<value_t>(scaled(x), scaled(y)));
                });
                if (is_first) store_lse(args, end.lse, run.batch, run.first_query, query, head);
            }
    }
    // Passes this lane's elements of a row to `store`, in pairs of columns.
    template <class Store>
    FS_DEVICE void store_columns(const Sums& o, int m, int r, const Store& store) const {
#pragma unroll
        for (int t = 0; t < kOwnGroups; ++t) {
            if (!has_group(t)) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                store(16 * (warp + t * Kernel::n_warps) + 8 * i + lane % 4 * 2,
                      o[m][2 * t + i][2 * r], o[m][2 * t + i][2 * r + 1]);
        }
    }
};

}  // namespace flashsmith
