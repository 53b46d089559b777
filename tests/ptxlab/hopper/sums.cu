// fp32 sums in global memory, by vectors out of registers and by bulk copies out of shared memory.
// Their terms are small integers, so that every order gives the same bits.
#include "hopper.cuh"

DEVICE void add(float* target, float4 x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
DEVICE void add(float* target, float2 x) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x.x), "f"(x.y)
                 : "memory");
}
DEVICE float4 fetch_and_add(float* target, float4 x) {
    float4 old;
    asm volatile("atom.global.add.v4.f32 {%0, %1, %2, %3}, [%4], {%5, %6, %7, %8};"
                 : "=f"(old.x), "=f"(old.y), "=f"(old.z), "=f"(old.w)
                 : "l"(target), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
    return old;
}
DEVICE void add_range(float* target, uint32_t source, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(target),
        "r"(source), "r"(bytes)
        : "memory");
}
DEVICE void add_box(const void* map, int column, int row, uint32_t source) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;" ::"l"(map),
        "r"(column), "r"(row), "r"(source)
        : "memory");
}
template <int kAllowed>
DEVICE void wait_until_added() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kAllowed) : "memory");
}
// What this thread is ordered after, in shared and in global memory, is seen by bulk copies.
DEVICE void fence_all_memory() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE float term(const __half* input, int i) { return rintf(16.f * __half2float(input[i])); }

// Two CTAs, each adding to all of the output: input, 64 x 64, in sixteenths, times rank + 1, twice,
// and the second time 1 more. Then each doubles its rows and adds the input once more.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128, 1)
    sums(const __grid_constant__ Arguments arguments) {
    constexpr int kAll = 64 * 64, kHalf = kAll / 2;
    const int first = 4 * threadIdx.x, step = 4 * blockDim.x, rank = blockIdx.x % 2;
    const __half* input = static_cast<const __half*>(arguments.input);
    float* output = static_cast<float*>(arguments.output);
    float* tile = reinterpret_cast<float*>(shared_memory);
    for (int i = kHalf * rank + first; i < kHalf * (rank + 1); i += step)
        *reinterpret_cast<float4*>(output + i) = float4{};
    meet_cluster();
    for (int i = first; i < kAll; i += step) {
        const float weight = rank + 1;
        const float4 x = {weight * term(input, i), weight * term(input, i + 1),
                          weight * term(input, i + 2), weight * term(input, i + 3)};
        if (i < kHalf) {
            add(output + i, x);
        } else {
            add(output + i, float2{x.x, x.y});
            add(output + i + 2, float2{x.z, x.w});
        }
        *reinterpret_cast<float4*>(tile + i) = {x.x + weight, x.y + weight, x.z + weight,
                                                x.w + weight};
    }
    fence_all_memory();
    __syncthreads();
    if (threadIdx.x == 0) {
        add_range(output, shared_address(tile), 4 * kHalf);
        add_range(output + kHalf, shared_address(tile + kHalf), 4 * kHalf);
        wait_until_added<0>();
    }
    meet_cluster();
    for (int i = kHalf * rank + first; i < kHalf * (rank + 1); i += step) {
        const float4 x = {term(input, i), term(input, i + 1), term(input, i + 2),
                          term(input, i + 3)};
        const float4 now = *reinterpret_cast<const float4*>(output + i);
        const float4 old = fetch_and_add(output + i, now);
        add(output + i, float4{old.x - now.x + x.x, old.y - now.y + x.y, old.z - now.z + x.z,
                               old.w - now.w + x.w});
    }
}

// map 2: the output, 50 rows x 64, boxes of 16 rows. Box s, rows 16 s of the input (64 x 64) in
// sixteenths, is added from row 14 s - 4 on: the first and the last hang over, and all overlap.
extern "C" __global__ void __launch_bounds__(128, 1)
    box_sums(const __grid_constant__ Arguments arguments) {
    constexpr int kRows = 50, kBox = 16 * 64;
    const __half* input = static_cast<const __half*>(arguments.input);
    float* output = static_cast<float*>(arguments.output);
    float* tile = reinterpret_cast<float*>(shared_memory);
    for (int i = threadIdx.x; i < 64 * kRows; i += blockDim.x) output[i] = 1;
    for (int i = threadIdx.x; i < 4 * kBox; i += blockDim.x) tile[i] = term(input, i);
    fence_all_memory();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int s = 0; s < 4; ++s)
            add_box(arguments.maps[2], 0, 14 * s - 4, shared_address(tile + kBox * s));
        wait_until_added<0>();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * kRows; i += blockDim.x) output[i] *= 2;
}
