// Copies rows of k and v to slots of their caches. A thread copies 16 bytes of one row. If the
// cache has scales, it divides by them.
#pragma once

#include <type_traits>

#include "common/stored_row.cuh"
#include "slot_write/config.cuh"

namespace flashsmith {

template <SlotWriteKernelConfig CFG_, Semantics SEMANTICS_ = Semantics{}>
struct StaticSlotWriteConfig {
    static constexpr SlotWriteKernelConfig CFG = CFG_;
    static constexpr bool has_scales = CFG.has_scales(), has_codes = is_8bit(CFG.cache);
    static constexpr bool has_d_v = CFG.d_v > 0;  // if not, v is as wide as k
    using value_t = std::conditional_t<CFG.dtype == DType::FP16, __half, __nv_bfloat16>;
    using Args = std::conditional_t<has_scales, SlotWriteScaledArgs, SlotWriteKernelArgs>;
    static constexpr int kThreads = CFG.n_threads();
    static constexpr int kColumns = 8;  // 16 bytes of 16-bit elements
    static constexpr int kThreadsPerRow = CFG.most_columns() / kColumns;
    static_assert(CFG.most_columns() % kColumns == 0 && kThreads <= 1024);
};

// Writes a thread's columns of a row, divided by the scale of the row.
template <class Kernel>
FS_DEVICE void write_scaled(void* cache, int64_t first, const uint4& bits, float scale) {
    using value_t = typename Kernel::value_t;
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    uint32_t codes[2] = {}, quotients[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value_t pair[2];
        memcpy(pair, &words[i], sizeof pair);
        if constexpr (Kernel::has_codes)
            codes[i / 2] |=
                static_cast<uint32_t>(codes_of<Kernel::CFG.cache>(
                    __fdiv_rn(to_float(pair[0]), scale), __fdiv_rn(to_float(pair[1]), scale)))
                << i % 2 * 16;
        else
            quotients[i] = scaled_bits(pair[0], scale) |
                           static_cast<uint32_t>(scaled_bits(pair[1], scale)) << 16;
    }
    if constexpr (Kernel::has_codes)
        store_global_8B(static_cast<uint8_t*>(cache) + first, uint2{codes[0], codes[1]});
    else
        store_global_16B(static_cast<uint16_t*>(cache) + first,
                         {quotients[0], quotients[1], quotients[2], quotients[3]});
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    slot_write_kernel(const typename Kernel::Args args) {
    const int64_t index = int64_t{block_index()} * Kernel::kThreads + thread_index();
    const int column = index % Kernel::kThreadsPerRow * Kernel::kColumns;
    const int64_t copied_row = index / Kernel::kThreadsPerRow;
    // The rows of a token (of k and of v, for all heads) are consecutive.
    const auto rows_per_token = static_cast<uint32_t>(2 * args.heads);
    if (copied_row >= int64_t{args.count} * rows_per_token ||
        (!Kernel::has_d_v && column >= args.d))
        return;
    const auto row = static_cast<uint32_t>(copied_row);
    const uint32_t token = row / rows_per_token, part = row - token * rows_per_token;
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0 || slot >= args.total_slots) return;
    const auto place = static_cast<uint32_t>(slot);
    const uint32_t block = place / static_cast<uint32_t>(args.slots_per_block),
                   slot_of_block = place - block * static_cast<uint32_t>(args.slots_per_block);

    const bool is_v = part >= static_cast<uint32_t>(args.heads);
    if (Kernel::has_d_v && column >= (is_v ? args.d_v : args.d)) return;
    const uint32_t head = is_v ? part - args.heads : part;
    const NewRowStrides& from = is_v ? args.v_strides : args.k_strides;
    const SlotStrides& to = is_v ? args.v_cache_strides : args.k_cache_strides;
    const auto* source = static_cast<const uint16_t*>(is_v ? args.v : args.k) + token * from.row +
                         head * from.head + column;
    if constexpr (Kernel::has_scales) {
        const CacheScales& scales = args.scales;
        const float scale =
            is_v ? scale_of_head(scales.v, scales.v_step, scales.v_value, static_cast<int>(head))
                 : scale_of_head(scales.k, scales.k_step, scales.k_value, static_cast<int>(head));
        write_scaled<Kernel>(is_v ? args.v_cache : args.k_cache,
                             block * to.block + slot_of_block * to.slot + head * to.head + column,
                             *reinterpret_cast<const uint4*>(source), scale);
        return;
    }
    auto* target = static_cast<uint16_t*>(is_v ? args.v_cache : args.k_cache) + block * to.block +
                   slot_of_block * to.slot + head * to.head + column;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
}

}  // namespace flashsmith
