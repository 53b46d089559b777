// Derives types and constants from a config and its semantics: everything about the kernels that is
// fixed at compile time.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/canonical.cuh"
#include "common/constants.cuh"
#include "common/layout.cuh"
#include "mma_sync_decode/config.cuh"

#ifndef FLASHSMITH_MAX_SMEM_PER_BLOCK
#error \
    "define FLASHSMITH_MAX_SMEM_PER_BLOCK: the bytes of shared memory a CTA may have on the target"
#endif

namespace flashsmith {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

// CTAs per SM that fit in shared memory.
constexpr int ctas_by_smem(int bytes) {
    constexpr int kReserved = 1024;
    return std::max((FLASHSMITH_MAX_SMEM_PER_BLOCK + kReserved) / (bytes + kReserved), 1);
}

template <FlashDecodeKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticDecodeKernelConfig {
    static constexpr FlashDecodeKernelConfig CFG = CFG_;
    static constexpr Semantics SEMANTICS = SEMANTICS_;
    static constexpr bool has_scales = CFG.has_scales();
    // The arguments of kernels that read scales, but compute no scores.
    using ScaledArgs = std::conditional_t<has_scales, DecodeCacheArgs, DecodeKernelArgs>;
    using Args = std::conditional_t<
        !SEMANTICS.has_program(), ScaledArgs,
        std::conditional_t<has_scales, DecodeScaledProgramArgs, DecodeProgramArgs>>;

    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;

    static constexpr int d_head = CFG.d_head;   // of q and k
    static constexpr int d_v = CFG.d_head_v();  // of v and o
    static constexpr int d_wider = std::max(d_head, d_v);
    static constexpr bool has_d_v = CFG.d_v > 0;
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_warps = CFG.n_warps;
    static constexpr int n_threads = CFG.n_threads();
    static constexpr int stages = CFG.stages;
    static constexpr int warp_keys = CFG.keys_per_warp();
    static constexpr CacheFormat cache = CFG.cache;
    static constexpr bool has_codes = is_8bit(cache);  // 8-bit floats
    static constexpr int cache_bytes = CFG.cache_element_bytes();
    static constexpr int rows_in_stage = CFG.rows_in_stage();

    // Whether a warp has its own 16 rows and all keys of a stage, instead of its own keys.
    static constexpr bool own_rows = CFG.own_rows;
    // Whether a warp has its own columns of o and all keys of a stage. shares_stages: whether warps
    // have their own rows or their own columns.
    static constexpr bool own_columns = CFG.own_columns();
    static constexpr bool shares_stages = CFG.shares_stages();
    // Whether parts are chunks of the canonical order.
    static constexpr bool canonical = CFG.canonical > 0;
    // The CTAs of a cluster that computes a chunk together; 0: one CTA computes a chunk.
    static constexpr int chunk_cluster = CFG.chunk_cluster;
    // Whether such a cluster's first keys are copied before V, and P V loads operands ahead.
    static constexpr bool keys_first = CFG.keys_first;
    static constexpr int multiplied_keys = shares_stages ? B_c : warp_keys;

    static constexpr int row_tiles = own_rows ? 1 : B_r / 16;
    static constexpr int d_steps = d_head / 16;
    static constexpr int key_steps = multiplied_keys / 16;
    static constexpr int key_tiles = multiplied_keys / 8;
    static constexpr int column_tiles = d_v / 8 / (own_columns ? n_warps : 1);  // of a warp
    static constexpr bool keeps_queries = CFG.keeps_queries();

    // The CTAs per SM for which registers must suffice; 0 sets no bound. If this were one CTA more
    // than fits in shared memory, ptxas would spill. With pages or masks there are not enough
    // registers for a third CTA.
    static constexpr bool is_large = B_r * d_wider > 16 * 128;
    static constexpr int most_ctas = SEMANTICS == Semantics{} ? 3 : 2;
    static constexpr int min_ctas =
        chunk_cluster > 0         ? std::min(ctas_by_smem(CFG.smem_bytes()), 2)
        : own_rows                ? std::min(ctas_by_smem(CFG.smem_bytes()), CFG.most_ctas())
        : is_large || n_warps > 4 ? 1
                                  : std::min(ctas_by_smem(CFG.smem_bytes()), most_ctas);
    static constexpr int min_paged_ctas = own_rows || chunk_cluster > 0 ? min_ctas
                                          : is_large                    ? 0
                                                                        : std::min(min_ctas, 2);

    // Sequences with more rows use the kernel with tiles of chunk_rows rows.
    static constexpr int chunk_rows = CFG.chunk_rows;
    static constexpr int most_rows_without_chunks = CFG.most_rows_without_chunks();
    static constexpr bool takes_chunks = false;
    // Whether another kernel computes sequences with even more rows: see warpgroup_kernel.cuh.
    static constexpr bool has_warpgroups = CFG.chunk_warpgroups > 0;
    static constexpr int merge_smem_bytes = CFG.merge_smem_bytes();
    static constexpr bool has_clusters = CFG.cluster > 0 && kClusters;
    static constexpr bool has_whole_runs = CFG.has_whole_runs();
    static constexpr bool has_arrivals = CFG.has_arrivals() && kClusters;
    static constexpr bool uses_pdl = CFG.uses_pdl() && kClusters;

    // How many states, each of four columns of 16 rows, a thread merges at once: the warps' states
    // and a run's.
    static constexpr int places = 16 * d_v / 4;
    static constexpr int states_per_thread =
        CFG.full_tiles ? std::clamp(places / n_threads, 1, 4) : 1;

    using QueriesLayout = SmemLayout<B_r, d_head, true>;
    // In units of 16-bit columns.
    static constexpr int key_columns = CFG.key_bytes() / 2;
    static constexpr int value_columns = CFG.value_bytes() / 2;
    using KeysLayout = SmemLayout<multiplied_keys, key_columns, true>;
    using ValuesLayout = SmemLayout<multiplied_keys, value_columns, true>;

    // Shared-memory layout: byte offsets from its start. Each warp has its own stages, each with K
    // and then V, but warps with their own rows or columns share the stages. Queries of warps with
    // their own rows are kept in registers and pass through the last stage, the only one that is
    // not copied to before they are read.
    static_assert(keeps_queries || !own_rows, "own_rows: the queries must fit in registers");
    static constexpr int ring_offset = own_rows ? 0 : QueriesLayout::kBytes;
    static constexpr int stage_bytes = KeysLayout::kBytes + ValuesLayout::kBytes;
    static constexpr int queries_offset = own_rows ? (stages - 1) * stage_bytes : 0;
    // Bytes from a warp's stages to the next warp's.
    static constexpr int ring_bytes = shares_stages ? 0 : stages * stage_bytes;
    static constexpr int other_sums_offset =
        ring_offset + (shares_stages ? 1 : n_warps) * stages * stage_bytes;
    static constexpr int statistics_offset = other_sums_offset + CFG.other_sums_bytes();
    static constexpr int shares_offset = statistics_offset + B_r * 8;  // with own columns
    static constexpr int saved_tiles = CFG.own_tiles_in_registers();
    // In canonical kernels, the data that warps exchange replace the statistics.
    static constexpr int exchange_bytes = CFG.exchange_bytes();
    static constexpr int maxima_offset = statistics_offset;
    static constexpr int sums_offset = maxima_offset + CFG.maxima_bytes();
    static constexpr int P_offset = sums_offset + CFG.sums_bytes();
    static constexpr int search_offset =
        statistics_offset + (own_rows      ? B_r * 8 + (column_tiles - saved_tiles) * n_threads * 16
                             : canonical   ? exchange_bytes
                             : own_columns ? B_r * 8 + CFG.shares_bytes()
                                           : n_warps * B_r * 8);
    static_assert(search_offset % 32 == 0, "two search addresses alternate");
    static constexpr int target_offset = search_offset + 32;
    static constexpr int saved_states_offset = target_offset + 48;
    static_assert(chunk_cluster > 0 || saved_states_offset == CFG.smem_bytes());

    static_assert(own_rows || canonical || rows_in_stage * d_v * 4 <= stage_bytes,
                  "a warp's sums of 16 or 8 rows must fit in a stage");

    // The assumptions of the types above and of the kernels. `flashsmith explain` lists all rules
    // and their reasons.
    static constexpr bool valid_config() {
        static_assert(d_head % 32 == 0, "d_head: panels of 32 or 64 columns");
        static_assert(!own_columns || (d_head == 512 && !has_d_v && B_r == 16 && B_c == 32 &&
                                       n_warps == 4 && !own_rows && !CFG.full_tiles &&
                                       chunk_rows == 0 && chunk_cluster == 0 && !has_warpgroups),
                      "d_head: four warps share 512 columns, of 16 rows and 32 keys");
        static_assert(
            !has_d_v || (d_v % 64 == 0 && d_head % 64 == 0 && d_v <= 256 && chunk_cluster == 0),
            "d_v: panels of 64 columns, in all kernels but those of clusters");
        static_assert(B_r == 16 || B_r == 32, "B_r: 16 or 32");
        static_assert((B_c & (B_c - 1)) == 0, "B_c: a power of two");
        static_assert(own_columns || warp_keys == 16 || warp_keys == 32,
                      "B_c: 16 or 32 keys per warp");
        static_assert(!has_scales || (chunk_cluster == 0 && !has_warpgroups),
                      "cache: scales and 8-bit floats are for the kernels with mma.sync");
        static_assert(!keys_first || chunk_cluster > 0, "keys_first: of clusters only");
        static_assert(!SEMANTICS.has_program() || (chunk_cluster == 0 && !has_warpgroups),
                      "program: clusters and warpgroups have their own code for scores");
        static_assert(stages >= 2, "stages: at least 2, since one is read while another is copied");
        if constexpr (canonical) {
            static_assert(CFG.canonical == kCanonicalVersion &&
                              B_c == canonical_tile(d_head, kTargetArch, CFG.d_v) && !own_rows &&
                              chunk_rows == 0 && CFG.cluster == 0 &&
                              (n_warps <= 4 || chunk_cluster > 0),
                          "canonical: the order of operations is the specification's");
            static_assert(B_r * (2 * (d_v / n_warps + 16) + warp_keys) <= 32 * 192,
                          "a thread has too many sums and scores");
            static_assert(chunk_cluster == 0 || (kTargetArch >= 90 && B_r == 16 &&
                                                 d_head % (16 * chunk_cluster) == 0),
                          "chunk_cluster: a CTA has whole groups of 16 columns");
        } else if constexpr (own_rows) {
            static_assert(B_r == 16 * n_warps && !CFG.full_tiles, "own_rows: a warp has 16 rows");
            static_assert(d_v + B_c <= 192, "a thread has too many sums and scores");
        } else if constexpr (!own_columns) {
            static_assert(B_r * (d_v + warp_keys) <= 32 * (warp_keys == 16 ? 144 : 128),
                          "a thread has too many sums and scores");
        }
        static_assert(CFG.min_keys % B_c == 0, "min_keys: whole stages");
        static_assert(CFG.smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                      "the tiles need more shared memory than a CTA may have");
        if constexpr (chunk_rows > 0) {
            constexpr int copied = B_c / (chunk_rows / 16);
            static_assert(chunk_rows == 64 || chunk_rows == 128, "chunk_rows: 64 or 128");
            static_assert(copied <= 32 &&
                              copied >= (key_columns % 64 == 0 && value_columns % 64 == 0 ? 4 : 8),
                          "chunk_rows: an instruction copies 4 rows of 64 columns, 8 of 32");
            static_assert(d_v + B_c <= (B_c == 32 ? 288 : 224),
                          "a thread has too many sums and scores of chunks");
            static_assert(CFG.chunk_smem_bytes() <= FLASHSMITH_MAX_SMEM_PER_BLOCK,
                          "the tiles of chunks need more shared memory than a CTA may have");
        }
        return true;
    }
};

// Types and constants of the kernel of sequences with many rows, such as chunks of a prompt. A tile
// has many rows. Its warps have different rows, not different keys, so each key is copied once for
// all warps.
template <class Kernel>
struct ChunkKernelConfig : Kernel {
    static constexpr bool takes_chunks = true, own_rows = true, shares_stages = true;

    static constexpr int B_r = Kernel::chunk_rows;
    static constexpr int n_warps = B_r / 16;
    static constexpr int n_threads = 32 * n_warps;
    static constexpr int warp_keys = Kernel::B_c / n_warps;  // keys that a warp copies for all
                                                             // warps

    static constexpr int row_tiles = 1;
    static constexpr int key_steps = Kernel::B_c / 16;
    static constexpr int key_tiles = Kernel::B_c / 8;
    static constexpr bool keeps_queries = Kernel::d_head <= 128;

    using QueriesLayout = SmemLayout<B_r, Kernel::d_head, true>;
    using KeysLayout = SmemLayout<Kernel::B_c, Kernel::key_columns, true>;
    using ValuesLayout = SmemLayout<Kernel::B_c, Kernel::value_columns, true>;

    static constexpr int queries_offset = 0, ring_offset = QueriesLayout::kBytes;
    static constexpr int stage_bytes = KeysLayout::kBytes + ValuesLayout::kBytes;
    static constexpr int ring_bytes = 0;
    static_assert(ring_offset + Kernel::stages * stage_bytes == Kernel::CFG.chunk_smem_bytes());
};

}  // namespace flashsmith
