// Sums an array: each thread sums elements in a grid-stride loop, then warps sum by shuffles, and
// each warp puts one value in shared memory.

__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = warpSize / 2; offset > 0; offset /= 2)
        value += __shfl_down_sync(0xffffffff, value, offset);
    return value;
}

extern "C" __global__ void reduction(const float* __restrict__ x, float* __restrict__ total,
                                     int n) {
    __shared__ float warp_sums[32];
    const int lane = threadIdx.x % warpSize;
    const int warp = threadIdx.x / warpSize;

    float value = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        value += x[i];

    value = warp_sum(value);
    if (lane == 0) warp_sums[warp] = value;
    __syncthreads();

    if (warp == 0) {
        const int n_warps = blockDim.x / warpSize;
        value = warp_sum(lane < n_warps ? warp_sums[lane] : 0.0f);
        if (lane == 0) atomicAdd(total, value);
    }
}
