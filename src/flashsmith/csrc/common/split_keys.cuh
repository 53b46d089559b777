// Splits keys into parts (the knob split_keys). Where tiles of rows would leave SMs idle, several
// CTAs compute one tile, each over a share of the tile's visible K/V blocks. A second launch merges
// the parts.
//
// The parts go to a workspace: first the fp32 output rows of all parts, then a pair of log-sum-exp
// and maximum for each of these rows. Other tiles are computed as usual.
#pragma once

#include "common/constants.cuh"
#include "common/key_mask.cuh"
#include "common/merge.cuh"

namespace flashsmith {

// Replaces a row of the parts if the tile is computed whole.
constexpr int kNoPart = -1;

// The blocks of part `part`. The parts differ by at most one block, and a part may be empty.
template <int kParts>
FS_DEVICE BlockRange part_of(BlockRange blocks, int part) {
    const int begin = blocks.begin, count = max(blocks.end - begin, 0);
    blocks.begin = begin + count * part / kParts;
    blocks.end = begin + count * (part + 1) / kParts;
    return blocks;
}

// Log-sum-exp and maximum of the parts' rows.
template <int d_v>
FS_DEVICE float2* part_statistics(const ForwardKernelArgs& args) {
    return reinterpret_cast<float2*>(args.parts + args.part_rows * d_v);
}

// The index in lse and row_max at which the rows of a head begin; when packed, the rows of all
// sequences of a head.
template <Semantics SEMANTICS>
FS_DEVICE int64_t first_statistic(const ForwardKernelArgs& args, int batch, int head) {
    if constexpr (SEMANTICS.packed) return int64_t{head} * args.total_q;
    return (int64_t{batch} * args.heads_q + head) * args.seq_q;
}

// A row of a split tile.
struct SplitRow {
    int part_row;  // row in the first part
    int batch, head;
    int row, q_first;  // row in its sequence; first row of the sequence in the tensor
};

// Merges four columns of a row from all of its parts in order. The parts' rows are B_r rows apart.
template <class Kernel>
FS_DEVICE void merge_parts(const ForwardKernelArgs& args, const SplitRow& of, int column) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    constexpr int kParts = Kernel::CFG.split_keys, kColumns = 4;
    const float* const rows = args.parts + int64_t{of.part_row} * Kernel::d_v + column;
    const float2* const statistics = part_statistics<Kernel::d_v>(args) + of.part_row;
    // All loads precede the sums, which form one dependency chain.
    float4 parts[kParts];
    float2 lse_and_max[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        lse_and_max[i] = statistics[i * Kernel::B_r];
        parts[i] = *reinterpret_cast<const float4*>(rows + int64_t{i} * Kernel::B_r * Kernel::d_v);
    }
    MergedRow<kColumns> merged;
    float maximum = -INFINITY;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        merged.add(lse_and_max[i].x, 1.0f, {parts[i].x, parts[i].y, parts[i].z, parts[i].w});
        maximum = fmaxf(maximum, lse_and_max[i].y);
        has_nan |= lse_and_max[i].y != lse_and_max[i].y;
    }
    const bool no_sinks = SEMANTICS.partial || args.sinks == nullptr;
    const float lse = merged.finish(no_sinks ? nullptr : args.sinks + of.head);

    if (column == 0) {
        const int64_t at =
            first_statistic<SEMANTICS>(args, of.batch, of.head) + of.q_first + of.row;
        if (args.lse != nullptr) args.lse[at] = lse;
        // Comparisons ignore NaN, as in OnlineSoftmax::finalize().
        if (!SEMANTICS.partial && args.row_max != nullptr)
            args.row_max[at] = has_nan && maximum < INFINITY ? NAN : maximum;
    }
    const int64_t at = of.batch * args.o_batch_stride +
                       (int64_t{of.q_first} + of.row) * args.o_seq_stride +
                       of.head * args.o_head_stride + column;
    if constexpr (SEMANTICS.partial)
        *reinterpret_cast<float4*>(static_cast<float*>(args.o) + at) = {merged.o[0], merged.o[1],
                                                                        merged.o[2], merged.o[3]};
    else
        store_global_8B(static_cast<typename Kernel::value_t*>(args.o) + at,
                        uint2{pack_16bit<typename Kernel::value_t>(merged.o[0], merged.o[1]),
                              pack_16bit<typename Kernel::value_t>(merged.o[2], merged.o[3])});
}

// The work of one merge thread: four columns of a row of a split tile.
template <class Kernel>
struct MergeThread {
    static constexpr int kThreadsPerRow = Kernel::d_v / 4;
    int tile, tile_row, column;

    FS_DEVICE MergeThread() {
        const int64_t index = int64_t{block_index()} * kPartMergeThreads + thread_index();
        const auto row = static_cast<uint32_t>(index / kThreadsPerRow);
        tile = row / Kernel::B_r;
        tile_row = row % Kernel::B_r;
        column = index % kThreadsPerRow * 4;
    }
};

}  // namespace flashsmith
