// Transposes a row-major matrix, tile by tile through shared memory, so that both the loads and the
// stores of a warp are coalesced. A CTA has 32 x 8 threads.

constexpr int kTile = 32;
constexpr int kRows = 8;

extern "C" __global__ void transpose(const float* __restrict__ in, float* __restrict__ out,
                                     int rows, int columns) {
    // The tile is padded by one column, so that a column's elements are in different banks.
    __shared__ float tile[kTile][kTile + 1];

    int column = blockIdx.x * kTile + threadIdx.x;
    int row = blockIdx.y * kTile + threadIdx.y;
    for (int i = 0; i < kTile; i += kRows)
        if (row + i < rows && column < columns)
            tile[threadIdx.y + i][threadIdx.x] = in[(row + i) * columns + column];
    __syncthreads();

    column = blockIdx.y * kTile + threadIdx.x;
    row = blockIdx.x * kTile + threadIdx.y;
    for (int i = 0; i < kTile; i += kRows)
        if (row + i < columns && column < rows)
            out[(row + i) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
}
