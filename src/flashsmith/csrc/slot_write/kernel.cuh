// Copies rows of k and v to slots of their caches. A thread copies 16 bytes of one row.
#pragma once

#include "common/ptx_functions.cuh"
#include "slot_write/config.cuh"

namespace flashsmith {

template <SlotWriteKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticSlotWriteConfig {
    static constexpr SlotWriteKernelConfig CFG = CFG_;
    static constexpr int kThreads = CFG.n_threads();
    static constexpr int kColumns = 8;  // 16 bytes of 16-bit elements
    static constexpr int kThreadsPerRow = CFG.d_head / kColumns;
    static_assert(CFG.d_head % kColumns == 0 && kThreads <= 1024);
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    slot_write_kernel(const SlotWriteKernelArgs args) {
    const int64_t index = int64_t{block_index()} * Kernel::kThreads + thread_index();
    const int column = index % Kernel::kThreadsPerRow * Kernel::kColumns;
    const int64_t copied_row = index / Kernel::kThreadsPerRow;
    // The rows of a token are consecutive: those of k and of v for all heads.
    const auto rows_per_token = static_cast<uint32_t>(2 * args.heads);
    if (copied_row >= int64_t{args.count} * rows_per_token || column >= args.d) return;
    const auto row = static_cast<uint32_t>(copied_row);
    const uint32_t token = row / rows_per_token, part = row - token * rows_per_token;
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0 || slot >= args.total_slots) return;
    const auto place = static_cast<uint32_t>(slot);
    const uint32_t block = place / static_cast<uint32_t>(args.slots_per_block),
                   slot_of_block = place - block * static_cast<uint32_t>(args.slots_per_block);

    const bool is_v = part >= static_cast<uint32_t>(args.heads);
    const uint32_t head = is_v ? part - args.heads : part;
    const NewRowStrides& from = is_v ? args.v_strides : args.k_strides;
    const SlotStrides& to = is_v ? args.v_cache_strides : args.k_cache_strides;
    const auto* source = static_cast<const uint16_t*>(is_v ? args.v : args.k) + token * from.row +
                         head * from.head + column;
    auto* target = static_cast<uint16_t*>(is_v ? args.v_cache : args.k_cache) + block * to.block +
                   slot_of_block * to.slot + head * to.head + column;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
}

}  // namespace flashsmith
