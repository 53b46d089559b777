// The kernel that reads the cache: a CTA computes the state of one tile of rows over a run of parts
// of its sequence's keys, run after run.
//
// Rows of a tile are the query heads of one K/V head, and then its next query: each key is read
// once for all of them. Each warp has keys of its own, every n_warps-th warp_keys of the part, and
// copies them into stages of its own: no warp waits for another before a part is done. The copies
// of a run go on from part to part.
//
// Where a tile has rows for all warps, these may have rows of their own, and share the stages
// (own_rows.cuh): the end of a part is no exchange then. For sequences with many rows there is the
// same with larger tiles (chunk_kernel.cuh); each part is a run.
#pragma once

#include "common/barrier.cuh"
#include "common/opaque.cuh"
#include "common/softmax.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_decode/row_state.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

// All CTAs of the cluster have come to the first when a thread leaves the second. Of what is before
// the first it orders nothing but mbarriers that are initialised in front of a fence for them: a
// release would wait for all that the thread has asked memory for, 0.8 us.
FS_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
FS_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What the end of a part needs to know of its run. In the steps before there are no registers for
// it: it waits in shared memory.
struct RunTarget {
    int batch, head_k, tile, first_query;
    int parts, first_part, end_part, run_levels;
    int rows;  // of the K/V head

    FS_DEVICE explicit RunTarget(uint32_t place) {
        const uint4 x = load_shared_16B(place), y = load_shared_16B(place + 16);
        batch = x.x, head_k = x.y, tile = x.z, first_query = x.w;
        parts = y.x, first_part = y.y, end_part = y.z, run_levels = y.w;
        rows = load_shared_16B(place + 32).x;
    }
    FS_DEVICE static void keep(uint32_t place, const DecodeItem& item, int heads_per_group) {
        const DecodeSequence& s = item.sequence;
        const auto pack = [](int a, int b, int c, int d) {
            return uint4{uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)};
        };
        store_shared_16B(place, pack(item.batch, item.head_k, item.tile, s.first_query));
        store_shared_16B(place + 16, pack(s.parts, item.first_part, item.end_part, s.run_levels));
        store_shared_16B(place + 32, pack(s.queries * heads_per_group, 0, 0, 0));
    }

    // What a part needs to know that is no run's last.
    FS_DEVICE static uint4 of_parts(uint32_t place) { return load_shared_16B(place + 16); }

    FS_DEVICE bool has_all_parts() const { return first_part == 0 && end_part == parts; }
    FS_DEVICE int runs() const { return (parts + (1 << run_levels) - 1) >> run_levels; }
};

// The states of a tile's runs in the shared memory of a cluster: each CTA pushes those of its run
// to the CTAs that merge them, eight threads' worth of columns to each by turns, and merges its own
// columns when all have come. Nothing goes by way of global memory.
template <class Kernel>
struct ClusterMerge {
    static constexpr int kColumns = Kernel::d_head / 4, kTurn = 8, kBytes = 32;
    static constexpr int kMostRuns = Kernel::CFG.cluster;
    static_assert(kColumns % kTurn == 0);

    const uint32_t barrier, states;
    const int levels, rank, turns;  // turns of a CTA's at most

    FS_DEVICE ClusterMerge(const DecodeKernelArgs& args, uint32_t smem, int rows)
        : barrier(barrier_of(args, smem)),
          states(barrier + 16),
          levels(args.cluster_levels),
          rank(cluster_rank()),
          turns(((rows * kColumns / kTurn - 1) >> levels) + 1) {}

    // Behind the states of a run's subtrees.
    FS_DEVICE static uint32_t barrier_of(const DecodeKernelArgs& args, uint32_t smem) {
        return smem + Kernel::kept_states_offset + args.kept_levels * args.kept_level_bytes;
    }
    // Before any CTA of the cluster pushes.
    FS_DEVICE static void begin(const DecodeKernelArgs& args, uint32_t smem) {
        if (thread_index() == 0) {
            mbarrier_init(barrier_of(args, smem), 1);
            mbarrier_init_fence();
        }
        __syncwarp();
        cluster_arrive();
    }
    FS_DEVICE int own_columns(int rows) const {
        const int all = rows * kColumns / kTurn;
        return rank < all ? (((all - 1 - rank) >> levels) + 1) * kTurn : 0;
    }
    FS_DEVICE void expect(int rows, int runs) const {
        if (thread_index() == 0) mbarrier_arrive_expect(barrier, own_columns(rows) * runs * kBytes);
    }
    FS_DEVICE uint32_t place(int run, int index) const {
        return states + (run * turns * kTurn + index) * kBytes;
    }
    // `index`: of four columns, of all rows'.
    FS_DEVICE void push(const RowState& state, int run, int index) const {
        const int turn = index / kTurn;
        const int cta = turn & ((1 << levels) - 1);
        const uint32_t there =
            cluster_address(place(run, (turn >> levels) * kTurn + index % kTurn), cta);
        const uint32_t its_barrier = cluster_address(barrier, cta);
        const uint2 statistics = state.bits_of_statistics();
        store_remote_16B(there, its_barrier, state.bits_of_sums());
        store_remote_16B(there + 16, its_barrier, {statistics.x, statistics.y, 0, 0});
    }
    // The same where several of a turn follow: its first one's place.
    struct Turn {
        uint32_t place, barrier;
    };
    FS_DEVICE Turn turn_of(int run, int turn) const {
        const int cta = turn & ((1 << levels) - 1);
        return {cluster_address(place(run, (turn >> levels) * kTurn), cta),
                cluster_address(barrier, cta)};
    }
    FS_DEVICE static void push(const RowState& state, const Turn& turn, int within) {
        const uint32_t there = turn.place + within * kBytes;
        const uint2 statistics = state.bits_of_statistics();
        store_remote_16B(there, turn.barrier, state.bits_of_sums());
        store_remote_16B(there + 16, turn.barrier, {statistics.x, statistics.y, 0, 0});
    }
    // Which of all rows' columns an own one is.
    FS_DEVICE int index_of(int own) const {
        return ((own / kTurn << levels) + rank) * kTurn + own % kTurn;
    }
    FS_DEVICE RowState merged(int runs, int own) const {
        // Without branches: loads and joins go on beside each other.
        RowState of_runs[kMostRuns];
#pragma unroll
        for (int i = 0; i < kMostRuns; ++i) {
            const uint32_t at = place(min(i, runs - 1), own);
            of_runs[i] = RowState(load_shared_float2(at + 16), load_shared_16B(at));
            if (i >= runs) of_runs[i].sum = 0.0f;
        }
#pragma unroll
        for (int step = 1; step < kMostRuns; step *= 2)
#pragma unroll
            for (int i = 0; i < kMostRuns; i += 2 * step) {
                of_runs[i + step].join_behind(of_runs[i]);
                of_runs[i] = of_runs[i + step];
            }
        return of_runs[0];
    }
};

template <class Kernel, bool kPaged>
struct DecodeRun {
    static_assert(Kernel::valid_config());
    using value_t = typename Kernel::value_t;
    using Layout = typename Kernel::KeysLayout;
    using Softmax = OnlineSoftmax<Kernel::row_tiles, true, false>;
    using Scores = float[Kernel::row_tiles][Kernel::key_tiles][4];
    using Sums = float[Kernel::row_tiles][Kernel::column_tiles][4];
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kWarpKeys = Kernel::warp_keys;
    static constexpr int kStages = Kernel::stages;
    // Of 16 rows a thread merges the states of so many places, of four columns each, at once. Where
    // these are all that it has of a part, it keeps those of the first subtrees in registers.
    static constexpr int kAtOnce = Kernel::states_at_once;
    static constexpr bool kKeepsStates = kAtOnce > 1 && Kernel::row_tiles == 1 &&
                                         16 * (Kernel::d_head / 4) <= kAtOnce* Kernel::n_threads;
    struct KeptColumns {
        RowState states[kAtOnce];
    };
    // Of warps with rows of their own a thread keeps the first tiles of columns that it has.
    struct KeptRows {
        float o[std::max(Kernel::kept_tiles, 1)][4];
    };
    using Kept = std::conditional_t<Kernel::own_rows, KeptRows, KeptColumns>;
    // Whether a lane goes from row to row of a dense cache, and does not find each by its number.
    static constexpr bool kGoesOn = !kPaged && !Kernel::takes_chunks && !Layout::kHasNarrowPanel;
    struct NextRows {
        const char *k, *v;  // the lane's first 16 bytes of the step that is copied next

        FS_DEVICE void materialize() { flashsmith::materialize(k, v); }
    };
    // Whether it does so in pages, where a step's keys of a warp are in one page, as the host
    // knows.
    static constexpr bool kGoesOnInPages =
        kPaged && !Kernel::takes_chunks && !Layout::kHasNarrowPanel;
    FS_DEVICE bool has_whole_steps() const {
        return kGoesOnInPages && args.by_page.divisor % kWarpKeys == 0;
    }

    // Entries of the page table for a run's first copies, and for the first in the steps.
    struct FirstPages {
        static constexpr int kCount = kPaged ? kStages : 0, kRoom = std::max(kCount, 1);
        const int32_t* places[kRoom];
        int entries[kRoom];
        int now[kRoom];  // of those that were guessed: what is there behind the wait
        NextRows
            rows[kGoesOnInPages ? kStages - 1 : 1];  // if the warp's keys of a step have a page

        FS_DEVICE void materialize() {
#pragma unroll
            for (int i = 0; i < kCount; ++i) flashsmith::materialize(places[i], entries[i]);
            if constexpr (kGoesOnInPages)
#pragma unroll
                for (auto& its : rows) its.materialize();
        }
        FS_DEVICE void read_again(bool any) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) now[i] = any ? load_global_4B(places[i]) : entries[i];
        }
        FS_DEVICE bool are_as_guessed() const {
            bool are = true;
#pragma unroll
            for (int i = 0; i < kCount; ++i) are &= now[i] == entries[i];
            return are;
        }
    };

    const DecodeKernelArgs& args;
    const DecodeItem& item;
    const uint32_t smem, ring;
    const int warp, lane;
    const int first_row, rows;    // of the tile, in the K/V head's rows
    int run_begin;                // first key of the run
    int begin, end;               // keys that some row of the tile sees, of the run
    int seen_begin, seen_end;     // keys that some row of the warp sees, of the run
    int full_begin, full_end;     // keys that every row of it sees
    const char *k_head, *v_head;  // the head's rows of block 0, dense: of the sequence's block

    FS_DEVICE DecodeRun(const DecodeKernelArgs& args, const DecodeItem& item, uint32_t smem)
        : args(args),
          item(item),
          smem(smem),
          ring(smem + Kernel::ring_offset + thread_index() / kWarpSize * Kernel::ring_bytes),
          warp(thread_index() / kWarpSize),
          lane(lane_index()),
          first_row(item.tile * Kernel::B_r),
          rows(min(Kernel::B_r, item.sequence.queries * args.heads_per_group - first_row)) {
        const DecodeSequence& s = item.sequence;
        run_begin = s.begin + item.first_part * s.chunk;
        const KeyRange top = keys_of_row(0), bottom = keys_of_row(rows - 1);
        begin = max(run_begin, top.first);
        // The last part's last key is the sequence's.
        end = bottom.last + 1;
        if (item.end_part < s.parts) end = min(end, s.begin + item.end_part * s.chunk);
        seen_begin = begin;
        seen_end = end;
        full_begin = bottom.first;
        full_end = top.last + 1;
        if constexpr (Kernel::own_rows) own_rows_only();
        const int64_t block = kPaged ? 0 : item.batch;
        k_head = static_cast<const char*>(args.k_cache) +
                 (block * args.k_cache_strides.batch + item.head_k * args.k_cache_strides.head) *
                     kElementBytes;
        v_head = static_cast<const char*>(args.v_cache) +
                 (block * args.v_cache_strides.batch + item.head_k * args.v_cache_strides.head) *
                     kElementBytes;
    }

    FS_DEVICE int query_of_row(int row) const { return args.by_group.divide(first_row + row); }

    // Of a row of the tile.
    FS_DEVICE KeyRange keys_of_row(int row) const {
        const DecodeSequence& s = item.sequence;
        KeyRange keys{0, s.keys - 1};
        if constexpr (SEMANTICS.mask != MaskKind::none) {
            const int position = query_of_row(row) + s.keys - s.queries;
            if constexpr (SEMANTICS.mask == MaskKind::causal) keys.last = min(keys.last, position);
            if constexpr (SEMANTICS.mask == MaskKind::window) {
                keys.last = min(keys.last, position + args.window_right);
                keys.first = max(keys.first, position - args.window_left);
            }
        }
        return keys;
    }

    // The run's copies: which step comes next, and where from.
    struct Copies {
        int first_step, steps;
        NextRows next_rows;
        FirstPages pages;

        // So that the compiler does not put off what they are computed from.
        FS_DEVICE void materialize() {
            flashsmith::materialize(first_step, steps);
            if constexpr (kGoesOn) next_rows.materialize();
            pages.materialize();
        }
    };

    // Where they begin. `guesses`: as far as the page table says before the launch before is over.
    FS_DEVICE Copies first_copies(bool guesses) const {
        const int first_step = begin > run_begin ? (begin - run_begin) / Kernel::B_c : 0;
        const int steps = end > begin ? (end - run_begin + Kernel::B_c - 1) / Kernel::B_c : 0;

        Copies copies{first_step, steps, {}, {}};
        if constexpr (kGoesOn) {
            const int64_t row = first_key(first_step) + lane / 8;
            copies.next_rows = {
                k_head + row * args.k_cache_strides.row * kElementBytes + lane % 8 * 16,
                v_head + row * args.v_cache_strides.row * kElementBytes + lane % 8 * 16};
        }
        if constexpr (kPaged) {
            FirstPages& pages = copies.pages;
#pragma unroll
            for (int i = 0; i < kStages; ++i) pages.places[i] = entry_of(first_step + i);
            if (first_step < steps) {
#pragma unroll
                for (int i = 0; i < kStages; ++i)
                    pages.entries[i] =
                        guesses ? load_relaxed(pages.places[i]) : load_global_4B(pages.places[i]);
            }
            if constexpr (kGoesOnInPages)
                if (has_whole_steps())
#pragma unroll
                    for (int i = 0; i < kStages - 1; ++i)
                        pages.rows[i] = rows_in_page(first_key(first_step + i), pages.entries[i]);
        }
        return copies;
    }

    // Starts those of the first stages and of the queries.
    FS_DEVICE void start(Copies& copies) const {
        const int first_step = copies.first_step, steps = copies.steps;
        if constexpr (kPaged) {
            if (!has_whole_steps()) {  // too many instructions to have them for each stage
                start_queries();
                int entries[kStages - 1];
#pragma unroll
                for (int i = 0; i < kStages - 1; ++i) entries[i] = copies.pages.entries[i];
#pragma unroll 1
                for (int i = 0; i < kStages - 1; ++i) {
                    if (first_step + i < steps)
                        start_lanes_rows(first_key(first_step + i), i, entries[0]);
#pragma unroll
                    for (int next = 1; next < kStages - 1; ++next)
                        entries[next - 1] = entries[next];
                    cp_async_commit();
                }
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            NextRows& rows = kPaged ? copies.pages.rows[kGoesOnInPages ? i : 0] : copies.next_rows;
            if (first_step + i < steps) {
                if constexpr (kGoesOn || kGoesOnInPages)
                    start_rows(first_key(first_step + i), i, rows);
                else
                    start_lanes_rows(first_key(first_step + i), i, 0);
            }
            if (i == 0) start_queries();  // no one waits for them alone
            cp_async_commit();
        }
    }

    // Leaves at `place` in shared memory where the CTA's next search begins.
    FS_DEVICE void run(Copies copies, ItemSearch search, uint32_t place) const {
        const int first_step = copies.first_step, steps = copies.steps;
        NextRows next_rows = copies.next_rows;
        int next_entry = copies.pages.entries[kPaged ? kStages - 1 : 0];
        if (!Kernel::takes_chunks && thread_index() == 0) {
            if constexpr (!Kernel::own_rows)
                RunTarget::keep(smem + Kernel::target_offset, item, args.heads_per_group);
            search.index += gridDim.x;
            search.keep(place);
        }

        cp_async_wait<kStages - 2>();
        __syncthreads();  // the queries are here
        if constexpr (Kernel::own_rows && !Kernel::takes_chunks) {
            // All have left the run before.
            if (thread_index() == 0)
                RunTarget::keep(smem + Kernel::target_offset, item, args.heads_per_group);
        }
        Queries queries(smem + Kernel::queries_offset, lane, warp_row());
        int step = first_step, stage = 0;
        const int steps_of_part = item.sequence.chunk / Kernel::B_c;
        int parts_left = item.end_part - item.first_part, steps_until = 0;
        Kept kept;
        for (; parts_left > 0; --parts_left) {
            Softmax softmax(args.scale_log2);
            Sums o;
            zero(o);
            steps_until += steps_of_part;
            if (!Kernel::takes_chunks && parts_left == 1) ask_for_run(place);
            for (; step < min(steps, steps_until); ++step) {
                cp_async_wait<kStages - 2>();
                sync_stages();  // this stage is here, and the last one is read
                const int last = stage_before(stage);
                if (step + kStages - 1 < steps) {
                    start_step(step + kStages - 1, last, next_entry, next_rows);
                    next_entry = page_of(step + kStages);
                }
                cp_async_commit();
                multiply_step(step, stage, queries, softmax, o);
                stage = stage == kStages - 1 ? 0 : stage + 1;
            }
            sync_stages();
            // Of the stages the one before was read last, and is copied to next.
            if constexpr (Kernel::takes_chunks)
                store_own_rows(softmax, o);
            else if constexpr (Kernel::own_rows) {
                if (finish_own_rows(parts_left, softmax, o, kept)) return;
            } else
                exchange(parts_left, stage_before(stage), softmax, o, kept);
        }
    }

    // Of long runs a CTA takes the next when its own is all but done, not by turns: some SMs are
    // farther from memory than others.
    FS_DEVICE void ask_for_run(uint32_t place) const {
        if (thread_index() > 0 || args.run_counter == nullptr) return;
        ItemSearch search(place);
        if ((search.share & 1) == 0) return;
        search.index = gridDim.x + atomicAdd(args.run_counter, 1);
        search.keep(place);
    }

    // ---- warps with rows of their own ----

    // The first of the warp's rows in the tile, and of the keys that it copies in a stage.
    FS_DEVICE int warp_row() const { return Kernel::own_rows ? 16 * warp : 0; }
    FS_DEVICE int warp_slot() const { return Kernel::own_rows ? warp * kWarpKeys : 0; }

    FS_DEVICE static void sync_stages() {
        if constexpr (Kernel::own_rows)
            __syncthreads();
        else
            __syncwarp();
    }

    FS_DEVICE void own_rows_only();
    FS_DEVICE void store_own_rows(const Softmax& softmax, const Sums& o) const;
    FS_DEVICE bool finish_own_rows(int parts_left, const Softmax& softmax, Sums& o,
                                   Kept& kept) const;
    template <class Before>
    FS_DEVICE void join_behind(const float2 (&before)[2], const Before& columns,
                               float2 (&statistics)[2], Sums& o) const;
    FS_DEVICE void store_own_run(const float2 (&statistics)[2], Sums& o) const;

    FS_DEVICE static int stage_before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

    // ---- copies ----

    // Rows that the tile has not are zero.
    FS_DEVICE void start_queries() const {
        constexpr int kChunks = Kernel::d_head / kChunkElements;
        using QueriesLayout = typename Kernel::QueriesLayout;
        constexpr int kAll = Kernel::B_r * kChunks;
        const int head_q = item.head_k * args.heads_per_group;
#pragma unroll
        for (int first = 0; first < kAll; first += Kernel::n_threads) {
            // Unsigned, so that it is divided by shifts.
            const uint32_t i = first + static_cast<uint32_t>(thread_index());
            if (kAll % Kernel::n_threads != 0 && i >= kAll) break;
            const int row = static_cast<int>(i / kChunks), chunk = static_cast<int>(i % kChunks);
            const int query = query_of_row(row);
            const int head = head_q + first_row + row - query * args.heads_per_group;
            const char* source = static_cast<const char*>(args.q) +
                                 (item.batch * args.q_strides.batch +
                                  int64_t{item.sequence.first_query + query} * args.q_strides.row +
                                  head * args.q_strides.head + chunk * kChunkElements) *
                                     kElementBytes;
            const bool present =
                row < rows && (!SEMANTICS.uneven || chunk * kChunkElements < args.d);
            const uint32_t offset =
                chunk / 8 < QueriesLayout::kWidePanels
                    ? chunk / 8 * QueriesLayout::template Panel<false>::kBytes +
                          QueriesLayout::template Panel<false>::offset(row, chunk % 8)
                    : QueriesLayout::kNarrowOffset +
                          QueriesLayout::template Panel<true>::offset(row, chunk % 8);
            cp_async_16B_or_zeros(smem + Kernel::queries_offset + offset, source, present);
        }
    }

    FS_DEVICE int first_key(int step) const {
        return run_begin + step * Kernel::B_c + warp * kWarpKeys;
    }
    FS_DEVICE uint32_t K_tile(int stage) const { return ring + stage * Kernel::stage_bytes; }
    FS_DEVICE uint32_t V_tile(int stage) const { return K_tile(stage) + Layout::kBytes; }

    // The page table's entry for the key of a step that is the lane's, or for all of the warp's.
    // There is some key, or nothing is read.
    FS_DEVICE const int32_t* entry_of(int step) const {
        int key = first_key(step);
        if (!has_whole_steps()) key += lane % kWarpKeys;
        // That of a key which is there, unless the length was guessed: no row is copied of another.
        const int page = args.by_page.divide(min(max(key, begin), end - 1));
        return args.page_table + item.batch * args.page_table_stride + page;
    }
    FS_DEVICE int page_of(int step) const { return kPaged ? *entry_of(step) : 0; }

    // Keys that no row sees are not read, whatever is there: they are zero. By a wrong guess others
    // of the cache may be, and are copied over.
    FS_DEVICE void start_step(int step, int stage, int entry, NextRows& next_rows) const {
        const int key = first_key(step);
        if constexpr (kGoesOn) {
            start_rows(key, stage, next_rows);
            return;
        }
        if constexpr (kGoesOnInPages) {
            if (has_whole_steps()) {
                NextRows rows = rows_in_page(key, entry);
                start_rows(key, stage, rows);
                return;
            }
        }
        start_lanes_rows(key, stage, entry);
    }

    // Rows that lanes find one by one.
    FS_DEVICE void start_lanes_rows(int key, int stage, int entry) const {
        const int slot = kPaged ? slot_of(key + lane % kWarpKeys) : 0;
        if constexpr (Layout::kWidePanels > 0) start_panels<false>(key, stage, entry, slot);
        if constexpr (Layout::kHasNarrowPanel) start_panels<true>(key, stage, entry, slot);
    }

    // A bad number leads to some page of the cache.
    FS_DEVICE int page_number(int entry) const { return min(max(entry, 0), args.blocks - 1); }

    FS_DEVICE int slot_of(int key) const {
        return key - args.by_page.divide(key) * static_cast<int>(args.by_page.divisor);
    }
    // The lane's of the warp's keys of a step, all in one page. The page last: its number is what
    // all else waits for.
    FS_DEVICE NextRows rows_in_page(int first_key, int entry) const {
        const int slot = slot_of(first_key) + lane / 8, page = page_number(entry);
        const auto row = [&](const char* head, const DecodeStrides& strides) {
            return head + slot * strides.row * kElementBytes + lane % 8 * 16 +
                   page * strides.batch * kElementBytes;
        };
        return {row(k_head, args.k_cache_strides), row(v_head, args.v_cache_strides)};
    }

    FS_DEVICE void start_rows(int first_key, int stage, NextRows& next_rows) const {
        using Panel = typename Layout::template Panel<false>;
        constexpr int kRowStep = kWarpSize / Panel::kChunks;
        static_assert(Panel::kChunks == 8);
        const int row = lane / 8, chunk = lane % 8;
        const uint32_t target = K_tile(stage);
        const uint64_t hint = cache_hint(args.passes != 0);
        const char *k_row = next_rows.k, *v_row = next_rows.v;
#pragma unroll
        for (int i = 0; i < kWarpKeys; i += kRowStep) {
            const int key = first_key + row + i;
            const bool present = begin <= key && key < end;
            const uint32_t offset = Panel::offset(warp_slot() + row + i, chunk);
#pragma unroll
            for (int p = 0; p < Layout::kWidePanels; ++p) {
                const bool copied =
                    present && (!SEMANTICS.uneven || chunk * kChunkElements + 64 * p < args.d);
                const uint32_t place = target + p * Panel::kBytes + offset;
                cp_async_16B_or_zeros(place, k_row + p * 128, copied, hint);
                cp_async_16B_or_zeros(place + Layout::kBytes, v_row + p * 128, copied, hint);
            }
            k_row += kRowStep * args.k_cache_strides.row * kElementBytes;
            v_row += kRowStep * args.v_cache_strides.row * kElementBytes;
        }
        next_rows.k += Kernel::B_c * args.k_cache_strides.row * kElementBytes;
        next_rows.v += Kernel::B_c * args.v_cache_strides.row * kElementBytes;
    }

    template <bool kNarrow>
    FS_DEVICE void start_panels(int first_key, int stage, int entry, int slot) const {
        using Panel = typename Layout::template Panel<kNarrow>;
        constexpr int kPanels = kNarrow ? 1 : Layout::kWidePanels;
        constexpr int kFirstChunk = kNarrow ? 8 * Layout::kWidePanels : 0;
        constexpr int kRowStep = kWarpSize / Panel::kChunks;
        const int chunk = lane % Panel::kChunks;
        const uint64_t hint = cache_hint(args.passes != 0);
        const uint32_t target = K_tile(stage) + (kNarrow ? Layout::kNarrowOffset : 0);
#pragma unroll
        for (int i = 0; i < kWarpKeys / kRowStep; ++i) {
            const int row = lane / Panel::kChunks + i * kRowStep, key = first_key + row;
            const bool present = key >= begin && key < end;
            int64_t k_offset, v_offset;
            if constexpr (kPaged) {
                const int64_t block = page_number(__shfl_sync(kWholeWarp, entry, row));
                const int64_t in_block = __shfl_sync(kWholeWarp, slot, row);
                k_offset = block * args.k_cache_strides.batch + in_block * args.k_cache_strides.row;
                v_offset = block * args.v_cache_strides.batch + in_block * args.v_cache_strides.row;
            } else {
                k_offset = key * args.k_cache_strides.row;
                v_offset = key * args.v_cache_strides.row;
            }
            const int first = (kFirstChunk + chunk) * kChunkElements;
            const char* const k_row = k_head + (k_offset + first) * kElementBytes;
            const char* const v_row = v_head + (v_offset + first) * kElementBytes;
            const uint32_t offset = Panel::offset(warp_slot() + row, chunk);
#pragma unroll
            for (int p = 0; p < kPanels; ++p) {
                const bool copied = present && (!SEMANTICS.uneven || first + 64 * p < args.d);
                const uint32_t place = target + p * Panel::kBytes + offset;
                cp_async_16B_or_zeros(place, k_row + p * 128, copied, hint);
                cp_async_16B_or_zeros(place + Layout::kBytes, v_row + p * 128, copied, hint);
            }
        }
    }

    // ---- the algorithm ----

    // A operand of the scores: in registers, or read again in each step where there is no room.
    struct KeptQueries : InRegisters<Kernel::row_tiles, Kernel::d_steps> {
        FS_DEVICE KeptQueries(uint32_t tile, int lane, int row) {
            const RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles> rows(tile, lane, row);
#pragma unroll
            for (int step = 0; step < Kernel::d_steps; ++step)
                rows.load(this->fragments[step], step);
        }
    };
    struct ReadQueries : RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles> {
        FS_DEVICE ReadQueries(uint32_t tile, int lane, int row)
            : RowsA<typename Kernel::QueriesLayout, Kernel::row_tiles>(tile, lane, row) {}
    };
    using Queries = std::conditional_t<Kernel::keeps_queries, KeptQueries, ReadQueries>;

    FS_DEVICE void multiply_step(int step, int stage, const Queries& queries, Softmax& softmax,
                                 Sums& o) const {
        constexpr int kKeys = 8 * Kernel::key_tiles;
        const int key = Kernel::own_rows ? run_begin + step * Kernel::B_c : first_key(step);
        if (key >= seen_end || key + kKeys <= seen_begin) return;
        Scores scores;
        zero(scores);
        multiply<value_t, Kernel::d_steps>(scores, queries, RowsB<Layout>(K_tile(stage), lane));
        if constexpr (SEMANTICS.softcap) tanh_scaled(scores, args.softcap_scale_2log2e);
        if (key < full_begin || key + kKeys > full_end) mask(scores, key);
        softmax.template update<false>(scores, o);
        InRegisters<Kernel::row_tiles, Kernel::key_steps> probabilities;
        round_to<value_t>(probabilities, scores);
        multiply<value_t, Kernel::key_steps>(o, probabilities,
                                             ColumnsB<Layout, 1>(V_tile(stage), lane));
    }

    FS_DEVICE void mask(Scores& scores, int first_key) const {
        const int first_column = first_key + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < Kernel::row_tiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const KeyRange keys = keys_of_row(warp_row() + 16 * m + 8 * r + lane / 4);
#pragma unroll
                for (int n = 0; n < Kernel::key_tiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (!keys.contains(first_column + 8 * n + e))
                            scores[m][n][2 * r + e] = -INFINITY;
            }
    }

    // ---- the epilogue ----

    // Sums of 16 rows in a stage. Rows' groups of 8 columns are swapped, so that four neighbouring
    // rows lie in different banks.
    FS_DEVICE uint32_t sums(int of_warp, int stage, int row, int column) const {
        return smem + Kernel::ring_offset + of_warp * Kernel::ring_bytes +
               stage * Kernel::stage_bytes +
               (row * Kernel::d_head + ((column ^ (row & 3) << 3))) * 4;
    }
    FS_DEVICE uint32_t statistics(int of_warp, int row) const {
        return smem + Kernel::statistics_offset + (of_warp * Kernel::B_r + row) * 8;
    }

    // The warps' states through shared memory, merged in the warps' order; and the part's with
    // those before it in the run.
    FS_DEVICE void exchange(int parts_left, int stage, const Softmax& softmax, const Sums& o,
                            Kept& kept) const {
        constexpr int kColumns = Kernel::d_head / 4;
        const int lane = lane_index();  // no address from it is worth a register in the steps
        // Of four neighbouring tiles of columns, the others are 128 bytes apart.
        uint32_t first_sums[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            first_sums[n] = sums(warp, stage, lane / 4, 8 * n + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < Kernel::row_tiles; ++m) {
            if (m > 0 && 16 * m >= rows) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 8 * r + lane / 4;
                const float sum = quad_sum(softmax.row_sum[m][r]);
                if (16 * m + row >= rows) continue;
                if (lane % 4 == 0)
                    store_shared_8B(statistics(warp, 16 * m + row),
                                    {as_uint(softmax.offset[m][r]), as_uint(sum)});
#pragma unroll
                for (int n = 0; n < Kernel::column_tiles; ++n)
                    store_shared_8B(first_sums[n % 4] + (8 * r * Kernel::d_head + n / 4 * 32) * 4,
                                    {as_uint(o[m][n][2 * r]), as_uint(o[m][n][2 * r + 1])});
            }
            __syncthreads();
            const RunTarget target(smem + Kernel::target_offset);
            if constexpr (Kernel::has_clusters)
                if (args.cluster_levels > 0 && m == 0 && parts_left == 1) cluster_wait();
            const int units = min(rows - 16 * m, 16) * kColumns;
            bool at_once = false;
            if constexpr (kAtOnce > 1) {
                at_once = is_at_once(target);
                if (at_once)
                    for (int i = thread_index(); i < units; i += kAtOnce * Kernel::n_threads)
                        finish_at_once(target, target.end_part - parts_left, stage, m, i, units,
                                       kept);
            }
            if (!at_once) {
                for (int i = thread_index(); i < units; i += Kernel::n_threads) {
                    const int row = i / kColumns, column = i % kColumns * 4;
                    finish_part(target, target.end_part - parts_left,
                                state_of_warps(stage, m, row, column), 16 * m + row, column);
                }
            }
            __syncthreads();  // copies, or other rows, take the place of these states
        }
    }

    // What the cluster has to do beside the CTA's run. One without a run merges, too.
    FS_DEVICE void begin_in_cluster() const {
        ClusterMerge<Kernel>(args, smem, rows).expect(rows, item.sequence.runs);
        if (item.first_part < item.end_part) return;
        if (thread_index() == 0)
            RunTarget::keep(smem + Kernel::target_offset, item, args.heads_per_group);
        __syncthreads();
        // Whoever arrives waits, too: racecheck has no end otherwise.
        cluster_wait();
    }
    FS_DEVICE void merge_in_cluster() const {
        const RunTarget target(smem + Kernel::target_offset);
        const ClusterMerge<Kernel> cluster(args, smem, rows);
        const int columns = cluster.own_columns(rows);
        if (target.runs() == 1 || thread_index() >= columns) return;
        mbarrier_wait(cluster.barrier, 0);
        for (int i = thread_index(); i < columns; i += Kernel::n_threads) {
            const int index = cluster.index_of(i), row = index / cluster.kColumns;
            store_merged(target, cluster.merged(target.runs(), i), target.tile * Kernel::B_r + row,
                         index % cluster.kColumns * 4);
        }
    }

    FS_DEVICE RowState state_of_warps(int stage, int m, int row, int column) const {
        RowState state, of_warps[Kernel::n_warps];
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w) {
            of_warps[w] = RowState(load_shared_float2(statistics(w, 16 * m + row)),
                                   load_shared_16B(sums(w, stage, row, column)));
            state.maximum = fmaxf(state.maximum, of_warps[w].maximum);
        }
        // Without branches, which sums would wait for one after another.
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w) state.add_if_any(of_warps[w]);
        return state;
    }

    // Whether threads have more than one place in a run of more than one part. Where they have not,
    // the code for several, which a small call would fetch for a single use, costs 0.3 to 0.7 us.
    FS_DEVICE bool is_at_once(const RunTarget& target) const {
        return target.run_levels > 0 && min(rows, 16) * (Kernel::d_head / 4) > Kernel::n_threads;
    }

    // The same of several places, n_threads apart from `first` on, whose loads and sums do not wait
    // for each other. Behind the last it has that once more, and stores nothing.
    FS_DEVICE void finish_at_once(const RunTarget& target, int part, int stage, int m, int first,
                                  int units, KeptColumns& kept) const {
        constexpr int kColumns = Kernel::d_head / 4;
        int row[kAtOnce], column[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int index = min(first + i * Kernel::n_threads, units - 1);
            row[i] = index / kColumns;
            column[i] = index % kColumns * 4;
        }
        RowState states[kAtOnce];
        states_of_warps(states, stage, m, row, column);
        const bool is_last = part + 1 == target.end_part;  // of the run
        int level = 0;
        if constexpr (kKeepsStates) {
            if ((part & 1) != 0) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) states[i].join_behind(kept.states[i]);
            } else if (!is_last) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) kept.states[i] = states[i];
                return;
            }
            level = 1;
        }
        bool is_kept = false;
        for (; level < target.run_levels; ++level) {
            if ((part >> level & 1) != 0) {
                RowState before[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    before[i] =
                        kept_state<kKeepsStates>(target, part, level, 16 * m + row[i], column[i]);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) states[i].join_behind(before[i]);
            } else if (!is_last) {
                is_kept = true;
                break;
            }
        }
        // One after another: it is the length of the code that counts here.
#pragma unroll 1
        for (int i = first; i < min(first + kAtOnce * Kernel::n_threads, units);
             i += Kernel::n_threads) {
            if (is_kept)
                keep_state<kKeepsStates>(states[0], target, part, level, 16 * m + i / kColumns,
                                         i % kColumns * 4);
            else
                finish_run(target, states[0], 16 * m + i / kColumns, i % kColumns * 4);
#pragma unroll
            for (int next = 1; next < kAtOnce; ++next) states[next - 1] = states[next];
        }
    }

    FS_DEVICE void states_of_warps(RowState (&states)[kAtOnce], int stage, int m,
                                   const int (&row)[kAtOnce], const int (&column)[kAtOnce]) const {
        float2 of_warps[kAtOnce][Kernel::n_warps];
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w)
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                of_warps[i][w] = load_shared_float2(statistics(w, 16 * m + row[i]));
                states[i].maximum = fmaxf(states[i].maximum, of_warps[i][w].x);
            }
#pragma unroll
        for (int w = 0; w < Kernel::n_warps; ++w)
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                states[i].add_if_any(
                    RowState(of_warps[i][w], load_shared_16B(sums(w, stage, row[i], column[i]))));
    }

    // Merges a part's state with those of subtrees that it completes, and keeps the sum until the
    // keys behind it are done. A run that ends early, with its sequence, completes all that it has.
    FS_DEVICE void finish_part(const RunTarget& target, int part, RowState state, int row,
                               int column) const {
        for (int level = 0; level < target.run_levels; ++level) {
            if ((part >> level & 1) != 0) {
                state.join_behind(kept_state(target, part, level, row, column));
            } else if (part + 1 < target.end_part) {
                keep_state(state, target, part, level, row, column);
                return;
            }
        }
        finish_run(target, state, row, column);
    }

    // Stores the state of a run.
    FS_DEVICE void finish_run(const RunTarget& target, const RowState& state, int row,
                              int column) const {
        const int of_head = target.tile * Kernel::B_r + row;
        if (!target.has_all_parts()) {
            if constexpr (Kernel::has_clusters) {
                if (args.cluster_levels > 0) {
                    ClusterMerge<Kernel>(args, smem, rows)
                        .push(state, target.first_part >> target.run_levels,
                              row * (Kernel::d_head / 4) + column / 4);
                    return;
                }
            }
            if constexpr (Kernel::has_arrivals) {
                if (target.parts <= args.most_arriving) {
                    ArrivingStates<Kernel>(args, target.head_k, target.rows, target.parts)
                        .send(state, target.first_part, of_head, column);
                    return;
                }
            }
            states(target).store(state, target.first_part, of_head, column);
            return;
        }
        store_merged(target, state, of_head, column);
    }

    // A row of the K/V head over all keys.
    FS_DEVICE void store_merged(const RunTarget& target, const RowState& state, int of_head,
                                int column) const {
        const int query = args.by_group.divide(of_head);
        const int head =
            target.head_k * args.heads_per_group + of_head - query * args.heads_per_group;
        store_row<value_t>(args, state, row_end(args, state, head), target.batch,
                           target.first_query, query, head, column);
    }

    // The state of a subtree of 2^level parts, `part` the last of it, or of the one behind it: in
    // shared memory, from level kFirst on and as far as there is room, or at the place of the part
    // behind the subtree, which holds no run's state: threads may still read it when the row's
    // first one stores that. A thread reads back its own sums; statistics are those of the row's
    // first, of an earlier part.
    FS_DEVICE uint32_t kept_place(int level) const {
        return smem + Kernel::kept_states_offset + level * args.kept_level_bytes;
    }
    FS_DEVICE uint32_t kept_statistics() const { return args.slot_rows * Kernel::d_head * 4; }
    FS_DEVICE PartStates<Kernel> states(const RunTarget& target) const {
        return PartStates<Kernel>(args, target.batch, target.head_k, target.rows, target.parts);
    }
    template <int kFirst = 0>
    FS_DEVICE RowState kept_state(const RunTarget& target, int part, int level, int row,
                                  int column) const {
        if (level >= args.kept_levels + kFirst)
            return states(target).load(part >> level << level, target.tile * Kernel::B_r + row,
                                       column);
        const uint32_t place = kept_place(level - kFirst);
        return RowState(load_shared_float2(place + kept_statistics() + row * 8),
                        load_shared_16B(place + (row * Kernel::d_head + column) * 4));
    }
    template <int kFirst = 0>
    FS_DEVICE void keep_state(const RowState& state, const RunTarget& target, int part, int level,
                              int row, int column) const {
        if (level >= args.kept_levels + kFirst) {
            states(target).store(state, part + 1, target.tile * Kernel::B_r + row, column);
            return;
        }
        const uint32_t place = kept_place(level - kFirst);
        store_shared_16B(place + (row * Kernel::d_head + column) * 4, state.bits_of_sums());
        if (column == 0)
            store_shared_8B(place + kept_statistics() + row * 8, state.bits_of_statistics());
    }
};

template <class Kernel, bool kPaged>
FS_DEVICE void compute_parts(const DecodeKernelArgs& args, uint32_t smem) {
    constexpr bool kGuesses = Kernel::has_preamble && !Kernel::SEMANTICS.packed;
    // Where nothing is appended, lengths may be of the launch before. Until that is over what is
    // there is a guess, and mostly right: they change once for all layers of a model.
    Lengths lengths;
    if constexpr (kGuesses) lengths.are_guessed = (args.flags & kGuessesLengths) != 0;
    const int32_t* const own_length = args.cache_lens + min(lane_index(), args.batch - 1);
    if (lengths.are_guessed)
        lengths.guess = load_relaxed(own_length);
    else
        prefetch_lengths<Kernel>(args);
    if constexpr (!kPaged && !Kernel::takes_chunks && !Kernel::SEMANTICS.packed &&
                  Kernel::SEMANTICS.mask != MaskKind::window && Kernel::has_whole_runs)
        if ((args.flags & kPrefetchesRuns) != 0) prefetch_run<Kernel>(args);
    if constexpr (Kernel::has_preamble && Kernel::SEMANTICS.mask != MaskKind::window)
        if (args.log2_prefetched_keys > 0) prefetch_first_keys<Kernel, kPaged>(args);
    const bool in_cluster =
        Kernel::has_clusters && !Kernel::takes_chunks && args.cluster_levels > 0;
    if constexpr (Kernel::has_clusters && !Kernel::takes_chunks)
        if (in_cluster) ClusterMerge<Kernel>::begin(args, smem);
    if (!lengths.are_guessed && args.new_k == nullptr) wait_for_launch_before();
    DecodeItem item{};
    ItemSearch search(Kernel::takes_chunks ? 0 : share_of_cta<Kernel>(args, lengths),
                      block_index());
    bool found = find_item<Kernel>(args, search, item, lengths);
    int length = 0;
    const auto begin_launch = [&] {
        // In this order: the merge reads lengths before it waits.
        wait_for_launch_before();
        if (!Kernel::has_whole_runs || (args.flags & kHoldsNextLaunch) == 0) allow_next_launch();
        // It comes while the copies of the guessed run's first keys are on their way.
        if (lengths.are_guessed) length = *own_length;
    };
    // With the first run: what does not need the launch before is done until then.
    bool begins = !Kernel::takes_chunks && (found || lengths.are_guessed);
    if (!begins) begin_launch();
    if constexpr (Kernel::takes_chunks) {
        // Each search from the first sequence on: no register is left to remember where it was.
        for (uint32_t turn = 1; found; ++turn) {
            const DecodeRun<Kernel, kPaged> run(args, item, smem);
            auto copies = run.first_copies(false);
            run.start(copies);
            run.run(copies, search, 0);
            search = ItemSearch(0, block_index() + turn * gridDim.x);
            found = find_item<Kernel>(args, search, item);
        }
        return;
    }
    // Two places by turns: threads may still read one when the next search comes.
    uint32_t place = smem + Kernel::search_offset;
    while (found || lengths.are_guessed) {
        const DecodeRun<Kernel, kPaged> run(args, item, smem);
        const bool has_run = found && (!Kernel::has_clusters || item.first_part < item.end_part);
        auto copies = run.first_copies(lengths.are_guessed);
        if (begins) {
            copies.materialize();
            begin_launch();
            if constexpr (kPaged)
                if (lengths.are_guessed) copies.pages.read_again(copies.first_step < copies.steps);
            begins = false;
        }
        if (has_run) run.start(copies);
        if (lengths.are_guessed) {
            lengths.are_guessed = false;
            // By each warp for itself: another one may have guessed something else. A thread's new
            // copies have the places of those that it has waited for.
            bool is_right = length == lengths.guess;
            if constexpr (kPaged) is_right &= copies.pages.are_as_guessed();
            if (!__all_sync(kWholeWarp, is_right)) {
                cp_async_wait<0>();
                search = ItemSearch(share_of_cta<Kernel>(args), block_index());
                found = find_item<Kernel>(args, search, item);
                continue;
            }
            if (!found) return;
        }
        if constexpr (Kernel::has_clusters)
            if (in_cluster) run.begin_in_cluster();
        if (has_run) run.run(copies, search, place);
        if constexpr (Kernel::has_clusters) {
            if (in_cluster) {
                run.merge_in_cluster();
                return;
            }
        }
        search = ItemSearch(place);
        place ^= ItemSearch::kBytes;
        found = find_item<Kernel>(args, search, item);
    }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads, Kernel::min_ctas)
    decode_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<Kernel, false>(args, shared_address(shared_memory));
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::n_threads, Kernel::min_paged_ctas)
    decode_paged_kernel(const DecodeKernelArgs args) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    compute_parts<Kernel, true>(args, shared_address(shared_memory));
}

}  // namespace flashsmith
