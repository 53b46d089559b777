// Measures the rate of mma.sync with all operands in registers.
//
// There are eight warps, two per scheduler of an SM, with sixteen accumulators each. These are more
// than enough independent mma to hide the latency of each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "roofline/operands.cuh"

namespace flashsmith::roofline {

constexpr int kMTiles = 4, kNTiles = 4;
constexpr int kRows = kMTiles * 16, kCols = kNTiles * 8, kDepth = 16;
// How often an iteration of the loop issues the sixteen mma; with several times, the loop's own
// instructions take hardly any time.
constexpr int kPasses = 4;

// a (kWarps, kRows, kDepth), b (kWarps, kCols, kDepth), c (CTAs, kWarps, kRows, kCols) in fp32:
// c = rounds * kPasses * a b^T.
template <typename value_t>
FS_DEVICE void run(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    const int warp = warp_index();
    uint32_t a_fragments[kMTiles][4], b_fragments[kNTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
        load_a(a_fragments[m], a + warp * kRows * kDepth, kDepth, m * 16, 0);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
        load_b(b_fragments[n], b + warp * kCols * kDepth, kDepth, n * 8, 0);

    float acc[kMTiles][kNTiles][4] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int n = 0; n < kNTiles; ++n)
                    mma_m16n8k16<value_t>(acc[m][n], a_fragments[m], b_fragments[n]);

    float* const own = c + (static_cast<int64_t>(block_index()) * kWarps + warp) * kRows * kCols;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) store_c(own, kCols, m * 16, n * 8, acc[m][n]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_registers_fp16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__half>(a, b, c, rounds);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_registers_bf16(const uint16_t* a, const uint16_t* b, float* c, int rounds) {
    run<__nv_bfloat16>(a, b, c, rounds);
}

}  // namespace flashsmith::roofline
