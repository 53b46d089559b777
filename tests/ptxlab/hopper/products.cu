// Tiles through TMA into wgmma: one warpgroup, 64 x 64 results in float32.
#include "hopper.cuh"

// map 0: A, 64 rows x 64; map 1: B, 64 rows x 64. output = A B^T.
template <int kSpan>
DEVICE void product_of_tiles(const Arguments& arguments) {
    constexpr int kTile = 64 * 64 * 2, kPanels = 128 / kPanelBytes<kSpan>;
    const uint32_t a = shared_address(shared_memory), b = a + kTile, full = b + kTile;
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect_bytes(full, 2 * kTile);
        load_box(a, arguments.maps[0], 0, 0, 0, full);
        load_box(b, arguments.maps[1], 0, 0, 0, full);
    }
    wait_for(full, 0);
    float d[32];
    fence_registers();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        multiply(d, k_major<kSpan, 64>(a, k), k_major<kSpan, 64>(b, k), k != 0);
    commit_products();
    wait_for_products<0>();
    float* output = static_cast<float*>(arguments.output);
#pragma unroll
    for (int i = 0; i < 32; ++i) output[64 * row_of(i) + column_of(i)] = d[i];
    static_assert(kPanels * kPanelBytes<kSpan> == 128);
}

// input: P, 64 x 64; map 0: V, 64 rows x 64. output = P V, P from registers, V as it comes.
template <int kSpan>
DEVICE void product_of_fragments(const Arguments& arguments) {
    constexpr int kTile = 64 * 64 * 2;
    const uint32_t v = shared_address(shared_memory), full = v + kTile;
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect_bytes(full, kTile);
        load_box(v, arguments.maps[0], 0, 0, 0, full);
    }
    const uint32_t* words = static_cast<const uint32_t*>(arguments.input);
    uint32_t p[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            p[k][r] = words[32 * row_of(2 * (r % 2)) + 8 * k + 4 * (r / 2) + threadIdx.x % 4];
    wait_for(full, 0);
    float d[32];
    fence_registers();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(d, p[k], mn_major<kSpan, 64>(v, k), k != 0);
    commit_products();
    wait_for_products<0>();
    float* output = static_cast<float*>(arguments.output);
#pragma unroll
    for (int i = 0; i < 32; ++i) output[64 * row_of(i) + column_of(i)] = d[i];
}

#define ENTRIES(span)                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                       \
        tiles_##span(const __grid_constant__ Arguments arguments) {                         \
        product_of_tiles<span>(arguments);                                                  \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                       \
        fragments_##span(const __grid_constant__ Arguments arguments) {                     \
        product_of_fragments<span>(arguments);                                              \
    }
ENTRIES(0)
ENTRIES(32)
ENTRIES(64)
ENTRIES(128)
