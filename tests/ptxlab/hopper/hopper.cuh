// What the probes share: one line of PTX a function, descriptors, fragment indices.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>

// Tensor maps first: cuTensorMapEncodeTiled wants 64-byte alignment.
struct Arguments {
    alignas(64) unsigned char maps[3][128];
    const void* input;
    void* output;
    int steps;
};

#define DEVICE __device__ __forceinline__

extern __shared__ __align__(1024) unsigned char shared_memory[];

DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// mbarriers
DEVICE void init_barrier(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
DEVICE void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 peer;\nmapa.shared::cluster.u32 peer, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [peer];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
DEVICE void wait_for(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Bulk copies of boxes with three dimensions: columns of a panel, rows, panels.
DEVICE void load_box(uint32_t target, const void* map, int column, int row, int panel,
                     uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(panel), "r"(barrier)
        : "memory");
}
DEVICE void load_box_for(uint16_t ctas, uint32_t target, const void* map, int column, int row,
                         int panel, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(panel), "r"(barrier), "h"(ctas)
        : "memory");
}
DEVICE void store_box(const void* map, int column, int row, int panel, uint32_t source) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
        "cp.async.bulk.commit_group;" ::"l"(map),
        "r"(column), "r"(row), "r"(panel), "r"(source)
        : "memory");
}
template <int kAllowed>
DEVICE void wait_until_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of parts of a CTA, registers of warpgroups
DEVICE void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void signal(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
template <int kRegisters>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// wgmma m64n64k16, float16 in, float32 out
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kAllowed>
DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kAllowed) : "memory");
}

#define ACCUMULATORS                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define BOUND(d)                                                                               \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),          \
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),          \
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// Both operands K-major in shared memory.
DEVICE void multiply(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS
        ", %32, %33, p, 1, 1, 0, 0;\n}"
        : BOUND(d)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
// A in registers, B MN-major.
DEVICE void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS
        ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : BOUND(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

// Descriptors. A tile lies in panels of kSpan bytes a row (16 without a swizzle), all rows of a
// panel one below the other, as a bulk copy brings them.
template <int kSpan>
constexpr int kPanelBytes = kSpan ? kSpan : 16;
template <int kSpan>
constexpr uint64_t kSwizzle = kSpan == 128 ? 1 : kSpan == 64 ? 2 : kSpan == 32 ? 3 : 0;

template <int kSpan>
DEVICE uint64_t descriptor(uint32_t start, int leading, int stride) {
    return uint64_t((start & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 |
           uint64_t(stride >> 4) << 32 | kSwizzle<kSpan> << 62;
}
// Step k of a K-major tile of kRows rows.
template <int kSpan, int kRows>
DEVICE uint64_t k_major(uint32_t tile, int k) {
    constexpr int kPanel = kPanelBytes<kSpan>;
    const int byte = 32 * k;
    const uint32_t start = tile + byte / kPanel * kRows * kPanel + byte % kPanel;
    return descriptor<kSpan>(start, kSpan ? 16 : kRows * kPanel, 8 * kPanel);
}
// Step k of an MN-major tile whose k dimension is its kRows rows.
template <int kSpan, int kRows>
DEVICE uint64_t mn_major(uint32_t tile, int k) {
    constexpr int kPanel = kPanelBytes<kSpan>;
    const uint32_t start = tile + 16 * k * kPanel;
    const int across = kRows * kPanel, down = 8 * kPanel;
    return kSpan ? descriptor<kSpan>(start, across, down) : descriptor<kSpan>(start, down, across);
}

// Accumulator i of this thread: row and column of the 64 x 64 result.
DEVICE int row_of(int i) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    return 16 * warp + lane / 4 + 8 * (i / 2 % 2);
}
DEVICE int column_of(int i) { return 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2; }

// All 32 accumulators as float16 into a 64 x 64 tile with 128-byte rows and their swizzle.
DEVICE void store_tile(const float (&d)[32], uint32_t tile) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const int row = 16 * warp + lane % 16, piece = j + lane / 16;
        const uint32_t at = tile + 128 * row + ((piece ^ (row % 8)) << 4);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 pair = __floats2half2_rn(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]);
            words[i] = reinterpret_cast<const uint32_t&>(pair);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    }
}
