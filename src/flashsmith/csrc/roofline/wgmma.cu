// How fast wgmma runs with both operands in shared memory (sm_90a only).
//
// Two warpgroups take turns at the tensor cores. Operands are 64 columns wide tiles in the 128-byte
// swizzle, two of them side by side, as K is for a head of 128.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/layout.cuh"

namespace flashsmith::roofline {

constexpr int kWarpgroups = 2;
constexpr int kThreads = kWarpgroups * 128;
constexpr int kRows = 64;  // of a warpgroup
constexpr int kDepth = 128;

// ---- the instruction ----------------------------------------------------------------------------

#define FS_OPERANDS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FS_OPERANDS_16(d, i) \
    FS_OPERANDS_4(d, i), FS_OPERANDS_4(d, i + 4), FS_OPERANDS_4(d, i + 8), FS_OPERANDS_4(d, i + 12)
#define FS_OPERANDS_64(d, i)                                                    \
    FS_OPERANDS_16(d, i), FS_OPERANDS_16(d, i + 16), FS_OPERANDS_16(d, i + 32), \
        FS_OPERANDS_16(d, i + 48)
#define FS_OPERANDS_128(d, i) FS_OPERANDS_64(d, i), FS_OPERANDS_64(d, i + 64)

#define FS_WGMMA_N128(type)                                                                 \
    asm volatile(                                                                           \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                        \
        " {"                                                                                \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "%64, %65, 1, 1, 1, 0, 0;"                                                          \
        : FS_OPERANDS_64(d, 0)                                                              \
        : "l"(a), "l"(b))

#define FS_WGMMA_N256(type)                                                                      \
    asm volatile(                                                                                \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                             \
        " {"                                                                                     \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "       \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "       \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "       \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
        "%111, "                                                                                 \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
        "%126, %127}, "                                                                          \
        "%128, %129, 1, 1, 1, 0, 0;"                                                             \
        : FS_OPERANDS_128(d, 0)                                                                  \
        : "l"(a), "l"(b))

// d += a b, a 64 x 16 and b 16 x N behind their descriptors.
template <typename value_t>
FS_DEVICE void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    if constexpr (__is_same(value_t, __half))
        FS_WGMMA_N128("f16");
    else
        FS_WGMMA_N128("bf16");
}
template <typename value_t>
FS_DEVICE void wgmma(float (&d)[128], uint64_t a, uint64_t b) {
    if constexpr (__is_same(value_t, __half))
        FS_WGMMA_N256("f16");
    else
        FS_WGMMA_N256("bf16");
}

FS_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
FS_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
FS_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A K-major tile in the 128-byte swizzle: groups of eight rows are 1,024 bytes apart.
FS_DEVICE uint64_t descriptor(uint32_t smem) {
    constexpr uint64_t kSwizzle128B = 1ull << 62;
    constexpr uint64_t kGroupStride = 1024 >> 4;
    return kSwizzle128B | kGroupStride << 32 | (smem & 0x3ffff) >> 4;
}

// ---- the measurement ----------------------------------------------------------------------------

// kTileRows x kDepth elements as panels of 64 columns.
template <int kTileRows>
FS_DEVICE void fill_tile(uint32_t smem, const uint16_t* matrix) {
    using Layout = SmemLayout<kTileRows, kDepth, true>;
    constexpr int kChunks = kDepth / kChunkElements;
    for (int i = thread_index(); i < kTileRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const uint32_t panel = chunk / 8 * Layout::template Panel<false>::kBytes;
        const uint32_t offset = Layout::template Panel<false>::offset(row, chunk % 8);
        store_shared_16B(smem + panel + offset, load_global_16B(matrix + i * kChunkElements));
    }
}

// a (kWarpgroups, kRows, kDepth), b (kCols, kDepth), c (CTAs, kWarpgroups, kRows, kCols) in fp32:
// c = turns * a b^T.
template <typename value_t, int kCols>
FS_DEVICE void run(const uint16_t* a, const uint16_t* b, float* c, int turns) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    constexpr int kABytes = kWarpgroups * kRows * kDepth * 2;
    const uint32_t a_smem = shared_address(smem_bytes), b_smem = a_smem + kABytes;
    fill_tile<kWarpgroups * kRows>(a_smem, a);
    fill_tile<kCols>(b_smem, b);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const int warpgroup = thread_index() / 128;
    const uint64_t a_start = descriptor(a_smem + warpgroup * kRows * 128);
    const uint64_t b_start = descriptor(b_smem);
    float acc[kCols / 2] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
            // 16 columns are 32 bytes of a panel's rows; descriptors count 16 bytes.
            const int panel = k / 4, columns = k % 4 * 2;
            wgmma<value_t>(acc, a_start + panel * (kWarpgroups * kRows * 8) + columns,
                           b_start + panel * (kCols * 8) + columns);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();

    const int thread = thread_index() % 128, row = thread / 32 * 16 + thread % 32 / 4;
    float* const own =
        c + (static_cast<int64_t>(block_index()) * kWarpgroups + warpgroup) * kRows * kCols;
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i)
        own[(row + i / 2 % 2 * 8) * kCols + i / 4 * 8 + thread % 4 * 2 + i % 2] = acc[i];
}

#define FS_WGMMA_RATE(name, value_t, cols)                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)             \
        name(const uint16_t* a, const uint16_t* b, float* c, int turns) { \
        run<value_t, cols>(a, b, c, turns);                               \
    }
FS_WGMMA_RATE(wgmma_n128_fp16, __half, 128)
FS_WGMMA_RATE(wgmma_n256_fp16, __half, 256)
FS_WGMMA_RATE(wgmma_n128_bf16, __nv_bfloat16, 128)
FS_WGMMA_RATE(wgmma_n256_bf16, __nv_bfloat16, 256)

}  // namespace flashsmith::roofline
