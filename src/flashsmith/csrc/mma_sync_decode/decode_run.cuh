// A run: the steps over its keys, part by part.
//
// A tile's rows are the query heads of one K/V head, then those of its next query. Each key is thus
// read once for all of them. Each warp has its own keys, every n_warps-th group of warp_keys keys
// of the part, and copies them into its own stages. No warp waits for another before a part is
// done. A run's copies continue from part to part.
//
// If a tile has rows for all warps, each warp may have its own rows instead and share the stages.
// The warps then exchange nothing at the end of a part (own_rows.cuh). Sequences with many rows are
// computed the same way with larger tiles (chunk_kernel.cuh), and each of their parts is a run.
// Warps share the stages, too, if o has more columns than the registers of a warp hold
// (own_columns.cuh).
#pragma once

#include "common/changed_scores.cuh"
#include "common/code_fragments.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_decode/own_columns.cuh"
#include "mma_sync_decode/own_rows.cuh"
#include "mma_sync_decode/part_merge.cuh"

namespace flashsmith {

// Merges the states of a part into the states of the run.
template <class Kernel, bool kPaged>
using MergeOfParts = std::conditional_t<
    Kernel::own_rows, OwnRowsMerge<Kernel, kPaged>,
    std::conditional_t<Kernel::own_columns, OwnColumns<Kernel, kPaged>, PartMerge<Kernel, kPaged>>>;

template <class Kernel, bool kPaged>
struct DecodeRun : MergeOfParts<Kernel, kPaged> {
    using Base = MergeOfParts<Kernel, kPaged>;
    using value_t = typename Kernel::value_t;
    using Scores = float[Kernel::row_tiles][Kernel::key_tiles][4];
    using Base::args, Base::first_key, Base::full_begin, Base::full_end, Base::item,
        Base::keys_of_row, Base::kStages, Base::K_tile, Base::lane, Base::page_of, Base::rows,
        Base::run_begin, Base::seen_begin, Base::seen_end, Base::smem, Base::start_step,
        Base::next_visited, Base::V_tile, Base::warp_row;
    using typename Base::Copies, typename Base::KeysLayout, typename Base::NextRows,
        typename Base::Softmax, typename Base::Sums, typename Base::ValuesLayout,
        typename Base::Visits;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;

    using Base::Base;

    // The A operand of the scores: kept in registers, or read again in each step if there is no
    // room.
    using QueryRows =
        flashsmith::QueryRows<typename Kernel::QueriesLayout, Kernel::row_tiles, Kernel::cache>;
    struct RegisterQueries : InRegisters<Kernel::row_tiles, Kernel::d_steps> {
        FS_DEVICE RegisterQueries(uint32_t tile, int lane, int row) {
            const QueryRows rows(tile, lane, row);
#pragma unroll
            for (int step = 0; step < Kernel::d_steps; ++step)
                rows.load(this->fragments[step], step);
        }
    };
    struct SharedQueries : QueryRows {
        FS_DEVICE SharedQueries(uint32_t tile, int lane, int row) : QueryRows(tile, lane, row) {}
    };
    using Queries = std::conditional_t<Kernel::keeps_queries, RegisterQueries, SharedQueries>;

    // ---- the algorithm ----

    // Stores the position where the CTA's next search begins. `address` is its address in shared
    // memory.
    FS_DEVICE void run(Copies copies, WorkCursor cursor, uint32_t address) const {
        const int first_step = copies.first_step, steps = copies.steps;
        NextRows next_rows = copies.next_rows;
        int next_entry = copies.pages.entries[kPaged ? kStages - 1 : 0];
        if (!Kernel::takes_chunks && thread_index() == 0) {
            if constexpr (!Kernel::own_rows)
                RunInfo::save(smem + Kernel::target_offset, item, args.heads_per_group);
            cursor.index += gridDim.x;
            cursor.save(address);
        }

        cp_async_wait<kStages - 2>();
        __syncthreads();  // the queries have arrived
        if constexpr (Kernel::own_rows && !Kernel::takes_chunks) {
            // All warps are done with the preceding run.
            if (thread_index() == 0)
                RunInfo::save(smem + Kernel::target_offset, item, args.heads_per_group);
        }
        Queries queries(own_queries(), lane, warp_row());
        int step = first_step, stage = 0;
        [[maybe_unused]] Visits visits;
        if constexpr (Base::kSkips) {
            visits = copies.visits;
            step = visits.steps[0];
            next_entry = visits.entry;
        }
        const int steps_of_part = item.sequence.chunk / Kernel::B_c;
        int parts_left = item.end_part - item.first_part, steps_until = 0;
        typename Base::Saved saved;
        for (; parts_left > 0; --parts_left) {
            Softmax softmax(this->scale_log2());
            Sums o;
            zero(o);
            steps_until += steps_of_part;
            if (!Kernel::takes_chunks && parts_left == 1) fetch_next_run(address);
            while (step < min(steps, steps_until)) {
                cp_async_wait<kStages - 2>();
                sync_stages();  // this stage has arrived, and the previous one has been read
                const int last = stage_before(stage);
                const int copied = Base::kSkips ? visits.steps[kStages - 1] : step + kStages - 1;
                int after = copied + 1;
                if (copied < steps) {
                    start_step(copied, last, next_entry, next_rows);
                    if constexpr (Base::kSkips) after = next_visited(after, steps, visits.known);
                    if (!Base::kSkips || after < steps) next_entry = page_of(after);
                }
                cp_async_commit();
                multiply_step(step, stage, queries, softmax, o);
                stage = stage == kStages - 1 ? 0 : stage + 1;
                step = Base::kSkips ? visits.advance(min(after, steps)) : step + 1;
            }
            sync_stages();
            if constexpr (Kernel::has_codes && Kernel::shares_stages) restore_columns(o, lane);
            // The preceding stage is free: it was read last and is filled next.
            if constexpr (Kernel::takes_chunks)
                this->store_part(softmax, o);
            else if constexpr (Kernel::own_columns)
                this->merge_columns(parts_left, stage_before(stage), softmax, o);
            else if constexpr (Kernel::own_rows) {
                if (this->finish_part(parts_left, softmax, o, saved)) return;
            } else
                this->merge_warps(parts_left, stage_before(stage), softmax, o, saved);
        }
    }

    // With long runs, a CTA requests the next run when its current one is almost done, instead of
    // taking a fixed one. Some SMs are farther from memory than others.
    FS_DEVICE void fetch_next_run(uint32_t address) const {
        if (thread_index() > 0 || args.run_counter == nullptr) return;
        WorkCursor cursor(address);
        if ((cursor.share & 1) == 0) return;
        cursor.index = gridDim.x + atomicAdd(args.run_counter, 1);
        cursor.save(address);
    }

    // The warp's columns of the queries.
    FS_DEVICE uint32_t own_queries() const {
        const uint32_t tile = smem + Kernel::queries_offset;
        if constexpr (Kernel::own_columns)
            return tile + this->column_half() * Kernel::QueriesLayout::kBytes / 2;
        return tile;
    }

    // ---- stages ----

    FS_DEVICE static void sync_stages() {
        if constexpr (Kernel::shares_stages)
            __syncthreads();
        else
            __syncwarp();
    }
    FS_DEVICE static int stage_before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

    // ---- a step ----

    FS_DEVICE void multiply_step(int step, int stage, const Queries& queries, Softmax& softmax,
                                 Sums& o) const {
        constexpr int kKeys = 8 * Kernel::key_tiles;
        const int key = Kernel::shares_stages ? run_begin + step * Kernel::B_c : first_key(step);
        if (key >= seen_end || key + kKeys <= seen_begin) return;
        Scores scores;
        multiply_keys(stage, queries, scores);
        change_scores<SEMANTICS>(scores, this->score_argument());
        if constexpr (kHasProgram<SEMANTICS>)
            this->with_program(
                key, [&](const auto&... at) { change_by_program<SEMANTICS>(scores, at...); });
        if (key < full_begin || key + kKeys > full_end) mask(scores, key);
        if constexpr (kHasProgram<SEMANTICS>)
            this->with_program(
                key, [&](const auto&... at) { hide_by_program<SEMANTICS>(scores, at...); });
        softmax.template update<false>(scores, o);
        InRegisters<Kernel::row_tiles, Kernel::key_steps> probabilities;
        round_to<value_t>(probabilities, scores);
        constexpr int kTurns = Kernel::own_columns ? Kernel::n_warps : 1;
        multiply<value_t, Kernel::key_steps>(
            o, probabilities,
            value_operand<ValuesLayout, kTurns, value_t, Kernel::cache>(
                V_tile(stage), lane, Kernel::own_columns ? this->warp : 0));
    }

    FS_DEVICE void multiply_keys(int stage, const Queries& queries, Scores& scores) const {
        if constexpr (Kernel::own_columns) {
            Base::multiply_keys(queries, K_tile(stage), scores);
        } else {
            zero(scores);
            multiply<value_t, Kernel::d_steps>(
                scores, queries,
                key_operand<KeysLayout, value_t, Kernel::cache>(K_tile(stage), lane));
        }
    }

    FS_DEVICE void mask(Scores& scores, int first_key) const {
        const auto seen = [&](int m, int r) {
            return keys_of_row(warp_row() + 16 * m + 8 * r + lane / 4);
        };
        mask_keys<SEMANTICS>(scores, lane, first_key, seen, -INFINITY);
    }

    // ---- clusters ----

    // Prepares the cluster's merge in addition to the CTA's run. A CTA without a run merges, too.
    FS_DEVICE void begin_in_cluster() const {
        ClusterMerge<Kernel>(args, smem, rows).expect(rows, item.sequence.runs);
        if (item.first_part < item.end_part) return;
        if (thread_index() == 0)
            RunInfo::save(smem + Kernel::target_offset, item, args.heads_per_group);
        __syncthreads();
        // Every thread that arrives must also wait; otherwise racecheck never terminates.
        cluster_wait();
    }
    FS_DEVICE void merge_in_cluster() const {
        const RunInfo run(smem + Kernel::target_offset);
        const ClusterMerge<Kernel> cluster(args, smem, rows);
        const int columns = cluster.own_columns(rows);
        if (run.runs() == 1 || thread_index() >= columns) return;
        mbarrier_wait(cluster.barrier, 0);
        for (int i = thread_index(); i < columns; i += Kernel::n_threads) {
            const int index = cluster.index_of(i), row = index / cluster.kColumns;
            this->store_merged(run, cluster.merged(run.runs(), i), run.tile * Kernel::B_r + row,
                               index % cluster.kColumns * 4);
        }
    }
};

}  // namespace flashsmith
