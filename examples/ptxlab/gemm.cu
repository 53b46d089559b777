// C = A B for row-major matrices whose sizes are multiples of 16. cp.async copies the next tiles
// while the current ones are multiplied. A CTA has 16 x 16 threads, one for each element of C.

#include <cuda_pipeline.h>

constexpr int kTile = 16;
constexpr int kVector = 4;  // floats in a copy of 16 bytes

// The first 64 threads copy a tile.
__device__ __forceinline__ void copy_tile(float (*tile)[kTile], const float* source, int stride,
                                          int thread) {
    const int row = thread / (kTile / kVector);
    const int column = thread % (kTile / kVector) * kVector;
    if (row < kTile)
        __pipeline_memcpy_async(&tile[row][column], &source[row * stride + column],
                                kVector * sizeof(float));
}

extern "C" __global__ void gemm(const float* __restrict__ A, const float* __restrict__ B,
                                float* __restrict__ C, int n, int k) {
    __shared__ __align__(16) float a[2][kTile][kTile];
    __shared__ __align__(16) float b[2][kTile][kTile];
    const int thread = threadIdx.y * kTile + threadIdx.x;
    const float* A_rows = A + blockIdx.y * kTile * k;
    const float* B_columns = B + blockIdx.x * kTile;

    const int steps = k / kTile;
    copy_tile(a[0], A_rows, k, thread);
    copy_tile(b[0], B_columns, n, thread);
    __pipeline_commit();

    float sum = 0.0f;
    for (int step = 0; step < steps; step++) {
        const int next = step + 1;
        if (next < steps) {
            copy_tile(a[next % 2], A_rows + next * kTile, k, thread);
            copy_tile(b[next % 2], B_columns + next * kTile * n, n, thread);
        }
        __pipeline_commit();
        __pipeline_wait_prior(1);  // all copies except those of the next step
        __syncthreads();
        for (int i = 0; i < kTile; i++)
            sum += a[step % 2][threadIdx.y][i] * b[step % 2][i][threadIdx.x];
        __syncthreads();  // before the step after the next overwrites these tiles
    }
    C[(blockIdx.y * kTile + threadIdx.y) * n + blockIdx.x * kTile + threadIdx.x] = sum;
}
