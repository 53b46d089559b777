// Copies tiles between global and shared memory by the tensor memory accelerator: one thread
// requests a whole panel. Coordinates are (column, row, head, batch) in elements. Packed tensors
// have three row dimensions; see box_of_rows().
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// The coordinates at which a box begins in a tensor map (plan.cc). Packed maps have a fifth
// dimension, in which every box begins at the same coordinate.
template <bool kPacked>
struct TmaBox {
    int column;
    int first, second, third;
};

// A box of rows of one head, starting at `row`, in a sequence of `count` rows.
//
// Dense maps have dimensions (column, row, head, batch), and rows past the sequence are outside the
// tensor. In packed tensors the next sequence begins there. Its values may be NaN, and 0 x NaN is
// NaN. A packed map therefore counts rows twice: once so that the sequence ends at the end of the
// map, row kRowsOfMap, and once as the tensor row where the sequence ends. Their sum is kRowsOfMap
// rows too large, and the fifth dimension subtracts those.
template <bool kPacked>
FS_DEVICE TmaBox<kPacked> box_of_rows(int row, int sequence_first, int count, int head, int batch) {
    if constexpr (kPacked)
        return {0, kRowsOfMap - count + row, sequence_first + count, head};
    else
        return {0, row, head, batch};
}

// The same for a group's query heads, token after token, starting at `token` and `head`. A box has
// one more dimension, and heads come before rows.
template <bool kPacked>
FS_DEVICE TmaBox<kPacked> box_of_group(int token, int sequence_first, int count, int head,
                                       int batch) {
    if constexpr (kPacked)
        return {0, head, kRowsOfMap - count + token, sequence_first + count};
    else
        return {0, head, token, batch};
}

FS_DEVICE void tma_prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Elements outside the tensor arrive as zeros and count towards the barrier as well.
template <bool kPacked>
FS_DEVICE void tma_load(uint32_t smem, const TensorMap* map, const TmaBox<kPacked>& box,
                        uint32_t barrier) {
    if constexpr (kPacked)
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(smem),
            "l"(map), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third),
            "r"(kRowsOfMap), "r"(barrier)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem),
            "l"(map), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third), "r"(barrier)
            : "memory");
}

// Multicast: writes to this address in every CTA of the cluster whose bit is set, and signals the
// barrier there.
template <bool kPacked>
FS_DEVICE void tma_load_multicast(uint32_t smem, const TensorMap* map, const TmaBox<kPacked>& box,
                                  uint32_t barrier, uint16_t ctas) {
    if constexpr (kPacked)
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem),
            "l"(map), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third),
            "r"(kRowsOfMap), "r"(barrier), "h"(ctas)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem),
            "l"(map), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third),
            "r"(barrier), "h"(ctas)
            : "memory");
}

// Elements outside the tensor are not written.
template <bool kPacked>
FS_DEVICE void tma_store(const TensorMap* map, const TmaBox<kPacked>& box, uint32_t smem) {
    if constexpr (kPacked)
        asm volatile(
            "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
            "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
            "r"(smem), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third),
            "r"(kRowsOfMap)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
            "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
            "r"(smem), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third)
            : "memory");
}
FS_DEVICE void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have been read from shared memory.
FS_DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Makes this thread's shared-memory stores visible to subsequent TMA operations.
FS_DEVICE void tma_store_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashsmith
