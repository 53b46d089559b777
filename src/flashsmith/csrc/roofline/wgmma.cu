// Measures the rate of wgmma with both operands in shared memory (sm_90a only).
//
// Two warpgroups share the tensor cores. An operand is two adjacent tiles of 64 columns with the
// 128-byte swizzle, like K with head dimension 128.
#include "common/layout.cuh"
#include "sm90/wgmma.cuh"

namespace flashsmith::roofline {

constexpr int kWarpgroups = 2;
constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
constexpr int kRows = kWarpgroupRows;
constexpr int kDepth = 128;

// Fills kTileRows x kDepth elements in panels of 64 columns.
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
// c = rounds * a b^T.
template <typename value_t, int kCols>
FS_DEVICE void run(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    constexpr int kABytes = kWarpgroups * kRows * kDepth * 2;
    const uint32_t a_smem = shared_address(smem_bytes), b_smem = a_smem + kABytes;
    fill_tile<kWarpgroups * kRows>(a_smem, a);
    fill_tile<kCols>(b_smem, b);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const int warpgroup = thread_index() / kWarpgroupThreads;
    const uint64_t a_start = Panel<64>::descriptor(a_smem + warpgroup * kRows * 128, 0);
    const uint64_t b_start = Panel<64>::descriptor(b_smem, 0);
    float acc[1][kCols / 8][4] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
            // 16 columns are 32 bytes in the rows of a panel; descriptors count in 16 bytes.
            const int panel = k / 4, columns = k % 4 * 2;
            Wgmma<value_t, kCols, false>::run(acc,
                                              a_start + panel * (kWarpgroups * kRows * 8) + columns,
                                              b_start + panel * (kCols * 8) + columns, 1);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();

    const int thread = thread_index() % kWarpgroupThreads;
    const int row = thread / kWarpSize * kWarpRows + thread % kWarpSize / 4;
    float* const own =
        c + (static_cast<int64_t>(block_index()) * kWarpgroups + warpgroup) * kRows * kCols;
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i)
        own[(row + i / 2 % 2 * 8) * kCols + i / 4 * 8 + thread % 4 * 2 + i % 2] =
            acc[0][i / 4][i % 4];
}

#define FS_WGMMA_RATE(name, value_t, cols)                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)              \
        name(const uint16_t* a, const uint16_t* b, float* c, int rounds) { \
        run<value_t, cols>(a, b, c, rounds);                               \
    }
FS_WGMMA_RATE(wgmma_n128_fp16, __half, 128)
FS_WGMMA_RATE(wgmma_n256_fp16, __half, 256)
FS_WGMMA_RATE(wgmma_n128_bf16, __nv_bfloat16, 128)
FS_WGMMA_RATE(wgmma_n256_bf16, __nv_bfloat16, 256)

}  // namespace flashsmith::roofline
