// The kernel that reads the cache, where the copies of a CTA's runs are one stream.
//
// The last steps of a run find the CTA's next one and start its copies: the exchange between warps
// and the tree of a run go on while bytes of the next are on their way. A stage is copied to as
// soon as it was multiplied, so that all of them are on their way while a warp waits for one.
#pragma once

#include "mma_sync_decode/part_kernel.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct RunsAhead {
    using Run = DecodeRun<Kernel, kPaged>;
    using Softmax = typename Run::Softmax;
    using Sums = typename Run::Sums;
    static constexpr int kStages = Kernel::stages;

    const DecodeKernelArgs& args;
    const uint32_t smem;

    // By turns: those of the run that is multiplied, and of the next.
    FS_DEVICE uint32_t queries_place(int turn) const {
        return smem + turn * Kernel::QueriesLayout::kBytes;
    }
    FS_DEVICE uint32_t target_place(int turn) const {
        return smem + Kernel::target_offset + turn * RunTarget::kItemBytes;
    }
    FS_DEVICE uint32_t search_place(int turn) const {
        return smem + Kernel::search_offset + turn * ItemSearch::kBytes;
    }

    // Every run has a step, one without keys one of zeros.
    struct Steps {
        int next, end;

        FS_DEVICE explicit Steps(const Run& run) : next(run.first_step()), end(run.end_step()) {
            if (next >= end) next = 0, end = 1;
        }
    };

    FS_DEVICE uint32_t index_behind(uint32_t index) const {
        if (args.run_counter == nullptr) return index + gridDim.x;
        return gridDim.x + atomicAdd(args.run_counter, 1);
    }

    FS_DEVICE void run() const {
        // The first launch of a call may be early itself: lengths are of the launch before, too.
        if (args.new_k == nullptr) wait_for_launch_before();
        ItemSearch first_search(share_of_cta<Kernel>(args), block_index());
        DecodeItem copied_item;
        const bool found = find_item<Kernel>(args, first_search, copied_item);
        wait_for_launch_before();
        allow_next_launch();
        if (!found) return;

        Run copied(args, copied_item, smem);
        Steps copies(copied);
        int entries[kStages + 1];
#pragma unroll
        for (int i = 0; i <= kStages; ++i) entries[i] = copied.page_of(copies.next + i);
        // Stages that are on their way or wait to be multiplied.
        int in_flight = min(copies.end - copies.next, kStages);
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            if (i < in_flight) copied.start_step(copies.next + i, i, entries[i]);
            if (i == 0) copied.start_queries(queries_place(0));
            cp_async_commit();
        }
        copies.next += in_flight;
        int copied_stage = in_flight == kStages ? 0 : in_flight, next_entry = entries[kStages];
        uint32_t next_index = 0;
        if (thread_index() == 0) {
            RunTarget::keep_item(target_place(0), copied_item, args.heads_per_group);
            first_search.keep(search_place(0));
            next_index = index_behind(first_search.index);
        }

        bool found_next = true;
        cp_async_wait<kStages - 1>();
        for (int turn = 0, stage = 0; found_next; turn ^= 1) {
            if (thread_index() == 0)
                store_shared_4B(search_place(turn) + ItemSearch::kIndexOffset, next_index);
            __syncthreads();  // queries, the run, and where the search for the next begins
            const DecodeItem item = RunTarget::item(target_place(turn));
            const Run run(args, item, smem);
            const typename Run::Queries queries(queries_place(turn), run.lane, 0);
            Steps steps(run);
            const int steps_of_part = item.sequence.chunk / Kernel::B_c;
            bool has_searched = false, holds = false;
            HalfState held;
            int end_of_part = 0;
            for (int parts_left = item.end_part - item.first_part; parts_left > 0; --parts_left) {
                Softmax softmax(args.scale_log2);
                Sums o;
                zero(o);
                end_of_part += steps_of_part;
                for (; steps.next < min(steps.end, end_of_part); ++steps.next) {
                    __syncwarp();  // the last stage is read
#pragma unroll 1
                    for (int slot = in_flight; slot < kStages; ++slot) {
                        if (copies.next == copies.end && !has_searched) {
                            has_searched = true;
                            ItemSearch search(search_place(turn));
                            found_next = search.index < args.most_items &&
                                         find_item<Kernel>(args, search, copied_item);
                            if (found_next) {
                                copied.read_item();
                                copies = Steps(copied);
                                next_entry = copied.page_of(copies.next);
                                copied.start_queries(queries_place(turn ^ 1));
                                if (thread_index() == 0) {
                                    RunTarget::keep_item(target_place(turn ^ 1), copied_item,
                                                         args.heads_per_group);
                                    search.keep(search_place(turn ^ 1));
                                    next_index = index_behind(search.index);
                                }
                            }
                        }
                        if (copies.next < copies.end) {
                            copied.start_step(copies.next, copied_stage, next_entry);
                            ++copies.next;
                            ++in_flight;
                            next_entry = copied.page_of(copies.next);
                            copied_stage = copied_stage == kStages - 1 ? 0 : copied_stage + 1;
                        }
                        // Behind the last run too: as many groups are newer than each stage's.
                        cp_async_commit();
                    }
                    cp_async_wait<kStages - 1>();
                    __syncwarp();  // this stage is here
                    --in_flight;
                    run.multiply_step(steps.next, stage, queries, softmax, o);
                    stage = stage == kStages - 1 ? 0 : stage + 1;
                }
                __syncwarp();
                // The stage that was read last is copied to next.
                const int free_stage = Run::stage_before(stage);
                if (Kernel::exchanges_pairs && run.rows <= 8) {
                    const HalfState done(softmax, o);
                    if (!holds && parts_left > 1) {
                        held = done;
                        holds = true;
                        continue;
                    }
                    exchange_two(run, parts_left, free_stage, held, done, holds,
                                 target_place(turn));
                    holds = false;
                    continue;
                }
                run.exchange(parts_left, free_stage, softmax, o, target_place(turn));
            }
            cp_async_wait<kStages - 2>();  // the next run's queries
        }
    }

    // The first eight rows of a state, of a lane's columns: what a warp keeps of a part until the
    // neighbour is done.
    struct HalfState {
        float maximum = 0.0f, sum = 0.0f;
        float o[Kernel::column_tiles][2] = {};

        FS_DEVICE HalfState() {}
        FS_DEVICE HalfState(const Softmax& softmax, const Sums& from)
            : maximum(softmax.offset[0][0]), sum(softmax.row_sum[0][0]) {
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; ++n)
                o[n][0] = from[0][n][0], o[n][1] = from[0][n][1];
        }
    };

    // As DecodeRun::exchange, of eight rows at most and of two neighbouring parts, whose join is
    // the tree's lowest level: the first one's states lie in these rows' places, the second one's
    // eight rows behind. Or of the second one alone.
    FS_DEVICE void exchange_two(const Run& run, int parts_left, int stage, const HalfState& first,
                                const HalfState& second, bool are_two,
                                uint32_t target_place) const {
        constexpr int kColumns = Kernel::d_head / 4;
        const int lane = lane_index(), own_row = lane / 4;
        uint32_t first_sums[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            first_sums[n] = run.sums(run.warp, stage, own_row, 8 * n + lane % 4 * 2);
        const float first_sum = quad_sum(first.sum), second_sum = quad_sum(second.sum);
        if (own_row < run.rows) {
            if (lane % 4 == 0) {
                store_shared_8B(run.statistics(run.warp, own_row + 8),
                                {as_uint(second.maximum), as_uint(second_sum)});
                if (are_two)
                    store_shared_8B(run.statistics(run.warp, own_row),
                                    {as_uint(first.maximum), as_uint(first_sum)});
            }
#pragma unroll
            for (int n = 0; n < Kernel::column_tiles; ++n)
                store_shared_8B(first_sums[n % 4] + (8 * Kernel::d_head + n / 4 * 32) * 4,
                                {as_uint(second.o[n][0]), as_uint(second.o[n][1])});
            if (are_two) {
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; ++n)
                    store_shared_8B(first_sums[n % 4] + n / 4 * 32 * 4,
                                    {as_uint(first.o[n][0]), as_uint(first.o[n][1])});
            }
        }
        __syncthreads();
        const RunTarget target(target_place);
        for (int i = thread_index(); i < run.rows * kColumns; i += Kernel::n_threads) {
            const int row = i / kColumns, column = i % kColumns * 4;
            RowState state = run.state_of_warps(stage, 0, row + 8, column);
            if (are_two) {
                RowState before = run.state_of_warps(stage, 0, row, column);
                before.join(state);
                state = before;
            }
            run.finish_part(target, target.end_part - parts_left, state, row, column, are_two);
        }
        __syncthreads();  // copies take the place of these states
    }
};

template <class Kernel, bool kPaged>
FS_DEVICE void compute_runs_ahead(const DecodeKernelArgs& args, uint32_t smem) {
    RunsAhead<Kernel, kPaged>{args, smem}.run();
}

}  // namespace flashsmith
