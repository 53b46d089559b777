// Measures the rate of mma.sync when ldmatrix loads one operand. A stays in registers, like Q in
// attention. B is in swizzled shared memory, like K, and every warp loads it.
//
// For each ldmatrix.x4, a warp with 16 rows issues two mma, and a warp with 32 rows issues four.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/layout.cuh"
#include "roofline/operands.cuh"

namespace flashsmith::roofline {

constexpr int kTiles = 4;  // Tiles of B, one per round, so that each round loads other operands
constexpr int kCols = 64;  // rows of a B tile, columns of C
constexpr int kDepth = 64;
constexpr int kSteps = kDepth / 16;

using Layout = SmemLayout<kTiles * kCols, kDepth, true>;

FS_DEVICE void fill_shared(uint32_t smem, const uint16_t* b) {
    constexpr int kChunks = kDepth / kChunkElements;
    for (int i = thread_index(); i < kTiles * kCols * kChunks; i += kThreads) {
        const uint32_t offset = Layout::Panel<false>::offset(i / kChunks, i % kChunks);
        store_shared_16B(smem + offset, load_global_16B(b + i * kChunkElements));
    }
    __syncthreads();
}

// a (kWarps, 16 kMTiles, kDepth), b (kTiles, kCols, kDepth), c (CTAs, kWarps, 16 kMTiles, kCols)
// in fp32: c = sum over rounds of a b[round % kTiles]^T.
template <typename value_t, int kMTiles>
FS_DEVICE void run(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    __shared__ __align__(1024) uint16_t tiles[kTiles * kCols * kDepth];
    constexpr int kRows = 16 * kMTiles;
    const uint32_t smem = shared_address(tiles);
    fill_shared(smem, b);

    const int warp = warp_index(), lane = lane_index();
    uint32_t a_fragments[kSteps][kMTiles][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
            load_a(a_fragments[k][m], a + warp * kRows * kDepth, kDepth, m * 16, k * 16);

    // The matrices 0 to 3 of an ldmatrix: columns 0-7 and 8-15 of the rows 0-7, then of the rows
    // 8-15.
    const Layout::Cursor lane_start(smem, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float acc[kMTiles][kCols / 8][4] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const uint32_t tile = round % kTiles * (kCols * kDepth * sizeof(uint16_t));
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int n = 0; n < kCols / 16; ++n) {
                uint32_t matrices[4];
                ldmatrix_x4(matrices, lane_start.at(n * 16, k * 2) + tile);
                const uint32_t b_fragments[2][2] = {{matrices[0], matrices[1]},
                                                    {matrices[2], matrices[3]}};
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int m = 0; m < kMTiles; ++m)
                        mma_m16n8k16<value_t>(acc[m][2 * n + half], a_fragments[k][m],
                                              b_fragments[half]);
            }
    }

    float* const own = c + (static_cast<int64_t>(block_index()) * kWarps + warp) * kRows * kCols;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n) store_c(own, kCols, m * 16, n * 8, acc[m][n]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_shared_16_rows_fp16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__half, 1>(a, b, c, rounds);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_shared_32_rows_fp16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__half, 2>(a, b, c, rounds);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_shared_16_rows_bf16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__nv_bfloat16, 1>(a, b, c, rounds);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_shared_32_rows_bf16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__nv_bfloat16, 2>(a, b, c, rounds);
}

}  // namespace flashsmith::roofline
