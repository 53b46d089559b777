// The config that identifies a kernel of the mma_sync_decode family, and the arguments of its
// kernels. Plain C++20 without CUDA types, because the host compiler, the kernels and the tests
// read this file.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

#include "common/program_args.cuh"
#include "common/types.cuh"

namespace flashsmith {

// Fields, order and meaning match the Python class. New knobs go at the end, and a knob of 0 keeps
// the previous behaviour.
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
    int chunk_cluster;
    int chunk_warpgroups;
    CacheFormat cache;
    int d_v;  // head dimension of v and o; 0: they have d_head, like q and k
    bool keys_first;

    constexpr auto operator<=>(const FlashDecodeKernelConfig&) const = default;

    constexpr int element_bytes() const { return 2; }
    constexpr bool has_scales() const { return cache != CacheFormat::plain; }
    constexpr int cache_element_bytes() const { return is_8bit(cache) ? 1 : 2; }
    constexpr int d_head_v() const { return d_v > 0 ? d_v : d_head; }
    // Bytes of a key and of a value in shared memory. Tiles have rows of whole panels, of 64 or 128
    // bytes.
    constexpr int row_bytes(int columns) const {
        return is_8bit(cache) ? (columns + 63) / 64 * 64 : columns * element_bytes();
    }
    constexpr int key_bytes() const { return row_bytes(d_head); }
    constexpr int value_bytes() const { return row_bytes(d_head_v()); }
    constexpr int pair_bytes() const { return key_bytes() + value_bytes(); }
    // Whether each warp has its own columns of o, and all keys of a stage, because a row's sums do
    // not fit in the registers of a single warp.
    constexpr bool own_columns() const { return d_head > 256; }
    constexpr bool shares_stages() const { return own_rows || own_columns(); }
    // How many of the 16 rows of a warp's sums fit in its stage when warps merge their states. The
    // other rows have separate memory.
    constexpr int rows_in_stage() const {
        return own_columns() || 16 * d_head_v() * 4 <= keys_per_warp() * pair_bytes() ? 16 : 8;
    }
    constexpr int other_sums_bytes() const {
        return shares_stages() || canonical > 0 ? 0
                                                : n_warps * (16 - rows_in_stage()) * d_head_v() * 4;
    }
    // Warps that multiply P by V, each with 8 columns, if a cluster computes a chunk together. The
    // other n_warps compute scores and probabilities.
    constexpr int column_warps() const {
        return chunk_cluster > 0 ? d_head / (8 * chunk_cluster) : 0;
    }
    // Warps that copy V for the column warps: the same number for each stage, and four in all if
    // possible.
    constexpr int value_warps() const {
        return chunk_cluster > 0 ? stages * (stages < 4 ? 4 / stages : 1) : 0;
    }
    // Besides n_warps for scores and these, a cluster's CTA has one warp that sends scores.
    constexpr int n_threads() const {
        const int more = probability_warps() + column_warps() + value_warps();
        return 32 * (n_warps + (chunk_cluster > 0 ? more + 1 : 0));
    }
    // Keys of a stage that one warp copies. Unless each warp has its own rows or columns, only this
    // warp computes with these keys.
    constexpr int keys_per_warp() const { return B_c / n_warps; }
    // Whether a warp keeps its queries' fragments in registers next to its sums. Larger fragments
    // do not fit into 255 registers.
    constexpr bool keeps_queries() const {
        return (own_rows ? 16 : B_r) * (d_v > d_head ? d_v : d_head) <= 16 * 128;
    }
    // With own_rows, a thread has own_tiles() tiles of eight columns. For a run's first subtree, it
    // keeps as many of these tiles in registers as fit next to the scores. The other tiles and the
    // rows' statistics are in shared memory.
    constexpr int own_tiles() const { return d_head_v() / 8; }
    constexpr int own_tiles_in_registers() const {
        const int most = B_c == 32 ? 25 - own_tiles() : 16 - own_tiles();
        return most < 0 ? 0 : most < own_tiles() ? most : own_tiles();
    }
    // Dynamic shared memory of a CTA: the queries, the warps' stages of K and V, the warps' row
    // statistics, and the run's destination and start of the next search. With own_rows, the
    // statistics are those of a run's first subtree, together with its sums that do not fit in
    // registers. The queries are then kept in registers and only pass through a stage. With own
    // columns, warps also exchange two shares of the scores.
    constexpr int smem_bytes() const {
        const int queries = own_rows ? 0 : B_r * d_head * element_bytes();
        const int streamed = stages * B_c * pair_bytes() + other_sums_bytes();
        const int in_shared = (own_tiles() - own_tiles_in_registers()) * n_threads() * 16;
        const int statistics = own_rows                          ? B_r * 2 * 4 + in_shared
                               : own_columns() && canonical == 0 ? B_r * 2 * 4 + shares_bytes()
                               : chunk_cluster > 0               ? cluster_exchange_bytes()
                               : canonical > 0                   ? exchange_bytes()
                                                                 : n_warps * B_r * 2 * 4;
        return queries + streamed + statistics + 80;
    }
    constexpr int shares_bytes() const { return 2 * B_r * B_c * 4; }
    // Canonical kernels: what the warps exchange per tile. It consists of each warp's maxima of all
    // rows, the sums of a quad's four lanes per 16 keys, and P.
    constexpr int maxima_bytes() const { return n_warps * B_r * 4; }
    constexpr int sums_bytes() const { return B_c / 16 * B_r * 16; }
    constexpr int exchange_bytes() const {
        return maxima_bytes() + sums_bytes() + B_r * B_c * element_bytes();
    }
    // Warps that compute probabilities: each has a tile in each of a round's waves.
    constexpr int probability_warps() const {
        return n_warps < chunk_cluster ? n_warps : chunk_cluster;
    }
    constexpr int cluster_waves() const {
        return (chunk_cluster + probability_warps() - 1) / probability_warps();
    }
    // The data that the CTAs of a cluster that computes a chunk, and their warps, exchange per
    // round: scores of eight rows with maxima, two buffers of P with its sums, factors and maxima,
    // and barriers. A warp's columns of V begin 64 bytes after the preceding warp's last ones.
    constexpr int cluster_exchange_bytes() const {
        const int keys = chunk_cluster * B_c;
        const int buffers = 2 * cluster_buffered_rows() / 8;
        return buffers * 32 * (keys + chunk_cluster * n_warps) +
               2 * (keys * 16 + chunk_cluster * 192) + 64 * stages * column_warps() +
               16 * (1 + cluster_waves() + stages);
    }
    // The most rows for which the scores of two rounds fit. If a round has more keys, the stages
    // leave no room for eight rows.
    constexpr int cluster_buffered_rows() const { return chunk_cluster * B_c <= 512 ? 8 : 4; }
    // Whether a run may be a whole sequence, which a CTA finds without a search. With d_head 128
    // and two stages, three CTAs per SM have no registers for that.
    constexpr bool has_whole_runs() const { return stages > 2 || d_head <= 64; }
    // Whether the decode kernel, if it is launched early, begins its work before the preceding
    // launch is over. Its CTAs then prefetch keys, and find their runs from guessed lengths.
    constexpr bool uses_pdl() const { return early && chunk_rows == 0; }
    // Whether a call with few parts may pass their states to the merge word by word. A separate
    // merge kernel takes them as they arrive.
    constexpr bool has_arrivals() const { return cluster > 0 && chunk_rows == 0 && !own_rows; }
    // The most CTAs per SM that registers allow; 0: only shared memory limits them.
    constexpr int most_ctas() const { return own_rows ? 256 / n_threads() : 0; }

    // Columns of a row that a warp merges at once, in steps of 128. More states of eight runs do
    // not fit in registers.
    constexpr int merged_steps() const { return d_head_v() > 256 ? 2 : (d_head_v() + 127) / 128; }
    // Static shared memory of a CTA that merges rows: the states of four warps.
    constexpr int merge_smem_bytes() const { return 4 * merged_steps() * 32 * 6 * 4; }

    // Threads of the kernel for sequences with many rows, whose warps have 16 rows each.
    constexpr int chunk_threads() const { return 32 * (chunk_rows / 16); }
    constexpr int chunk_smem_bytes() const {
        return chunk_rows * d_head * element_bytes() + stages * B_c * pair_bytes();
    }
    // Sequences with more rows per K/V head than this, which is half a tile, use that kernel. The
    // choice depends only on a sequence's own queries.
    constexpr int most_rows_without_chunks() const { return chunk_rows / 2; }
};

// The most parts of a sequence on any device.
constexpr int kMostParts = 1024;

// Flags. kPrefetchesRuns: if runs are whole sequences, CTAs prefetch a run's first keys before they
// know its length. kHoldsNextLaunch: for such runs, the next launch begins when all CTAs of this
// one are done, not when all have begun. kGuessesLengths: for other runs, CTAs find their first run
// from guessed lengths.
constexpr int kPrefetchesRuns = 1, kHoldsNextLaunch = 2, kGuessesLengths = 4;

// The most sequences with guessed lengths: one for each lane of a warp.
constexpr int kMostGuessed = 32;

// The most parts whose states the merge takes as they arrive: four for each of its warps.
constexpr int kMostArrivingParts = 16;

// Division of a number below 2^31 by a divisor known on the host: a multiplication and a shift.
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

// Strides of a (batch, seq, heads, d) tensor or a (block, slot, heads, d) cache, in elements. The
// last dimension is contiguous.
struct DecodeStrides {
    int64_t batch, row, head;
};

// Everything the kernels of one call need, passed by value as their only parameter.
struct DecodeKernelArgs {
    // The parameters that a CTA needs for its first copy are at the front of the struct: once the
    // preceding launch has ended, reading them delays that copy. The CTA stalls on each cache line,
    // so they are packed into three lines, which begin at the offsets 0, 48 and 112.
    const int32_t* cache_lens;  // number of keys before the call appends
    const void* new_k;          // keys to append; null: nothing is appended
    void *k_cache, *v_cache;
    int32_t batch, seq_q;     // packed: the longest sequence
    int32_t capacity;         // keys per sequence
    int32_t heads_per_group;  // query heads per K/V head
    int32_t heads_k;
    // log2 of the CTAs of a cluster, which hold all runs of a tile and merge them, and log2 of the
    // parts of such a run. cluster_levels = 0: there are no clusters.
    int32_t cluster_levels, cluster_run_levels;
    // The length of runs as a fraction of a call's units. Units are blocks of B_c keys, counted
    // once for each row tile of a K/V head. Negative: CTAs request runs from `run_counter`. 0: each
    // part is a run.
    float share, share_of_large;
    // If a tile's keys are one run at any length: divides by the runs of a sequence (K/V heads
    // times row tiles). The divisor is 0 otherwise.
    Divisor by_whole_runs;
    int32_t most_parts;  // of a sequence
    int32_t min_units;   // the fewest blocks of B_c keys in a part
    Divisor by_parts, by_heads_k;
    DecodeStrides k_cache_strides, v_cache_strides;
    int32_t passes;  // whether L2 should evict keys and values first
    int16_t flags;   // kPrefetchesRuns, kHoldsNextLaunch, kGuessesLengths
    // log2 of the number of keys per sequence that an early launch prefetches; 0: none.
    int16_t log2_prefetched_keys;
    // The number of units from which a call counts as large, and the number from which it may count
    // as ragged.
    float from_large, from_ragged;

    const void* q;  // with rotary embedding: the workspace of rotated queries
    void* o;
    float* lse;                   // natural log-sum-exp of each row; null if not requested
    const int32_t* page_table;    // null if the cache is dense, with one block per sequence
    const void* new_v;            // like new_k
    const void *cos, *sin;        // (positions, rotary_half); null: no rotary embedding
    const float* sinks;           // (heads_q); may be null
    const int32_t* cu_seqlens_q;  // (batch + 1) offsets of packed queries; null unless packed

    // Workspaces: sums of rows over a part's keys, relative to the part's own maximum; and each
    // row's maximum (log2) and sum of probabilities.
    float* part_o;
    float* part_statistics;
    uint32_t* run_counter;  // counts runs that CTAs have requested after their first; may be null
    // The states of a call's only sequence, if it has few parts. The merge takes them as they
    // arrive. They are words in memory that is zero between calls: all sums, then all statistics.
    // most_arriving is the largest such number of parts, 0 for none. arriving_rows is the distance
    // in rows from one K/V head's states to the next.
    uint32_t* arriving;
    int32_t most_arriving, arriving_rows;

    DecodeStrides q_strides, o_strides, new_k_strides, new_v_strides, q_source_strides;
    int64_t page_table_stride, cos_stride, sin_stride;
    int64_t lse_batch_stride, lse_head_stride;

    int32_t total_q;  // packed: the rows of all sequences
    // With d_v, d is the width of q and k, plus 2^16 times the width of v and o. A union would
    // change the code of other kernels.
    int32_t heads_q, d;
    int32_t blocks, positions, rotary_half;
    int32_t interleaved, rotary_fp32;
    int32_t window_left, window_right;

    // The two score factors are not adjacent: nvcc would load them as a pair and leave half of it
    // undefined where only the other is needed.
    float scale_log2;  // turns a score into base-2 logits: scale * log2(e), or softcap * log2(e)
                       // with a softcap
    // Like `share`, for calls in which a sequence has more than the fraction most_of_equal of all
    // units.
    float share_of_ragged, most_of_equal;
    int32_t most_slots;   // parts for whose sums there is memory, per K/V head
    int32_t slot_rows;    // rows of each of these parts
    int32_t merged_rows;  // rows of a K/V head whose keys may be split into several parts
    int32_t warms_up;     // whether a merging CTA fetches its instructions before it waits
    // Levels of subtree states that a CTA keeps in shared memory after the config's own data, and
    // the bytes of each level.
    int32_t kept_levels, kept_level_bytes;
    Divisor by_group, by_page, by_merged_rows;

    float score_argument;  // with a softcap: 2 log2(e) scale / softcap, for the tanh

    // For sequences with many rows: the most parts, the fewest blocks of B_c keys in a part, and
    // the location of their states. chunk_states is the row where these states begin. The others
    // are distances in rows from one K/V head, batch or query of the packed tensor to the next.
    int32_t most_chunk_parts, min_chunk_units;
    // With chunk_warpgroups: the most rows of a K/V head in sequences that these kernels compute.
    int32_t most_rows;
    int64_t chunk_states, chunk_head_rows, chunk_batch_rows, chunk_query_rows;

    // The number of keys of each sequence that its cache has dropped before its first one; null:
    // none.
    const int32_t* kv_offset;

    // Used only by append: the queries that it rotates, and the workspace for the rotated queries.
    const void* q_source;
    void* q_rotated;
};

static_assert(offsetof(DecodeKernelArgs, heads_k) == 48);
static_assert(offsetof(DecodeKernelArgs, k_cache_strides) == 112);
static_assert(offsetof(DecodeKernelArgs, flags) == 164);
static_assert(offsetof(DecodeKernelArgs, q) == 176);
// Parameters that are read late stay at the offset with which they were measured: 24 bytes further
// on they made small calls 1 to 2% slower.
static_assert(offsetof(DecodeKernelArgs, q_strides) == 288);
static_assert(offsetof(DecodeKernelArgs, total_q) == 448);

// Threads of a CTA in kernels without tiles. A merge has one row per CTA or per warp, append one
// row per warp.
constexpr int kMergeThreads = 128, kAppendThreads = 128;
// Minimum size of a chunk's part, as a multiple of the minimum for other sequences' parts. It is
// larger because each such part writes the sums of many rows.
constexpr int kChunkMinKeysFactor = 8;

// The arguments of kernels that run a caller's program. Kernels that compute no scores read only
// the first part.
struct DecodeProgramArgs : DecodeKernelArgs {
    ProgramArgs program;
};

// The arguments of kernels whose cache has scales, and of kernels that also run a program.
struct DecodeCacheArgs : DecodeKernelArgs {
    CacheScales scales;
};
struct DecodeScaledProgramArgs : DecodeCacheArgs {
    ProgramArgs program;
};

using decode_kernel_fn = void (*)(const DecodeKernelArgs);

}  // namespace flashsmith
