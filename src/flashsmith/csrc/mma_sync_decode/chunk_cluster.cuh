// Canonical chunks that the CTAs of a cluster compute together, for calls with too few tiles to
// fill the GPU (docs/bits.md).
//
// In a round, CTA i of n computes the scores of the i-th of n tiles and copies them to the others.
// Each CTA then has the scores of all n tiles. It turns them into probabilities and multiplies
// these by its own columns of V.
//
// A round is as long as the longest list of instructions of one warp, so each warp has one task:
// scores, sending them, probabilities, P V (one chain of MMAs, which limits a chunk's speed), or
// copies of V. The sender is a separate warp for another reason, too: at the fence before a copy,
// other warps would have to wait for their copies in flight.
//
// Tiles have at most eight rows. The other rows of an MMA's sixteen are zero.
//
// With keys_first, copies of a CTA's first keys precede those of values: the warps that copy V
// begin after them, and no score waits until these warps have issued their copies. Lengths are
// loaded before all copies. P V loads the operands of the next tiles between the MMAs of a tile,
// since loads queue behind copies.
#pragma once

#include <bit>

#include "common/barrier.cuh"
#include "common/canonical.cuh"
#include "common/changed_scores.cuh"
#include "common/warp_mma.cuh"
#include "mma_sync_decode/run_copies.cuh"

namespace flashsmith {

// Shared memory of such a kernel: byte offsets from its start.
template <class Kernel>
struct ChunkClusterLayout {
    static constexpr int kCtas = Kernel::chunk_cluster;
    static constexpr int kScoreWarps = Kernel::n_warps;
    static constexpr int kProbabilityWarps = Kernel::CFG.probability_warps();
    static constexpr int kColumnWarps = Kernel::CFG.column_warps();
    static constexpr int kValueWarps = Kernel::CFG.value_warps();
    static constexpr int kTileGroups = Kernel::B_c / 16;  // groups of 16 keys in a tile
    static constexpr int kGroups = kCtas * kTileGroups;   // in a round
    // Each probability warp has every n-th tile of a round: one in each wave.
    static constexpr int kWaves = Kernel::CFG.cluster_waves();

    static constexpr int K_stage = Kernel::KeysLayout::kBytes;  // of one warp
    static constexpr int K_offset = Kernel::ring_offset;
    // For one warp: 8 columns of all keys. The gap lets a copy's columns go to different banks.
    static constexpr int V_columns = kGroups * 16 * 16 + 64;
    static constexpr int V_stage = kColumnWarps * V_columns;
    static constexpr int V_offset = K_offset + kScoreWarps * Kernel::stages * K_stage;
    // The scores of two rounds with up to kBufferedRows rows, or of one with eight. A row of a tile
    // has a lane's four scores of each 16 keys, and the maxima over each score warp's keys.
    static constexpr int scores_offset = V_offset + Kernel::stages * V_stage;
    static constexpr int row_scores = kTileGroups * 64, row_bytes = row_scores + kScoreWarps * 4;
    static constexpr int kBufferedRows = Kernel::CFG.cluster_buffered_rows();
    // Two buffers of P. Each also has the tiles' sums by lane, and for each row and tile the factor
    // for earlier sums and the maximum so far.
    static constexpr int P_offset = scores_offset + 2 * kBufferedRows * kCtas * row_bytes;
    static constexpr int P_sums = kGroups * 256, P_factors = P_sums + kCtas * 128;
    static constexpr int P_maxima = P_factors + kCtas * 32, P_bytes = P_maxima + kCtas * 32;
    static constexpr int barriers_offset = P_offset + 2 * P_bytes;
    static constexpr int kBarriers = 6 + 2 * kWaves + 2 * Kernel::stages;
    static constexpr int target_offset = barriers_offset + 8 * kBarriers;
    static_assert(target_offset + 48 == Kernel::CFG.smem_bytes());
};

template <class Kernel, bool kPaged>
struct ChunkCluster : RunTile<Kernel, kPaged> {
    using Tile = RunTile<Kernel, kPaged>;
    using Layout = typename Kernel::KeysLayout;
    using value_t = typename Kernel::value_t;
    using Places = ChunkClusterLayout<Kernel>;
    using Tile::args, Tile::begin, Tile::end, Tile::full_begin, Tile::full_end, Tile::item,
        Tile::k_head, Tile::keys_of_row, Tile::lane, Tile::rows, Tile::run_begin, Tile::smem,
        Tile::states, Tile::v_head, Tile::warp;
    using Rows = CanonicalRows<1>;
    using Sums = float[2];  // a lane's columns of its row
    static constexpr bool kKeysFirst = Kernel::keys_first;
    static constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    static constexpr int kCtas = Places::kCtas, kStages = Kernel::stages;
    static constexpr int kWarpKeys = Kernel::warp_keys, kTileGroups = Places::kTileGroups;
    static constexpr int kMostRows = 8, kWaves = Places::kWaves;
    static constexpr int kScoreWarps = Places::kScoreWarps, kColumnWarps = Places::kColumnWarps;
    static constexpr int kProbabilityWarps = Places::kProbabilityWarps;
    static constexpr int kFirstColumnWarp = kScoreWarps + kProbabilityWarps;
    static constexpr int kFirstValueWarp = kFirstColumnWarp + kColumnWarps;
    static constexpr int kWarps = Kernel::n_threads / kWarpSize;
    static_assert(kWarps == kFirstValueWarp + Places::kValueWarps + 1);
    // The warps that copy the values of a stage: every kStages-th.
    static constexpr int kStageWarps = Places::kValueWarps / kStages;
    // The keys that these warps copy at a time: a power of two, which divides a tile's keys.
    static constexpr int kValueKeys =
        std::bit_floor(uint32_t{kStageWarps * kWarpSize / kColumnWarps});

    const int rank = cluster_rank();
    int first_step, steps;  // counted in tiles from the run's first key
    static constexpr int kChunkSteps = kCanonicalChunk / Kernel::B_c;

    FS_DEVICE ChunkCluster(const DecodeKernelArgs& args, const DecodeItem& item, uint32_t smem)
        : Tile(args, item, smem),
          first_step(begin > run_begin ? (begin - run_begin) / Kernel::B_c : 0),
          steps(end > begin ? (end - run_begin + Kernel::B_c - 1) / Kernel::B_c : 0) {}

    // Must run before any CTA sends, and the cluster must synchronise after it.
    FS_DEVICE static void init_barriers(uint32_t smem) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(scores_full(smem, i), 1);
            mbarrier_init(scores_free(smem, i), kCtas * kProbabilityWarps);
            for (int wave = 0; wave < kWaves; ++wave)
                mbarrier_init(P_full(smem, i, wave), kProbabilityWarps);
            mbarrier_init(P_free(smem, i), kColumnWarps);
        }
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(V_full(smem, i), kStageWarps);
            mbarrier_init(V_free(smem, i), kColumnWarps);
        }
        mbarrier_init_fence();
    }

    // Keeps the compiler from deferring the computation of these values.
    FS_DEVICE void materialize() {
        flashsmith::materialize(run_begin, begin);
        flashsmith::materialize(end, first_step);
        flashsmith::materialize(full_begin, full_end);
        flashsmith::materialize(k_head, v_head);
    }
    // Starts the copies of the first stages.
    FS_DEVICE void start() const {
        if (warp < kScoreWarps) {
            Copies copies{first_step, 0};
#pragma unroll 1
            for (int i = 0; i < kStages; ++i) start_next_keys(copies);
            return;
        }
        if constexpr (kKeysFirst) {
            if (warp < kFirstValueWarp) start_queries();
            cp_async_commit();
            return;
        }
        start_queries();
        cp_async_commit();
        if (is_value_warp()) start_values(first_step_of_stage(), value_stage());
        cp_async_commit();
    }
    FS_DEVICE void run() const {
        if (thread_index() == 0)
            RunInfo::save(smem + Places::target_offset, item, args.heads_per_group);
        if (warp < kScoreWarps)
            compute_scores();
        else if (warp < kFirstColumnWarp && rows <= 4)
            compute_probabilities<true>();
        else if (warp < kFirstColumnWarp)
            compute_probabilities<false>();
        else if (warp < kFirstValueWarp)
            multiply_values();
        else if (is_value_warp())
            copy_values();
        else
            send_scores();
    }

  private:
    // ---- rounds ----

    // Tiles of a round that begins at `step`: a round does not cross the end of a chunk.
    FS_DEVICE int tiles_at(int step) const {
        const int chunk_end = (step | (kChunkSteps - 1)) + 1;
        return max(min(kCtas, min(steps, chunk_end) - step), 0);
    }

    FS_DEVICE static uint32_t barrier(uint32_t smem, int index) {
        return smem + Places::barriers_offset + 8 * index;
    }
    FS_DEVICE static uint32_t scores_full(uint32_t smem, int i) { return barrier(smem, i); }
    FS_DEVICE static uint32_t scores_free(uint32_t smem, int i) { return barrier(smem, 2 + i); }
    FS_DEVICE static uint32_t P_free(uint32_t smem, int i) { return barrier(smem, 4 + i); }
    FS_DEVICE static uint32_t P_full(uint32_t smem, int i, int wave) {
        return barrier(smem, 6 + i * kWaves + wave);
    }
    FS_DEVICE static uint32_t V_full(uint32_t smem, int i) {
        return barrier(smem, 6 + 2 * kWaves + i);
    }
    FS_DEVICE static uint32_t V_free(uint32_t smem, int i) {
        return barrier(smem, 6 + 2 * kWaves + kStages + i);
    }
    // The next stage; `wraps` changes when the stages begin again.
    FS_DEVICE static void next_stage(int& stage, int& wraps) {
        stage = stage == kStages - 1 ? 0 : stage + 1;
        wraps ^= stage == 0 ? 1 : 0;
    }
    FS_DEVICE uint32_t P_buffer(int i) const {
        return smem + Places::P_offset + i * Places::P_bytes;
    }
    FS_DEVICE int row() const { return lane / 4; }

    // ---- copies ----

    // The threads that copy no keys copy the queries of the tile. Rows that it does not have are
    // zero-filled. With keys_first only warps that copy nothing else copy queries, mostly one piece
    // per thread. Rows from kMostRows on are always zero.
    FS_DEVICE void start_queries() const {
        constexpr int kThreads =
            kWarpSize * ((kKeysFirst ? kFirstValueWarp : kWarps) - kScoreWarps);
        constexpr int kRows = kKeysFirst ? kMostRows : Kernel::B_r;
        constexpr int kChunks = Kernel::d_head / kChunkElements;
        using QueriesLayout = typename Kernel::QueriesLayout;
        const int head_q = item.head_k * args.heads_per_group;
        for (int i = thread_index() - kWarpSize * kScoreWarps; i < kRows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int query = this->query_of_row(row);
            const int head = head_q + this->first_row + row - query * args.heads_per_group;
            const char* source = static_cast<const char*>(args.q) +
                                 (item.batch * args.q_strides.batch +
                                  int64_t{item.sequence.first_query + query} * args.q_strides.row +
                                  head * args.q_strides.head + chunk * kChunkElements) *
                                     kElementBytes;
            const bool present =
                row < rows && (!SEMANTICS.uneven || chunk * kChunkElements < args.d);
            const auto offset = [&](int of_row) {
                return chunk / 8 < QueriesLayout::kWidePanels
                           ? chunk / 8 * QueriesLayout::template Panel<false>::kBytes +
                                 QueriesLayout::template Panel<false>::offset(of_row, chunk % 8)
                           : QueriesLayout::kNarrowOffset +
                                 QueriesLayout::template Panel<true>::offset(of_row, chunk % 8);
            };
            const uint32_t tile = smem + Kernel::queries_offset;
            cp_async_16B_or_zeros(tile + offset(row), source, present);
            if constexpr (kKeysFirst)
                store_shared_16B(tile + offset(kMostRows + row), {0, 0, 0, 0});
        }
    }
    // Waits until the queries have arrived. With keys_first the warps that copy V need not wait.
    FS_DEVICE static void wait_for_queries() {
        if constexpr (kKeysFirst)
            named_barrier_wait(kQueriesBarrier, kWarpSize * (kWarps - Places::kValueWarps));
        else
            __syncthreads();
    }
    static constexpr int kQueriesBarrier = 1, kKeysBarrier = 4;
    static constexpr int kKeysThreads = kWarpSize * (kScoreWarps + Places::kValueWarps);

    FS_DEVICE bool is_visible(int key) const { return begin <= key && key < end; }

    // The offset in elements of a key's row of the cache from the head's first row. An invalid page
    // index still refers to some page of the cache.
    FS_DEVICE int64_t row_offset(int key, const DecodeStrides& strides) const {
        if constexpr (!kPaged) return key * strides.row;
        const int there = min(max(key, begin), end - 1);  // clamped to a key that has a page
        const int page = args.by_page.divide(there);
        const int entry = args.page_table[item.batch * args.page_table_stride + page];
        const int slot = there - page * static_cast<int>(args.by_page.divisor);
        return min(max(entry, 0), args.blocks - 1) * strides.batch + slot * strides.row;
    }

    // The warp copies `keys` keys from `first` on. This lane copies 16 bytes of every kStep-th of
    // them, from the `lane_key`-th on, to `target` and each kTargetStep bytes after it. Keys that
    // no row sees are zero-filled. A dense cache needs one address, and keys that are all visible
    // need no comparison: each instruction matters here.
    template <int kStep, int kTargetStep, int kKeys>
    FS_DEVICE void copy_column(const char* head, const DecodeStrides& strides, int element,
                               int first, int lane_key, int keys, uint32_t target,
                               bool exists) const {
        const int key = first + lane_key;
        const uint64_t hint = cache_hint(args.passes != 0);
        const char* source = head + (row_offset(key, strides) + element) * kElementBytes;
        const int64_t source_step = kStep * kElementBytes * strides.row;
        const auto copy = [&](bool all_visible) {
#pragma unroll 4
            for (int i = 0; i < (kKeys > 0 ? kKeys : keys); i += kStep) {
                const bool copied = exists && (all_visible || is_visible(key + i));
                cp_async_16B_or_zeros(target + i / kStep * kTargetStep, source, copied, hint);
                if constexpr (kPaged)
                    source =
                        head + (row_offset(key + i + kStep, strides) + element) * kElementBytes;
                else
                    source += source_step;
            }
        };
        if (!kPaged && begin <= first && first + keys <= end)
            copy(true);
        else
            copy(false);
    }

    // Copies this warp's keys of this CTA's tile of a round.
    FS_DEVICE void start_keys(int step, int stage) const {
        if (rank >= tiles_at(step)) return;
        const int first = first_key(step + rank);
        if (!kPaged && begin <= first && first + kWarpKeys <= end)
            start_visible_panels(first, stage);
        else if constexpr (Layout::kWidePanels > 0)
            start_panels<false>(step + rank, stage);
        if constexpr (Layout::kHasNarrowPanel) start_panels<true>(step + rank, stage);
    }
    // Copies the 64-column panels of keys of a dense cache, each of which some row sees. It uses
    // the fewest instructions, because they delay the call's first scores.
    FS_DEVICE void start_visible_panels(int first, int stage) const {
        using Panel = typename Layout::template Panel<false>;
        constexpr int kRowsAtOnce = kWarpSize / 8;
        const uint64_t hint = cache_hint(args.passes != 0);
        const int row = lane / 8, chunk = lane % 8;
        const char* source =
            k_head + (first + row) * args.k_cache_strides.row * kElementBytes + chunk * 16;
        const int64_t source_step = kRowsAtOnce * kElementBytes * args.k_cache_strides.row;
        // The swizzle of a row repeats after eight.
        const uint32_t target = K_tile(stage),
                       of_rows[2] = {target + Panel::offset(row, chunk),
                                     target + Panel::offset(row + kRowsAtOnce, chunk)};
#pragma unroll
        for (int i = 0; i < kWarpKeys / kRowsAtOnce; ++i) {
#pragma unroll
            for (int p = 0; p < Layout::kWidePanels; ++p)
                cp_async_16B_or_zeros(
                    of_rows[i % 2] + p * Panel::kBytes + i / 2 * 8 * Panel::kRowBytes,
                    source + p * 128, !SEMANTICS.uneven || 64 * p + chunk * kChunkElements < args.d,
                    hint);
            source += source_step;
        }
    }
    template <bool kNarrow>
    FS_DEVICE void start_panels(int tile, int stage) const {
        using Panel = typename Layout::template Panel<kNarrow>;
        constexpr int kPanels = kNarrow ? 1 : Layout::kWidePanels;
        constexpr int kFirst = kNarrow ? 64 * Layout::kWidePanels : 0;  // column
        constexpr int kRowStep = 8;  // the swizzle repeats after eight rows
        const uint32_t target = K_tile(stage) + (kNarrow ? Layout::kNarrowOffset : 0);
        // Neighbouring lanes have neighbouring chunks of a row. If a row has fewer chunks than a
        // warp has lanes, the warp copies several rows at once.
        constexpr int kRowsAtOnce = kWarpSize / Panel::kChunks;
        const int chunk = lane % Panel::kChunks;
#pragma unroll
        for (int first = 0; first < kRowStep; first += kRowsAtOnce) {
            const int row = first + lane / Panel::kChunks;
#pragma unroll
            for (int p = 0; p < kPanels; ++p) {
                const int element = kFirst + 64 * p + chunk * kChunkElements;
                copy_column<kRowStep, kRowStep * Panel::kRowBytes, kWarpKeys>(
                    k_head, args.k_cache_strides, element, first_key(tile), row, kWarpKeys,
                    target + p * Panel::kBytes + Panel::offset(row, chunk),
                    !SEMANTICS.uneven || element < args.d);
            }
        }
    }
    FS_DEVICE int first_key(int tile) const {
        return run_begin + tile * Kernel::B_c + warp * kWarpKeys;
    }
    FS_DEVICE uint32_t K_tile(int stage) const {
        return smem + Places::K_offset + (warp * kStages + stage) * Places::K_stage;
    }

    // The next round whose keys are copied, and the stage for them.
    struct Copies {
        int step, stage;
    };
    FS_DEVICE void start_next_keys(Copies& copies) const {
        start_keys(copies.step, copies.stage);
        copies.step += tiles_at(copies.step);
        copies.stage = copies.stage == kStages - 1 ? 0 : copies.stage + 1;
        cp_async_commit();
    }
    FS_DEVICE bool is_value_warp() const { return kFirstValueWarp <= warp && warp < kWarps - 1; }
    FS_DEVICE int value_stage() const { return (warp - kFirstValueWarp) % kStages; }
    FS_DEVICE int first_step_of_stage() const {
        int step = first_step;
        for (int i = 0; i < value_stage(); ++i) step += tiles_at(step);
        return step;
    }
    // Copies this CTA's columns of all values of a round.
    FS_DEVICE void start_values(int step, int stage) const {
        constexpr int kChunks = kColumnWarps, kKeys = kValueKeys;
        const int index = (warp - kFirstValueWarp) / kStages * kWarpSize + lane;
        const int chunk = index % kChunks, key = index / kChunks;
        const int element = 8 * (rank * kChunks + chunk);
        if (tiles_at(step) == 0 || key >= kKeys) return;
        copy_column<kKeys, kKeys * 16, 0>(
            v_head, args.v_cache_strides, element, run_begin + step * Kernel::B_c, key,
            tiles_at(step) * Kernel::B_c, V_tile(stage, chunk) + key * 16,
            !SEMANTICS.uneven || element < args.d);
    }
    FS_DEVICE int column_warp() const { return warp - kFirstColumnWarp; }
    FS_DEVICE int first_column() const { return 8 * (rank * kColumnWarps + column_warp()); }
    FS_DEVICE uint32_t V_tile(int stage, int column_warp) const {
        return smem + Places::V_offset + stage * Places::V_stage + column_warp * Places::V_columns;
    }

    // ---- warps that compute scores ----

    FS_DEVICE void compute_scores() const {
        if constexpr (kKeysFirst) named_barrier_arrive(kKeysBarrier, kKeysThreads);
        wait_for_queries();
        const RowsA<typename Kernel::QueriesLayout, 1> queries(smem + Kernel::queries_offset, lane,
                                                               0);
        const KeyRange seen = keys_of_row(min(row(), rows - 1));
        float scores[1][Kernel::key_tiles][4];
        cluster_wait();  // the other CTAs' barriers are initialised
        const bool has_two = has_two_buffers();
        Copies copies{first_step, 0};
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) copies.step += tiles_at(copies.step);
        for (int step = first_step, round = 0; step < steps; ++round) {
            const int tiles = tiles_at(step);
            cp_async_wait<kStages - 1>();
            __syncwarp();
            if (rank < tiles) {
                multiply_keys(step + rank, copies.stage, queries, seen, scores);
                __syncwarp();  // all lanes have read the stage
            }
            store_scores(scores, tiles, round, has_two);
            start_next_keys(copies);
            step += tiles;
        }
        cp_async_wait<0>();
    }

    FS_DEVICE void multiply_keys(int tile, int stage,
                                 const RowsA<typename Kernel::QueriesLayout, 1>& queries,
                                 const KeyRange& seen,
                                 float (&scores)[1][Kernel::key_tiles][4]) const {
        zero(scores);
        multiply<value_t, Kernel::d_steps>(scores, queries, RowsB<Layout>(K_tile(stage), lane));
        change_scores<SEMANTICS>(scores, args.score_argument);
        const int key = first_key(tile);
        if (key < full_begin || key + kWarpKeys > full_end)
            mask_keys<SEMANTICS>(scores, lane, key, [&](int, int) { return seen; }, -INFINITY);
    }

    FS_DEVICE bool has_two_buffers() const { return rows <= Places::kBufferedRows; }
    // The size in bytes of a tile's scores, and the address of its scores for a round in this CTA.
    FS_DEVICE int tile_bytes() const { return rows * Places::row_bytes; }
    FS_DEVICE uint32_t scores_of(int tile, int buffer) const {
        return smem + Places::scores_offset + (buffer * kCtas + tile) * tile_bytes();
    }
    // Waits until all CTAs have the scores of a round and no longer use them.
    FS_DEVICE void wait_for_free(int round, bool has_two) const {
        if (has_two)
            mbarrier_wait(scores_free(smem, round & 1), (round / 2) & 1);
        else
            mbarrier_wait(scores_free(smem, 0), round & 1);
    }

    // Stores the scores of this CTA's tile of a round with the warp's maxima, for the warp that
    // sends.
    FS_DEVICE void store_scores(const float (&scores)[1][Kernel::key_tiles][4], int tiles,
                                int round, bool has_two) const {
        const int before = round - (has_two ? 2 : 1);
        if (before >= 0) wait_for_free(before, has_two);
        if (rank < tiles) {
            const uint32_t tile = scores_of(rank, has_two ? round & 1 : 0);
            const float own = quad_max(Rows::largest(scores, 0, 0));
            if (row() < rows) {
                const uint32_t at = tile + (warp * (kWarpKeys / 16) * rows * 4 + lane) * 16;
#pragma unroll
                for (int g = 0; g < kWarpKeys / 16; ++g) {
                    const float (&left)[4] = scores[0][2 * g], (&right)[4] = scores[0][2 * g + 1];
                    store_shared_16B(at + g * rows * 64,
                                     words(left[0], left[1], right[0], right[1]));
                }
                if (lane % 4 == 0)
                    store_shared_4B(maxima_of(tile, row()) + warp * 4, __float_as_uint(own));
            }
        }
        named_barrier_arrive(stored_barrier(round), kStoredThreads);
    }
    static constexpr int kStoredThreads = kWarpSize * (kScoreWarps + 1);
    FS_DEVICE static int stored_barrier(int round) { return 2 + (round & 1); }
    FS_DEVICE uint32_t maxima_of(uint32_t tile, int row) const {
        return tile + rows * Places::row_scores + row * kScoreWarps * 4;
    }
    FS_DEVICE static uint4 words(float a, float b, float c, float d) {
        return {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
    }

    // ---- warps that compute probabilities ----

    // `kPacked`: there are at most four rows, and the upper half of the lanes has the last keys of
    // a tile instead of other rows.
    template <bool kPacked>
    FS_DEVICE void compute_probabilities() const {
        zero_P();
        cp_async_wait<0>();
        wait_for_queries();
        cluster_wait();
        Rows all_rows(args.scale_log2);
        const bool has_two = has_two_buffers();
        int round = 0;
        for (int step = first_step; step < steps; ++round) {
            const int tiles = tiles_at(step), buffer = has_two ? round & 1 : 0;
            if (step % kChunkSteps == 0) all_rows.reset();
            mbarrier_wait(scores_full(smem, buffer), (has_two ? round / 2 : round) & 1);
            exponentiate<kPacked>(all_rows, tiles, buffer, round);
            __syncwarp();
            if (lane < kCtas)
                mbarrier_arrive_remote(cluster_address(scores_free(smem, buffer), lane));
            step += tiles;
        }
        // This CTA's shared memory must exist until no CTA copies from it any more and all arrivals
        // have come.
        if (probability_warp() == 0)
            for (int i = max(round - (has_two ? 2 : 1), 0); i < round; ++i)
                wait_for_free(i, has_two);
    }
    FS_DEVICE int probability_warp() const { return warp - kScoreWarps; }
    template <bool kPacked>
    FS_DEVICE int packed_row() const {
        return kPacked ? lane % 16 / 4 : row();
    }
    // P of rows that the tile does not have stays zero.
    FS_DEVICE void zero_P() const {
        for (int i = probability_warp() * kWarpSize + lane; i < 2 * Places::P_bytes / 16;
             i += kProbabilityWarps * kWarpSize)
            store_shared_16B(smem + Places::P_offset + i * 16, {0, 0, 0, 0});
    }

    // Turns the scores of a round into P; each warp has every n-th tile. All warps keep track of
    // the maxima. There is one copy of the code for a tile: in a short kernel, fetching
    // instructions takes longer than executing them.
    template <bool kPacked>
    FS_DEVICE void exponentiate(Rows& all_rows, int tiles, int buffer, int round) const {
        const int P_index = round & 1, its_row = packed_row<kPacked>();
        const uint32_t P = P_buffer(P_index);
        float& row_max = all_rows.row_max[0][0];
        const float first_max = row_max;
        float maxima[kCtas];
        // Tiles past the end of a round repeat the last one.
#pragma unroll
        for (int tile = 0; tile < kCtas; ++tile)
            maxima[tile] = maximum_of(scores_of(min(tile, tiles - 1), buffer), its_row);
        if (round > 1) mbarrier_wait(P_free(smem, P_index), (round / 2 - 1) & 1);
#pragma unroll 1
        for (int wave = 0; wave < kWaves; ++wave) {
            const int tile = wave * kProbabilityWarps + probability_warp();
            if (tile < tiles) {
                float both[1][2] = {{-INFINITY, -INFINITY}}, factors[1][2];
                row_max = first_max;
#pragma unroll
                for (int t = 0; t < kCtas; ++t) {
                    if (t < tile) row_max = fmaxf(row_max, maxima[t]);
                    if (t == tile) both[0][0] = maxima[t];
                }
                all_rows.raise_to(both, factors);
                if (lane % 4 == 0 && (!kPacked || lane < 16)) {
                    const uint32_t at = P + (tile * kMostRows + its_row) * 4;
                    store_shared_4B(at + Places::P_factors, __float_as_uint(factors[0][0]));
                    store_shared_4B(at + Places::P_maxima, __float_as_uint(row_max));
                }
                exponentiate_tile<kPacked>(all_rows, tile, scores_of(tile, buffer), P);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(P_full(smem, P_index, wave));
        }
        row_max = first_max;
#pragma unroll
        for (int tile = 0; tile < kCtas; ++tile) row_max = fmaxf(row_max, maxima[tile]);
    }
    // The maximum of a row over a tile.
    FS_DEVICE float maximum_of(uint32_t tile, int of_row) const {
        const uint32_t at = maxima_of(tile, min(of_row, rows - 1));
        float maximum = -INFINITY;
#pragma unroll
        for (int w = 0; w < kScoreWarps; w += 2) {
            const float2 two = load_shared_float2(at + w * 4);
            maximum = fmaxf(maximum, fmaxf(two.x, two.y));
        }
        return maximum;
    }
    template <bool kPacked>
    FS_DEVICE void exponentiate_tile(const Rows& all_rows, int tile, uint32_t tile_scores,
                                     uint32_t P) const {
        constexpr int kMine = kPacked ? kTileGroups / 2 : kTileGroups;
        const int first = kPacked ? lane / 16 * kMine : 0;  // group of 16 keys
        const int its_lane = kPacked ? lane % 16 : lane;    // its lane in a fragment with all rows
        const bool has_row = packed_row<kPacked>() < rows;
        float sums[kMine] = {};
        if (has_row) {
            uint4 scores[kMine];  // all loads precede the stores, which might alias them
#pragma unroll
            for (int g = 0; g < kMine; ++g)
                scores[g] = load_shared_16B(tile_scores + ((first + g) * rows * 4 + its_lane) * 16);
#pragma unroll
            for (int g = 0; g < kMine; ++g) {
                uint4& its = scores[g];
                float left[4] = {__uint_as_float(its.x), __uint_as_float(its.y), 0.0f, 0.0f};
                float right[4] = {__uint_as_float(its.z), __uint_as_float(its.w), 0.0f, 0.0f};
                sums[g] = all_rows.exponentiate_16_keys(left, right, 0, 0);
                its.x = pack_16bit<value_t>(left[0], left[1]);
                its.y = pack_16bit<value_t>(right[0], right[1]);
            }
            const uint32_t at = P + ((tile * kTileGroups + first) * 32 + its_lane) * 8;
#pragma unroll
            for (int g = 0; g < kMine; ++g)
                store_shared_8B(at + g * 256, {scores[g].x, scores[g].y});
        }
        float sum = sums[0];
#pragma unroll
        for (int g = 1; g < kMine; ++g) sum = __fadd_rn(sum, sums[g]);
        if constexpr (kPacked)
#pragma unroll
            for (int g = 0; g < kMine; ++g)
                sum = __fadd_rn(sum, __shfl_sync(kWholeWarp, sums[g], 16 + its_lane));
        if (has_row && (!kPacked || lane < 16))
            store_shared_4B(P + Places::P_sums + (tile * 32 + its_lane) * 4, __float_as_uint(sum));
    }

    // ---- the warp that sends ----

    // Copies the scores of this CTA's tiles to the other CTAs.
    FS_DEVICE void send_scores() const {
        cp_async_wait<0>();
        wait_for_queries();
        cluster_wait();
        const bool has_two = has_two_buffers();
        for (int step = first_step, round = 0; step < steps; ++round) {
            const int tiles = tiles_at(step), buffer = has_two ? round & 1 : 0;
            const bool sends = rank < tiles;
            named_barrier_wait(stored_barrier(round), kStoredThreads);
            if (elect_lane()) {
                const uint32_t full = scores_full(smem, buffer), tile = scores_of(rank, buffer);
                fence_for_copies();
                mbarrier_arrive_expect(full, (tiles - sends) * tile_bytes());
                if (sends) {
#pragma unroll
                    for (int i = 1; i < kCtas; ++i) {  // CTAs begin with different targets
                        const int cta = (rank + i) % kCtas;
                        copy_shared(cluster_address(tile, cta), tile, tile_bytes(),
                                    cluster_address(full, cta));
                    }
                }
            }
            __syncwarp();
            step += tiles;
        }
    }

    // ---- warps that copy V ----

    // Each group of warps has its own stage, and waits for its earlier copies before it starts new
    // ones.
    FS_DEVICE void copy_values() const {
        if constexpr (kKeysFirst) {
            named_barrier_wait(kKeysBarrier, kKeysThreads);  // copies of the first keys have begun
            start_values(first_step_of_stage(), value_stage());
            cp_async_commit();
        } else {
            cp_async_wait<1>();
            wait_for_queries();
        }
        cluster_wait();
        int step = first_step, stage = 0, wraps = 0;
        for (bool is_first = true; step < steps;) {
            const int tiles = tiles_at(step);
            if (stage == value_stage()) {
                if (!is_first) {
                    mbarrier_wait(V_free(smem, stage), wraps ^ 1);
                    start_values(step, stage);
                    cp_async_commit();
                }
                is_first = false;
                cp_async_wait<0>();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(V_full(smem, stage));
            }
            step += tiles;
            next_stage(stage, wraps);
        }
    }

    // ---- warps that multiply P by V ----

    FS_DEVICE void multiply_values() const {
        cp_async_wait<0>();
        wait_for_queries();
        cluster_wait();
        const RowTarget target = row_target();
        Rows all(args.scale_log2), chunk(args.scale_log2);
        Sums all_o = {}, o = {};
        int stage = 0, wraps = 0;
        for (int step = first_step, round = 0; step < steps; ++round) {
            const int tiles = tiles_at(step), buffer = round & 1;
            mbarrier_wait(V_full(smem, stage), wraps);
#pragma unroll 1
            for (int wave = 0; wave < kWaves; ++wave) {
                const int first = wave * kProbabilityWarps;
                if constexpr (kKeysFirst) {
                    multiply_wave_ahead(chunk, o, first, tiles, V_tile(stage, column_warp()),
                                        P_buffer(buffer), P_full(smem, buffer, wave), round);
                    continue;
                }
                mbarrier_wait(P_full(smem, buffer, wave), (round / 2) & 1);
#pragma unroll 4
                for (int tile = first; tile < min(first + kProbabilityWarps, tiles); ++tile)
                    multiply_tile(chunk, o, tile, V_tile(stage, column_warp()), P_buffer(buffer));
            }
            chunk.row_max[0][0] = load_shared_float(P_buffer(buffer) + Places::P_maxima +
                                                    ((tiles - 1) * kMostRows + row()) * 4);
            __syncwarp();  // all lanes have read P and the stage
            if (lane == 0) {
                mbarrier_arrive(P_free(smem, buffer));
                mbarrier_arrive(V_free(smem, stage));
            }
            step += tiles;
            if (step % kChunkSteps == 0 || step >= steps) {
                chunk.finish_chunk();
                merge(all, all_o, chunk, o);
                chunk.reset();
                o[0] = o[1] = 0.0f;
            }
            next_stage(stage, wraps);
        }
        store(target, all, all_o);
    }

    FS_DEVICE void multiply_tile(Rows& chunk, Sums& o, int tile, uint32_t V, uint32_t P) const {
        const float factor =
            load_shared_float(P + Places::P_factors + (tile * kMostRows + row()) * 4);
        const float sum = load_shared_float(P + Places::P_sums + (tile * 32 + lane) * 4);
        chunk.row_sum[0][0] = __fadd_rn(__fmul_rn(chunk.row_sum[0][0], factor), sum);
        float c[4] = {__fmul_rn(o[0], factor), __fmul_rn(o[1], factor), 0.0f, 0.0f};
        const uint32_t v = V + (tile * Kernel::B_c + lane) * 16;
        const uint32_t p_at = P + (tile * kTileGroups * 32 + lane) * 8;
#pragma unroll
        for (int g = 0; g < kTileGroups; g += 2) {
            uint32_t two_steps[4];  // 8 columns of 32 keys
            ldmatrix_x4_transposed(two_steps, v + g * 256);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 p = load_shared_float2(p_at + (g + i) * 256);
                const uint32_t fragment[4] = {__float_as_uint(p.x), 0, __float_as_uint(p.y), 0};
                const uint32_t values[2] = {two_steps[2 * i], two_steps[2 * i + 1]};
                mma_m16n8k16<value_t>(c, fragment, values);
            }
        }
        o[0] = c[0], o[1] = c[1];
    }

    // The operands of a tile's P V.
    struct Operands {
        uint32_t values[kTileGroups / 2][4];  // 8 columns of 32 keys each
        float2 P[kTileGroups];
        float factor, sum;
    };
    static constexpr int kAhead = kProbabilityWarps < 2 ? kProbabilityWarps : 2;  // tiles

    FS_DEVICE void load_values(Operands& its, int group, int tile, uint32_t V) const {
        ldmatrix_x4_transposed(its.values[group / 2],
                               V + (tile * Kernel::B_c + lane) * 16 + group * 256);
    }
    FS_DEVICE void load_P(Operands& its, int group, int tile, uint32_t P) const {
        const uint32_t at = P + ((tile * kTileGroups + group) * 32 + lane) * 8;
        its.P[group] = load_shared_float2(at);
        its.P[group + 1] = load_shared_float2(at + 256);
    }
    FS_DEVICE void load_statistics(Operands& its, int tile, uint32_t P) const {
        its.factor = load_shared_float(P + Places::P_factors + (tile * kMostRows + row()) * 4);
        its.sum = load_shared_float(P + Places::P_sums + (tile * 32 + lane) * 4);
    }
    // P V of a wave's tiles, in the order of multiply_tile(). The loads for the tile after the next
    // are between a tile's MMAs; the first tiles' values are loaded before the wait for P.
    FS_DEVICE void multiply_wave_ahead(Rows& chunk, Sums& o, int first, int tiles, uint32_t V,
                                       uint32_t P, uint32_t P_is_full, int round) const {
        Operands sets[kAhead + 1];
        const int last = min(first + kProbabilityWarps, tiles) - 1;
        if (first <= last)
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
                for (int g = 0; g < kTileGroups; g += 2)
                    load_values(sets[i], g, min(first + i, last), V);
        mbarrier_wait(P_is_full, (round / 2) & 1);
        if (first > last) return;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            load_statistics(sets[i], min(first + i, last), P);
#pragma unroll
            for (int g = 0; g < kTileGroups; g += 2) load_P(sets[i], g, min(first + i, last), P);
        }
#pragma unroll
        for (int t = 0; t < kProbabilityWarps; ++t) {
            if (first + t > last) break;
            const Operands& its = sets[t % (kAhead + 1)];
            Operands& next = sets[(t + kAhead) % (kAhead + 1)];
            const bool has_next = t + kAhead < kProbabilityWarps;
            const int ahead = min(first + t + kAhead, last);
            chunk.row_sum[0][0] = __fadd_rn(__fmul_rn(chunk.row_sum[0][0], its.factor), its.sum);
            float c[4] = {__fmul_rn(o[0], its.factor), __fmul_rn(o[1], its.factor), 0.0f, 0.0f};
            if (has_next) load_statistics(next, ahead, P);
#pragma unroll
            for (int g = 0; g < kTileGroups; ++g) {
                if (has_next && g % 2 == 0) load_values(next, g, ahead, V);
                if (has_next && g % 2 == 1) load_P(next, g - 1, ahead, P);
                const uint32_t fragment[4] = {__float_as_uint(its.P[g].x), 0,
                                              __float_as_uint(its.P[g].y), 0};
                const uint32_t (&two_steps)[4] = its.values[g / 2];
                const uint32_t values[2] = {two_steps[g % 2 * 2], two_steps[g % 2 * 2 + 1]};
                mma_m16n8k16<value_t>(c, fragment, values);
            }
            o[0] = c[0], o[1] = c[1];
        }
    }

    // Merges a chunk's state into the state of the chunks before it.
    FS_DEVICE static void merge(Rows& all, Sums& all_o, Rows& chunk, const Sums& o) {
        const StateMerge merge = chunk.merge_after(0, 0, all.row_max[0][0], all.row_sum[0][0]);
        all.row_max[0][0] = chunk.row_max[0][0];
        all.row_sum[0][0] = chunk.row_sum[0][0];
        all_o[0] = merge.merged(all_o[0], o[0]);
        all_o[1] = merge.merged(all_o[1], o[1]);
    }

    // The address at which a lane stores its columns of the output, or of a chunk's state for the
    // merge kernel. This is computed while the first keys arrive.
    struct RowTarget {
        char* columns;
        char* statistics;  // of a chunk's state
        const float* sink;
        bool has_all_parts;
    };
    FS_DEVICE RowTarget row_target() const {
        const RunInfo run(smem + Places::target_offset);
        const int of_head = run.tile * Kernel::B_r + min(row(), rows - 1);
        const int column = first_column() + lane % 4 * 2;
        RowTarget target{nullptr, nullptr, nullptr, run.has_all_parts()};
        if (target.has_all_parts) {
            const int query = args.by_group.divide(of_head), head = head_of(run, of_head, query);
            target.columns = row_of_o(args, run.batch, run.first_query, query, head, column);
            if (args.sinks != nullptr) target.sink = args.sinks + head;
        } else {
            const PartStates<Kernel> memory = states(run);
            target.columns = reinterpret_cast<char*>(memory.sums(run.first_part, of_head) + column);
            target.statistics = reinterpret_cast<char*>(memory.statistics(run.first_part, of_head));
        }
        flashsmith::materialize(target.columns, target.statistics);
        return target;
    }
    FS_DEVICE int head_of(const RunInfo& run, int of_head, int query) const {
        return run.head_k * args.heads_per_group + of_head - query * args.heads_per_group;
    }
    FS_DEVICE void store(const RowTarget& target, const Rows& all, const Sums& o) const {
        if (row() >= rows) return;
        const RowStatistics statistics{all.offset(0, 0), all.row_sum[0][0]};
        const int column = first_column() + lane % 4 * 2;
        if (!target.has_all_parts) {
            store_global_8B(target.columns, {__float_as_uint(o[0]), __float_as_uint(o[1])});
            if (column == 0)
                store_global_8B(target.statistics, {__float_as_uint(statistics.offset),
                                                    __float_as_uint(statistics.sum)});
            return;
        }
        const CanonicalEnd row_end(statistics, target.sink);
        if (column < args.d)
            store_global_4B(target.columns,
                            pack_16bit<value_t>(CanonicalEnd::scaled(o[0], row_end.factor),
                                                CanonicalEnd::scaled(o[1], row_end.factor)));
        if (column != 0 || args.lse == nullptr) return;
        const RunInfo run(smem + Places::target_offset);
        const int of_head = run.tile * Kernel::B_r + row(), query = args.by_group.divide(of_head);
        store_lse(args, row_end.lse, run.batch, run.first_query, query,
                  head_of(run, of_head, query));
    }
};

// The whole kernel: a cluster has one run. It is found before the preceding launch is over, if
// lengths may be guessed (see compute_parts()).
template <class Kernel, bool kPaged>
FS_DEVICE void compute_chunks_in_cluster(const DecodeKernelArgs& args, uint32_t smem) {
    using Cluster = ChunkCluster<Kernel, kPaged>;
    if (thread_index() == 0) Cluster::init_barriers(smem);
    __syncwarp();
    cluster_arrive();
    Lengths lengths;
    if constexpr (Kernel::uses_pdl && !Kernel::SEMANTICS.packed)
        lengths.are_guessed = (args.flags & kGuessesLengths) != 0;
    const int32_t* const own_length = args.cache_lens + min(lane_index(), args.batch - 1);
    if (lengths.are_guessed)
        lengths.guess = load_relaxed(own_length);
    else
        prefetch_lengths<Kernel>(args);
    if constexpr (Kernel::uses_pdl && !Kernel::SEMANTICS.hides_earlier)
        if (args.log2_prefetched_keys > 0) prefetch_first_keys<Kernel, kPaged>(args);
    if (!lengths.are_guessed) wait_for_launch_before();
    DecodeItem item{};
    // All CTAs of a cluster find the same run.
    const auto find = [&] {
        WorkCursor cursor(share_of_cta<Kernel>(args, lengths),
                          block_index() / Kernel::chunk_cluster);
        return find_item<Kernel>(args, cursor, item, lengths);
    };
    bool found = find();
    int32_t true_length = 0;
    for (bool begins = true;; begins = false) {
        Cluster cluster(args, item, smem);
        if (begins) {
            cluster.materialize();
            if (lengths.are_guessed) wait_for_launch_before();
            allow_next_launch();
        }
        // A load that is issued after the copies takes as long as they do, so the length is loaded
        // first.
        if constexpr (Kernel::keys_first)
            if (lengths.are_guessed) true_length = load_global_4B(own_length);
        if (found) cluster.start();
        if (lengths.are_guessed) {
            lengths.are_guessed = false;
            // The length is loaded while the first keys arrive. A thread's new copies overwrite
            // only copies that it has waited for.
            if constexpr (!Kernel::keys_first) true_length = load_global_4B(own_length);
            if (!__all_sync(kWholeWarp, true_length == lengths.guess)) {
                cp_async_wait<0>();
                found = find();
                continue;
            }
        }
        if (found)
            cluster.run();
        else
            cluster_wait();
        return;
    }
}

}  // namespace flashsmith
