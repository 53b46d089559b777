// The kernel that merges the parts of split tiles.
#pragma once

#include "common/merge.cuh"
#include "mla/row_scale.cuh"
#include "mla/tile.cuh"

namespace flashsmith {

// Merges the parts of the tiles that were split. Each warp merges one row.
template <class Kernel>
__global__ void __launch_bounds__(kMlaMergeThreads)
    mla_merge_kernel(const typename Kernel::Args args) {
    using value_t = typename Kernel::value_t;
    constexpr int kRows = kMlaMergeThreads / kWarpSize;
    static_assert(Kernel::B_r % kRows == 0, "the rows of a CTA are of one tile");
    const uint32_t index = block_index() * kRows + thread_index() / kWarpSize;
    const MlaTile<Kernel> tile(args, index / Kernel::B_r);
    const int row = tile.first_row + static_cast<int>(index % Kernel::B_r);
    wait_for_launch_before();  // CTAs without rows must wait too, as in mla_kernel
    if (row >= tile.row_end || !tile.is_split()) return;

    const int64_t first = tile.first_part_row + index % Kernel::B_r;
    const float* const lses = args.parts + args.part_rows * Kernel::d_v + first;
    constexpr int kColumns = Kernel::d_v / kWarpSize, kGroups = kColumns / 4;
    const float* rows = args.parts + first * Kernel::d_v + 4 * lane_index();
    MergedRow<kColumns> merged;
#pragma unroll 2
    for (int part = 0; part < tile.parts; ++part, rows += Kernel::B_r * Kernel::d_v) {
        float values[kColumns];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const float4 x = *reinterpret_cast<const float4*>(rows + 4 * kWarpSize * g);
            values[4 * g] = x.x, values[4 * g + 1] = x.y;
            values[4 * g + 2] = x.z, values[4 * g + 3] = x.w;
        }
        merged.add(lses[part * Kernel::B_r], 1.0f, values);
    }
    const float lse = merged.finish(args.sinks == nullptr ? nullptr : args.sinks + tile.head(row));
#pragma unroll
    for (float& x : merged.o) scale_values(args, x);
    if (lane_index() == 0 && args.lse != nullptr) *tile.lse(row) = lse;
    auto* const o =
        static_cast<value_t*>(args.o) + tile.element(args.o_strides, row) + 4 * lane_index();
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
        store_global_8B(o + 4 * kWarpSize * g,
                        uint2{pack_16bit<value_t>(merged.o[4 * g], merged.o[4 * g + 1]),
                              pack_16bit<value_t>(merged.o[4 * g + 2], merged.o[4 * g + 3])});
}

}  // namespace flashsmith
