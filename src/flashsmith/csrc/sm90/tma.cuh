// Copies tiles between global and shared memory by the tensor memory accelerator: one thread starts
// the copy of a whole panel. Coordinates are (column, row, head, batch), in elements. Packed
// tensors have the rows in three dimensions; see box_of_rows().
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// The coordinates in a tensor map (plan.cc) at which a box begins. A packed map has a fifth
// dimension, in which all boxes begin at the same coordinate.
template <bool kPacked>
struct TmaBox {
    int column;
    int first, second, third;
};

// The box of rows of one head that begins at `row`, in a sequence with `count` rows.
//
// A dense map has the dimensions (column, row, head, batch), and rows past the sequence are outside
// the tensor. In a packed tensor, the next sequence begins there. It may contain NaN, and 0 x NaN
// is NaN. So a packed map counts rows twice: once so that the sequence ends with the map, at row
// kRowsOfMap, and once as rows of the tensor up to the end of the sequence. The sum of both is too
// large by kRowsOfMap rows, which the fifth dimension subtracts.
template <bool kPacked>
FS_DEVICE TmaBox<kPacked> box_of_rows(int row, int sequence_first, int count, int head, int batch) {
    if constexpr (kPacked)
        return {0, kRowsOfMap - count + row, sequence_first + count, head};
    else
        return {0, row, head, batch};
}

// The box of the query heads of a group, token after token, that begins at `token` and `head`.
// The box has one more dimension, and heads come before rows.
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

// Elements outside the tensor arrive as zeros; the barrier counts their bytes, too.
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

// The copy of tma_load() with an L2 cache policy; see cache_hint().
FS_DEVICE void tma_load(uint32_t smem, const TensorMap* map, const TmaBox<true>& box,
                        uint32_t barrier, uint64_t hint) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem),
        "l"(map), "r"(box.column), "r"(box.first), "r"(box.second), "r"(box.third), "r"(kRowsOfMap),
        "r"(barrier), "l"(hint)
        : "memory");
}

// Multicast: writes to this address in each CTA of the cluster whose bit is set, and signals the
// barrier in that CTA.
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
// Waits until the stores of this thread have read shared memory.
FS_DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Makes this thread's stores to shared memory visible to later TMA operations.
FS_DEVICE void tma_store_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashsmith
