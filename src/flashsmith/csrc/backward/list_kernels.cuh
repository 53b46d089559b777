// The kernels that write the lists of blocks. They run before the kernels that visit those blocks:
// see common/block_lists.cuh.
#pragma once

#include "backward/key_mask.cuh"
#include "backward/listed_steps.cuh"

namespace flashsmith {

// Lists the blocks of queries that each tile of keys visits.
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    backward_list_queries_kernel(const BackwardProgramArgs args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    constexpr int kGroups = Kernel::key_groups, kKeys = Kernel::B_c, kRows = Kernel::B_r;
    query_lists<Kernel>(args, args.program).enter_bits([&](const auto& tile, int block) {
        const auto [q, k] = rows_of_sequence<SEMANTICS>(args, tile.batch);
        const int first_key = tile.tile_of_head * kKeys, first_row = block * kRows;
        const int row_end = min(first_row + kRows, q.count);
        uint32_t bits = 0;
        if (first_key >= k.count || first_row >= row_end) return bits;
        const BlockRange range = BackwardKeyMask<SEMANTICS>(args, q.count, k.count)
                                     .query_blocks(first_key, kKeys, kRows);
        if (block < range.begin || block >= range.end) return bits;
        bits = bits_of_rows<SEMANTICS, kGroups, kKeys / kGroups>(
            args, args.program, {tile.batch, q.count, k.count}, tile.head, first_row, row_end,
            first_key);
        // Blocks with nonexistent rows are not full: 0 times an infinite key is NaN.
        if (row_end - first_row < kRows) bits = BlockEntry::not_full(bits);
        return bits;
    });
}

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    backward_compact_queries_kernel(const BackwardProgramArgs args) {
    query_lists<Kernel>(args, args.program).template compact<Kernel::key_groups>();
}

// Lists the blocks of keys that each tile of queries visits.
template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    backward_list_keys_kernel(const BackwardProgramArgs args) {
    constexpr Semantics SEMANTICS = Kernel::SEMANTICS;
    constexpr int kGroups = Kernel::query_groups, kRows = Kernel::dq_rows;
    constexpr int kKeys = Kernel::step_keys;
    key_lists<Kernel>(args, args.program).enter_bits([&](const auto& tile, int block) {
        const auto [q, k] = rows_of_sequence<SEMANTICS>(args, tile.batch);
        const int first_row = tile.tile_of_head * kRows;
        const int row_end = min(first_row + kRows, q.count);
        const BlockRange range =
            BackwardKeyMask<SEMANTICS>(args, q.count, k.count).key_blocks(first_row, kRows, kKeys);
        return bits_of_keys<SEMANTICS, kGroups, kRows / kGroups, kKeys>(
            args, args.program, {tile.batch, q.count, k.count}, tile.head, first_row, row_end,
            block, range);
    });
}

template <class Kernel>
__global__ void __launch_bounds__(kListThreads)
    backward_compact_keys_kernel(const BackwardProgramArgs args) {
    key_lists<Kernel>(args, args.program).template compact<Kernel::query_groups>();
}

}  // namespace flashsmith
