// The kernel that merges the states of a row's parts. Each warp of a CTA takes every fourth part in
// their order, and the warps' states are added in pairs: an order of the parts' numbers alone.
#pragma once

#include "mma_sync_decode/row_state.cuh"
#include "mma_sync_decode/split.cuh"

namespace flashsmith {

template <class Kernel>
struct RowMerge {
    static constexpr int kWarps = kMergeThreads / kWarpSize;
    static_assert(kWarps == 4, "two pairs");
    static constexpr int kColumnSteps = (Kernel::d_head + 127) / 128;  // a lane has four columns
    static constexpr int kAhead = 8;  // parts of a warp whose loads are on their way at once

    const DecodeKernelArgs& args;
    const int batch, head_k, row;  // of the K/V head's rows
    const DecodeSequence s;
    float (&shared)[kWarps][kColumnSteps][kWarpSize][5];

    FS_DEVICE void run() const {
        const int warp = thread_index() / kWarpSize, lane = lane_index();
        const DecodeStates places(args, s, batch, head_k);
        const float* const statistics = args.part_statistics + 2 * places.statistics(row);
        const float* const sums = args.part_o + places.sums(0, row) * Kernel::d_head;
        const int64_t part_stride = int64_t{places.rows} * Kernel::d_head;

        uint4 ahead[kAhead][kColumnSteps];
        load(ahead, sums, part_stride, warp, lane);
        float maximum = -kLargestFloat;
        for (int part = lane; part < s.parts; part += kWarpSize)
            maximum = fmaxf(maximum, statistics[2 * part]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, step));

        RowState states[kColumnSteps];
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) states[c].maximum = maximum;
        for (int begin = warp; begin < s.parts; begin += kWarps * kAhead) {
            if (begin != warp) load(ahead, sums, part_stride, begin, lane);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int part = begin + kWarps * i;
                if (part >= s.parts) continue;
                const float part_maximum = statistics[2 * part], sum = statistics[2 * part + 1];
#pragma unroll
                for (int c = 0; c < kColumnSteps; ++c)
                    states[c].add(part_maximum, sum,
                                  {__uint_as_float(ahead[i][c].x), __uint_as_float(ahead[i][c].y),
                                   __uint_as_float(ahead[i][c].z), __uint_as_float(ahead[i][c].w)});
            }
        }
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            float (&mine)[5] = shared[warp][c][lane];
#pragma unroll
            for (int e = 0; e < 4; ++e) mine[e] = states[c].o[e];
            mine[4] = states[c].sum;
        }
        __syncthreads();
        if (warp > 0) return;
        const int query = args.by_group.divide(row);
        const int head = head_k * args.heads_per_group + row - query * args.heads_per_group;
#pragma unroll
        for (int c = 0; c < kColumnSteps; ++c) {
            const int column = 128 * c + 4 * lane;
            if (column >= Kernel::d_head) continue;
            RowState all;
            all.maximum = maximum;
            const auto in_pairs = [&](int e) {
                return (shared[0][c][lane][e] + shared[1][c][lane][e]) +
                       (shared[2][c][lane][e] + shared[3][c][lane][e]);
            };
#pragma unroll
            for (int e = 0; e < 4; ++e) all.o[e] = in_pairs(e);
            all.sum = in_pairs(4);
            store_row<typename Kernel::value_t>(args, all, row_end(args, all, head), batch,
                                                s.first_query, query, head, column);
        }
    }

    FS_DEVICE void load(uint4 (&ahead)[kAhead][kColumnSteps], const float* sums, int64_t stride,
                        int begin, int lane) const {
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int c = 0; c < kColumnSteps; ++c) {
                const int part = begin + kWarps * i, column = 128 * c + 4 * lane;
                ahead[i][c] = uint4{0, 0, 0, 0};
                if (part < s.parts && column < Kernel::d_head)
                    ahead[i][c] = load_global_16B(sums + part * stride + column);
            }
    }
};

// All rows of the sequences that have several parts.
template <class Kernel>
struct MergedRows {
    FS_DEVICE static uint32_t items(const DecodeKernelArgs& args, const DecodeSequence& s) {
        return s.parts > 1 ? s.queries * args.heads_per_group * args.heads_k : 0;
    }
};

template <class Kernel>
__global__ void __launch_bounds__(kMergeThreads) decode_merge_kernel(const DecodeKernelArgs args) {
    using Merge = RowMerge<Kernel>;
    __shared__ float shared[Merge::kWarps][Merge::kColumnSteps][kWarpSize][5];
    // Where a sequence may have many rows, a CTA for each of every sequence would be far too many.
    if constexpr (Kernel::chunk_rows > 0) {
        SequenceItems<Kernel, MergedRows<Kernel>> items(args);
        DecodeSequence s;
        int batch, rest;
        for (uint32_t index = block_index(); items.find(index, batch, s, rest);
             index += gridDim.x) {
            const int row = args.by_heads_k.divide(rest);
            Merge{args, batch, rest - row * args.heads_k, row, s, shared}.run();
            __syncthreads();  // the next row's warps write where this one's are read
        }
        return;
    }
    const int sequence_head = args.by_merged_rows.divide(block_index());
    const int row = static_cast<int>(block_index()) - sequence_head * args.merged_rows;
    const int batch = args.by_heads_k.divide(sequence_head);
    const DecodeSequence s = sequence_of<Kernel>(args, batch);
    if (s.parts == 1 || row >= s.queries * args.heads_per_group) return;
    Merge{args, batch, sequence_head - batch * args.heads_k, row, s, shared}.run();
}

}  // namespace flashsmith
