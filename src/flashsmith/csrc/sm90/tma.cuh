// Tiles between global and shared memory by the tensor memory accelerator: one thread requests a
// whole panel. Coordinates count elements, (column, row, head, batch); packed tensors have their
// rows in three dimensions, see box_of_rows().
#pragma once

#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// Where a box begins in the dimensions of a tensor map (plan.cc). Packed there is a fifth, in which
// every box begins at the same coordinate.
template <bool kPacked>
struct TmaBox {
    int column;
    int first, second, third;
};

// A box of rows from `row` on of one head of a sequence with `count` rows.
//
// Dense, the dimensions are (column, row, head, batch), and what is past the sequence is outside of
// the tensor. Packed it is not: the next sequence begins there, whose values may be NaN, and
// 0 x NaN is NaN. So a packed tensor's map has rows twice: counted so that a sequence ends with the
// map, at row kRowsOfMap, and as the row of the tensor where it ends. Together they are kRowsOfMap
// rows too far, and the fifth dimension takes those back.
template <bool kPacked>
FS_DEVICE TmaBox<kPacked> box_of_rows(int row, int sequence_first, int count, int head, int batch) {
    if constexpr (kPacked)
        return {0, kRowsOfMap - count + row, sequence_first + count, head};
    else
        return {0, row, head, batch};
}

// The same of a group's query heads, token after token, from `token` and `head` on: there is one
// dimension more in a box, and heads come before rows.
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

// What lies outside of the tensor arrives as zeros, and counts towards the barrier all the same.
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

// The same to this place in every CTA of the cluster whose bit is set, and to its barrier there.
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

// What lies outside of the tensor is not written.
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
// This thread's stores have been read from shared memory.
FS_DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// This thread's stores to shared memory are seen by what TMA does next.
FS_DEVICE void tma_store_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashsmith
