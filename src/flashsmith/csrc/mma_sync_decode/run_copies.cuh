// The copies of a run: its queries, and its keys and values step by step, from a dense cache or
// from pages. Each warp copies its own keys, every n_warps-th group of warp_keys keys of a part.
#pragma once

#include "common/opaque.cuh"
#include "mma_sync_decode/program_tile.cuh"

namespace flashsmith {

template <class Kernel, bool kPaged>
struct RunCopies : ProgramTile<Kernel, kPaged> {
    using Tile = ProgramTile<Kernel, kPaged>;
    using KeysLayout = typename Kernel::KeysLayout;
    using ValuesLayout = typename Kernel::ValuesLayout;
    using Tile::args, Tile::begin, Tile::end, Tile::first_row, Tile::item, Tile::k_head, Tile::lane,
        Tile::kSkips, Tile::next_visited, Tile::query_of_row, Tile::ring, Tile::rows,
        Tile::run_begin, Tile::smem, Tile::v_head, Tile::warp;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kWarpKeys = Kernel::warp_keys;
    static constexpr int kStages = Kernel::stages;
    // For the cache: the bytes of an element, the elements in 16 bytes, and the elements in a row
    // of a panel.
    static constexpr int kBytes = Kernel::cache_bytes;
    static constexpr int kVector = kChunkBytes / kBytes, kPanelElements = 128 / kBytes;
    // Whether rows in shared memory have more columns than a row of the cache may have.
    static constexpr int kKeyBytes = kBytes * Kernel::d_head, kValueBytes = kBytes * Kernel::d_v;
    static constexpr bool kCutsKeys = SEMANTICS.uneven || Kernel::CFG.key_bytes() > kKeyBytes;
    static constexpr bool kCutsValues = SEMANTICS.uneven || Kernel::CFG.value_bytes() > kValueBytes;
    // Whether all panels are wide, and the most panels of a tile.
    static constexpr bool kAreWide = !KeysLayout::kHasNarrowPanel && !ValuesLayout::kHasNarrowPanel;
    static constexpr bool kAnyNarrow = KeysLayout::kHasNarrowPanel || ValuesLayout::kHasNarrowPanel;
    static constexpr int kMostWidePanels =
        std::max(KeysLayout::kWidePanels, ValuesLayout::kWidePanels);

    using Tile::Tile;

    // Whether a lane steps from row to row of a dense cache instead of locating each row by its
    // number.
    static constexpr bool kGoesOn = !kPaged && !Kernel::takes_chunks && kAreWide;
    struct NextRows {
        const char *k, *v;  // the lane's first 16 bytes of the next step to be copied

        FS_DEVICE void materialize() { flashsmith::materialize(k, v); }
    };
    // Whether a lane may step from row to row in pages, too. It may if all of a warp's keys of a
    // step are in one page, which the host knows. In a rolling cache it may not, because tiles
    // begin anywhere in a page.
    static constexpr bool kGoesOnInPages = kPaged && !Kernel::takes_chunks && kAreWide;
    FS_DEVICE bool has_whole_steps() const {
        if (Kernel::canonical && SEMANTICS.hides_earlier && args.kv_offset != nullptr) return false;
        return kGoesOnInPages && args.by_page.divisor % kWarpKeys == 0;
    }

    // Page-table entries for a run's first copies, and the entry for the first copy during the
    // steps.
    struct FirstPages {
        static constexpr int kCount = kPaged && !kSkips ? kStages : 0, kRoom = std::max(kCount, 1);
        const int32_t* places[kRoom];
        int entries[kRoom];
        int now[kRoom];  // the true values of guessed entries, read after the wait
        NextRows rows[kGoesOnInPages ? kStages - 1 : 1];  // if a warp's keys of a step share a page

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

    // If steps are skipped: the steps whose copies are under way, in order, and the step to copy
    // next with its page-table entry. They are known once the copies have started.
    struct Visits {
        int steps[kSkips ? kStages : 1];
        int entry;
        typename Tile::KnownSteps known;

        // Removes the first step, and appends `next`, the step to copy after the last one. Returns
        // the new first step.
        FS_DEVICE int advance(int next) {
#pragma unroll
            for (int i = 1; i < kStages; ++i) steps[i - 1] = steps[kSkips ? i : 0];
            steps[kSkips ? kStages - 1 : 0] = next;
            return steps[0];
        }
    };

    // The state of a run's copies: the next step and its source.
    struct Copies {
        int first_step, steps;
        NextRows next_rows;
        FirstPages pages;
        Visits visits;

        // Keeps the compiler from deferring the computation of these values.
        FS_DEVICE void materialize() {
            flashsmith::materialize(first_step, steps);
            if constexpr (kGoesOn) next_rows.materialize();
            pages.materialize();
        }
    };

    // The initial state. `guesses`: whether the page table is read before the preceding launch is
    // over.
    FS_DEVICE Copies first_copies(bool guesses) const {
        const int first_step = begin > run_begin ? (begin - run_begin) / Kernel::B_c : 0;
        const int steps = end > begin ? (end - run_begin + Kernel::B_c - 1) / Kernel::B_c : 0;

        Copies copies{first_step, steps, {}, {}, {}};
        if constexpr (kGoesOn) copies.next_rows = rows_from(first_key(first_step));
        if constexpr (kPaged && !kSkips) {
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

    // Starts the copies of the first stages and of the queries.
    FS_DEVICE void start(Copies& copies) const {
        const int first_step = copies.first_step, steps = copies.steps;
        if constexpr (kSkips) {
            start_visited(copies);
            return;
        }
        if constexpr (kPaged) {
            if (!has_whole_steps()) {  // such code is too long to repeat for each stage
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
            if (i == 0) start_queries();  // joins the copies of the first step
            cp_async_commit();
        }
    }

    FS_DEVICE void start_visited(Copies& copies) const {
        Visits& visits = copies.visits;
        start_queries();
        int step = copies.first_step;
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            step = next_visited(step, copies.steps, visits.known);
            visits.steps[i] = step;
            visits.entry = step < copies.steps ? page_of(step) : 0;
            if (i == kStages - 1) break;
            if (step < copies.steps) start_step(step, i, visits.entry, copies.next_rows);
            cp_async_commit();
            ++step;
        }
    }

    // ---- queries ----

    // Rows that the tile does not have are zero-filled.
    FS_DEVICE void start_queries() const {
        constexpr int kChunks = Kernel::d_head / kChunkElements;
        using QueriesLayout = typename Kernel::QueriesLayout;
        constexpr int kAll = Kernel::B_r * kChunks;
        const int head_q = item.head_k * args.heads_per_group;
#pragma unroll
        for (int first = 0; first < kAll; first += Kernel::n_threads) {
            // Unsigned, so that divisions become shifts.
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
                row < rows && (!SEMANTICS.uneven || chunk * kChunkElements < d_of_qk<Kernel>(args));
            const uint32_t offset =
                chunk / 8 < QueriesLayout::kWidePanels
                    ? chunk / 8 * QueriesLayout::template Panel<false>::kBytes +
                          QueriesLayout::template Panel<false>::offset(row, chunk % 8)
                    : QueriesLayout::kNarrowOffset +
                          QueriesLayout::template Panel<true>::offset(row, chunk % 8);
            cp_async_16B_or_zeros(smem + Kernel::queries_offset + offset, source, present);
        }
    }

    // ---- keys ----

    // The warp's first row in a stage.
    FS_DEVICE int warp_slot() const { return Kernel::shares_stages ? warp * kWarpKeys : 0; }

    FS_DEVICE int first_key(int step) const {
        return run_begin + step * Kernel::B_c + warp * kWarpKeys;
    }
    FS_DEVICE uint32_t K_tile(int stage) const { return ring + stage * Kernel::stage_bytes; }
    FS_DEVICE uint32_t V_tile(int stage) const { return K_tile(stage) + KeysLayout::kBytes; }

    // The page-table entry for the lane's key of a step, or for all of the warp's keys. It is read
    // only if there is some key.
    FS_DEVICE const int32_t* entry_of(int step) const {
        int key = first_key(step);
        if (!has_whole_steps()) key += lane % kWarpKeys;
        // Clamped to an existing key, unless the length was guessed, since rows of other keys are
        // not copied.
        const int page = args.by_page.divide(min(max(key, begin), end - 1));
        return args.page_table + item.batch * args.page_table_stride + page;
    }
    FS_DEVICE int page_of(int step) const { return kPaged ? *entry_of(step) : 0; }

    // Keys that no row sees are zero-filled; their memory is not read and may hold anything. After
    // a wrong guess, other keys of the cache may be copied, which are overwritten later.
    FS_DEVICE void start_step(int step, int stage, int entry, NextRows& next_rows) const {
        const int key = first_key(step);
        if constexpr (kGoesOn) {
            if constexpr (kSkips) next_rows = rows_from(key);
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

    // Copies rows that lanes locate one by one.
    FS_DEVICE void start_lanes_rows(int key, int stage, int entry) const {
        const int slot = kPaged ? slot_of(key + lane % kWarpKeys) : 0;
        if constexpr (kMostWidePanels > 0) start_panels<false>(key, stage, entry, slot);
        if constexpr (kAnyNarrow) start_panels<true>(key, stage, entry, slot);
    }

    // Clamped, so that an invalid entry still refers to some page of the cache.
    FS_DEVICE int page_number(int entry) const { return min(max(entry, 0), args.blocks - 1); }

    FS_DEVICE int slot_of(int key) const {
        return key - args.by_page.divide(key) * static_cast<int>(args.by_page.divisor);
    }
    // The lane's first row, counted from a key of a dense cache.
    FS_DEVICE NextRows rows_from(int key) const {
        const int64_t row = key + lane / 8;
        return {k_head + row * args.k_cache_strides.row * kBytes + lane % 8 * 16,
                v_head + row * args.v_cache_strides.row * kBytes + lane % 8 * 16};
    }
    // The lane's row among the warp's keys of a step, which are all in one page. The page is added
    // last, because everything else waits for the page index.
    FS_DEVICE NextRows rows_in_page(int first_key, int entry) const {
        const int slot = slot_of(first_key) + lane / 8, page = page_number(entry);
        const auto row = [&](const char* head, const DecodeStrides& strides) {
            return head + slot * strides.row * kBytes + lane % 8 * 16 +
                   page * strides.batch * kBytes;
        };
        return {row(k_head, args.k_cache_strides), row(v_head, args.v_cache_strides)};
    }

    FS_DEVICE void start_rows(int first_key, int stage, NextRows& next_rows) const {
        using Panel = typename KeysLayout::template Panel<false>;
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
            for (int p = 0; p < kMostWidePanels; ++p) {
                const int element = chunk * kVector + kPanelElements * p;
                const bool of_key = present && (!kCutsKeys || element < d_of_qk<Kernel>(args));
                const bool of_value =
                    !Kernel::has_d_v ? of_key
                                     : present && (!kCutsValues || element < d_of_v<Kernel>(args));
                const uint32_t place = target + p * Panel::kBytes + offset;
                if (p < KeysLayout::kWidePanels)
                    cp_async_16B_or_zeros(place, k_row + p * 128, of_key, hint);
                if (p < ValuesLayout::kWidePanels)
                    cp_async_16B_or_zeros(place + KeysLayout::kBytes, v_row + p * 128, of_value,
                                          hint);
            }
            k_row += kRowStep * args.k_cache_strides.row * kBytes;
            v_row += kRowStep * args.v_cache_strides.row * kBytes;
        }
        next_rows.k += Kernel::B_c * args.k_cache_strides.row * kBytes;
        next_rows.v += Kernel::B_c * args.v_cache_strides.row * kBytes;
    }

    template <bool kNarrow>
    FS_DEVICE void start_panels(int first_key, int stage, int entry, int slot) const {
        using Panel = typename KeysLayout::template Panel<kNarrow>;
        constexpr int kKeyPanels = kNarrow ? KeysLayout::kHasNarrowPanel : KeysLayout::kWidePanels;
        constexpr int kValuePanels =
            kNarrow ? ValuesLayout::kHasNarrowPanel : ValuesLayout::kWidePanels;
        constexpr int kFirstOfKey = kNarrow ? 8 * KeysLayout::kWidePanels : 0;
        constexpr int kFirstOfValue = kNarrow ? 8 * ValuesLayout::kWidePanels : 0;
        // The distance from a panel of keys to the panel of values.
        constexpr int kToValues =
            KeysLayout::kBytes +
            (kNarrow ? ValuesLayout::kNarrowOffset - KeysLayout::kNarrowOffset : 0);
        constexpr int kRowStep = kWarpSize / Panel::kChunks;
        const int chunk = lane % Panel::kChunks;
        const uint64_t hint = cache_hint(args.passes != 0);
        const uint32_t target = K_tile(stage) + (kNarrow ? KeysLayout::kNarrowOffset : 0);
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
            const int k_first = (kFirstOfKey + chunk) * kVector;
            const int v_first = (kFirstOfValue + chunk) * kVector;
            const char* const k_row = k_head + (k_offset + k_first) * kBytes;
            const char* const v_row = v_head + (v_offset + v_first) * kBytes;
            const uint32_t offset = Panel::offset(warp_slot() + row, chunk);
#pragma unroll
            for (int p = 0; p < (kKeyPanels > kValuePanels ? kKeyPanels : kValuePanels); ++p) {
                const bool of_key =
                    present && (!kCutsKeys || k_first + kPanelElements * p < d_of_qk<Kernel>(args));
                const bool of_value =
                    !Kernel::has_d_v
                        ? of_key
                        : present &&
                              (!kCutsValues || v_first + kPanelElements * p < d_of_v<Kernel>(args));
                const uint32_t place = target + p * Panel::kBytes + offset;
                if (p < kKeyPanels) cp_async_16B_or_zeros(place, k_row + p * 128, of_key, hint);
                if (p < kValuePanels)
                    cp_async_16B_or_zeros(place + kToValues, v_row + p * 128, of_value, hint);
            }
        }
    }
};

}  // namespace flashsmith
