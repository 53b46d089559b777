// The config that names a kernel of the mma_sync_decode family, and what its kernels are called
// with. Plain C++20 without CUDA types: the host compiler, the kernels and the tests read this
// file.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

#include "common/types.cuh"

namespace flashsmith {

// Fields, order and meaning are those of the Python class. Later knobs go at the end and their zero
// means 'as before'.
struct FlashDecodeKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warps;
    int stages;
    int min_keys;
    int parts_per_sm;
    int chunk_rows;
    int rounds;
    bool early;
    int cluster;
    bool full_tiles;
    bool own_rows;
    int canonical;

    constexpr auto operator<=>(const FlashDecodeKernelConfig&) const = default;

    constexpr int element_bytes() const { return 2; }
    constexpr int n_threads() const { return 32 * n_warps; }
    // Keys of a stage that one warp copies and, unless warps have rows of their own, multiplies by
    // itself.
    constexpr int keys_per_warp() const { return B_c / n_warps; }
    // Whether a warp keeps its queries' fragments beside its sums: 255 registers have room for no
    // more.
    constexpr bool keeps_queries() const { return (own_rows ? 16 : B_r) * d_head <= 16 * 128; }
    // Where warps have rows of their own a thread has so many tiles of eight columns, and keeps so
    // many of a run's first subtree in registers, as far as these suffice beside the scores; the
    // others and the rows' statistics are in shared memory.
    constexpr int own_tiles() const { return d_head / 8; }
    constexpr int own_tiles_in_registers() const {
        const int most = B_c == 32 ? 25 - own_tiles() : 16 - own_tiles();
        return most < 0 ? 0 : most < own_tiles() ? most : own_tiles();
    }
    // Dynamic shared memory of a CTA: the queries, the warps' stages of K and V, the warps' row
    // statistics, and where a run's states belong and the next search begins. Warps with rows of
    // their own have the statistics of a run's first subtree there, and those of its sums that
    // registers have no room for; their queries, which registers keep, go by way of a stage.
    constexpr int smem_bytes() const {
        const int queries = own_rows ? 0 : B_r * d_head * element_bytes();
        const int streamed = 2 * stages * B_c * d_head * element_bytes();
        const int in_shared = (own_tiles() - own_tiles_in_registers()) * n_threads() * 16;
        const int statistics = own_rows        ? B_r * 2 * 4 + in_shared
                               : canonical > 0 ? exchange_bytes()
                                               : n_warps * B_r * 2 * 4;
        return queries + streamed + statistics + 80;
    }
    // Canonical: what warps exchange of a tile. Each one's maxima of all rows; of 16 keys the sums
    // that a quad's four lanes have; and P.
    constexpr int maxima_bytes() const { return n_warps * B_r * 4; }
    constexpr int sums_bytes() const { return B_c / 16 * B_r * 16; }
    constexpr int exchange_bytes() const {
        return maxima_bytes() + sums_bytes() + B_r * B_c * element_bytes();
    }
    // Whether a run may be a whole sequence that is known without a search. With d_head 128 and two
    // stages three CTAs of an SM have no registers for it.
    constexpr bool has_whole_runs() const { return stages > 2 || d_head <= 64; }
    // Whether the decode kernel makes use of the time when it is launched and the launch before is
    // not over: its CTAs ask for keys, and find their runs by what lengths seem to be.
    constexpr bool uses_pdl() const { return early && chunk_rows == 0; }
    // Whether a call of few parts may hand their states to the merge word by word: there is a merge
    // kernel that takes them as they arrive.
    constexpr bool has_arrivals() const { return cluster > 0 && chunk_rows == 0 && !own_rows; }
    // CTAs of an SM, at most, that registers suffice for, 0: as many as shared memory has room for.
    constexpr int most_ctas() const { return own_rows ? 256 / n_threads() : 0; }

    // Static, of a CTA that merges rows: the states of four warps.
    constexpr int merge_smem_bytes() const { return 4 * ((d_head + 127) / 128) * 32 * 6 * 4; }

    // Of the kernel for sequences with many rows, whose warps have 16 rows each.
    constexpr int chunk_threads() const { return 32 * (chunk_rows / 16); }
    constexpr int chunk_smem_bytes() const {
        return (chunk_rows + 2 * stages * B_c) * d_head * element_bytes();
    }
    // Sequences with more rows of a K/V head than this are that kernel's, others the other's: half
    // a tile. A sequence's own queries say it.
    constexpr int most_rows_without_chunks() const { return chunk_rows / 2; }
};

// Parts of a sequence at most, whatever the device.
constexpr int kMostParts = 1024;

// Of runs that are whole sequences: whether CTAs ask for a run's first keys before they know its
// length, and whether the next launch begins when all of this one's CTAs are done, not when all
// have begun. Of others: whether CTAs find their first run by lengths that are guessed.
constexpr int kPrefetchesRuns = 1, kHoldsNextLaunch = 2, kGuessesLengths = 4;

// Sequences whose lengths a warp's lanes hold, one each.
constexpr int kMostGuessed = 32;

// Parts whose states the merge takes as they arrive, at most: four of each of its warps.
constexpr int kMostArrivingParts = 16;

// Division by a number known on the host, of dividends below 2^31: a multiplication and a shift.
struct Divisor {
    uint32_t divisor, multiplier, shift;

#ifdef __CUDACC__
    __device__ __forceinline__ int divide(int x) const {
        return divisor == 1 ? x : static_cast<int>(__umulhi(x, multiplier) >> shift);
    }
#endif
};

constexpr Divisor divisor_of(int64_t divisor) {
    int bits = 0;
    while ((int64_t{1} << bits) < divisor) ++bits;
    if (bits == 0) return {1, 0, 0};
    const uint64_t power = uint64_t{1} << (31 + bits);
    const uint64_t unsigned_divisor = static_cast<uint64_t>(divisor);
    return {static_cast<uint32_t>(divisor),
            static_cast<uint32_t>((power + unsigned_divisor - 1) / unsigned_divisor),
            static_cast<uint32_t>(bits - 1)};
}

// How far apart rows of a (batch, seq, heads, d) tensor or of a (block, slot, heads, d) cache are,
// in elements; the last dimension is contiguous.
struct DecodeStrides {
    int64_t batch, row, head;
};

// Everything the kernels of one call need, passed by value as their only parameter.
struct DecodeKernelArgs {
    // What a CTA reads between the launch before and its first copy comes first, in three lines of
    // parameters: each is waited for. They begin at 0, 48 and 112.
    const int32_t* cache_lens;  // keys in the cache before the call appends
    const void* new_k;          // appended; null: nothing is
    void *k_cache, *v_cache;
    int32_t batch, seq_q;     // packed: the longest sequence
    int32_t capacity;         // of a sequence, keys
    int32_t heads_per_group;  // query heads of a K/V head
    int32_t heads_k;
    // log2 of the CTAs of a cluster, which have all runs of a tile and merge them among themselves,
    // and of the parts of such runs; 0: there are no clusters.
    int32_t cluster_levels, cluster_run_levels;
    // How long runs are, as a fraction of a call's units: blocks of B_c keys, once for each row
    // tile of a K/V head. Negative where CTAs ask `run_counter` for runs; 0: each part is a run.
    float share, share_of_large;
    // By the K/V heads and row tiles of a sequence, if all of its keys are a run whatever its
    // length; 0 if not.
    Divisor by_whole_runs;
    int32_t most_parts;  // of a sequence
    int32_t min_units;   // blocks of B_c keys that a part has at least
    Divisor by_parts, by_heads_k;
    DecodeStrides k_cache_strides, v_cache_strides;
    int32_t passes;  // whether keys and values are to leave L2 before anything else
    int16_t flags;   // kPrefetchesRuns, kHoldsNextLaunch, kGuessesLengths
    // log2 of the keys of each sequence that an early launch's CTAs ask for together; 0: of none.
    int16_t log2_prefetched_keys;
    // Units of a call from which on it is large, and may be ragged.
    float from_large, from_ragged;

    const void* q;  // rotated: the workspace of that
    void* o;
    float* lse;                   // natural log-sum-exp of every row; null when not asked for
    const int32_t* page_table;    // null: a sequence's keys are those of its own block
    const void* new_v;            // as new_k
    const void *cos, *sin;        // (positions, rotary_half); null: no rotary embedding
    const float* sinks;           // (heads_q); may be null
    const int32_t* cu_seqlens_q;  // (batch + 1) offsets of packed queries; null unless packed

    // Workspaces. Sums of rows over a part's keys, relative to its own maximum; each row's maximum,
    // log2, and sum of probabilities.
    float* part_o;
    float* part_statistics;
    uint32_t* run_counter;  // of runs that CTAs have asked for beyond their first; may be null
    // The states of a call's only sequence where it has few parts, which the merge takes as they
    // arrive: words in memory that is zero between calls, all sums and then all statistics. Up to
    // how many parts, 0: of none; and from one K/V head's states to the next one's, in rows.
    uint32_t* arriving;
    int32_t most_arriving, arriving_rows;

    DecodeStrides q_strides, o_strides, new_k_strides, new_v_strides, q_source_strides;
    int64_t page_table_stride, cos_stride, sin_stride;
    int64_t lse_batch_stride, lse_head_stride;

    int32_t total_q;  // packed: the rows of all
    int32_t heads_q, d;
    int32_t blocks, positions, rotary_half;
    int32_t interleaved, rotary_fp32;
    int32_t window_left, window_right;

    // Not beside the other factor of a score: nvcc would load them as a pair, and keep half of one
    // undefined where it needs the other alone.
    float scale_log2;  // what turns a score into base-2 logits: scale * log2(e), or with a softcap
                       // softcap * log2(e)
    // As `share`, of calls in which a sequence has more than a fraction of the units.
    float share_of_ragged, most_of_equal;
    int32_t most_slots;   // parts of all row tiles of a K/V head that have memory for sums
    int32_t slot_rows;    // rows that each of them has
    int32_t merged_rows;  // of a K/V head, which may have several parts
    int32_t warms_up;     // whether a CTA that merges one has instructions fetched before it waits
    // States that a CTA keeps in shared memory, behind the config's, and the bytes of each.
    int32_t kept_levels, kept_level_bytes;
    Divisor by_group, by_page, by_merged_rows;

    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh

    // Of sequences with many rows: parts at most, blocks of B_c keys that a part has at least, and
    // where their states are: rows from the first state to theirs, and from one K/V head, batch or
    // query of the packed tensor to the next.
    int32_t most_chunk_parts, min_chunk_units;
    int64_t chunk_states, chunk_head_rows, chunk_batch_rows, chunk_query_rows;

    // What append alone reads: the queries that it rotates, and the workspace for them.
    const void* q_source;
    void* q_rotated;
};

static_assert(offsetof(DecodeKernelArgs, heads_k) == 48);
static_assert(offsetof(DecodeKernelArgs, k_cache_strides) == 112);
static_assert(offsetof(DecodeKernelArgs, flags) == 164);
static_assert(offsetof(DecodeKernelArgs, q) == 176);
// What is read late stands where it was measured: 24 bytes further it cost small calls 1 to 2%.
static_assert(offsetof(DecodeKernelArgs, q_strides) == 288);
static_assert(offsetof(DecodeKernelArgs, total_q) == 448);

// Threads of a CTA of the kernels that have no tiles: of a merge a row a CTA or a warp, of append a
// row a warp.
constexpr int kMergeThreads = 128, kAppendThreads = 128;
// Of a chunk's part, in parts of other sequences: each writes the sums of many rows.
constexpr int kChunkMinKeysFactor = 8;

using decode_kernel_fn = void (*)(const DecodeKernelArgs);

}  // namespace flashsmith
