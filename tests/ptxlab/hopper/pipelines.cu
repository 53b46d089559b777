// Warps with roles of their own: rings of stages, clusters, results through shared memory.
#include "hopper.cuh"

constexpr int kTile = 64 * 64 * 2, kStages = 2;

// A warp that loads and two warpgroups that multiply. map 0: A, 128 rows x 64 steps;
// map 1: B, 64 rows x 64 steps. output = A B^T, 128 x 64.
extern "C" __global__ void __launch_bounds__(384, 1)
    ring(const __grid_constant__ Arguments arguments) {
    constexpr int kStage = 3 * kTile;
    const uint32_t stages = shared_address(shared_memory), full = stages + kStages * kStage,
                   empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 2);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x == 0) {
            for (int step = 0; step < arguments.steps; ++step) {
                const int slot = step % kStages, turn = step / kStages;
                wait_for(empty + 8 * slot, turn % 2 ^ 1);
                expect_bytes(full + 8 * slot, kStage);
                const uint32_t a = stages + slot * kStage;
                load_box(a, arguments.maps[0], 0, 0, step, full + 8 * slot);
                load_box(a + 2 * kTile, arguments.maps[1], 0, 0, step, full + 8 * slot);
            }
        }
        return;
    }
    take_registers<240>();
    const int consumer = threadIdx.x / 128 - 1;
    float d[32];
    for (int step = 0; step < arguments.steps; ++step) {
        const int slot = step % kStages, turn = step / kStages;
        const uint32_t a = stages + slot * kStage + consumer * kTile;
        const uint32_t b = stages + slot * kStage + 2 * kTile;
        wait_for(full + 8 * slot, turn % 2);
        fence_registers();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(d, k_major<128, 64>(a, k), k_major<128, 64>(b, k), step + k != 0);
        commit_products();
        wait_for_products<0>();
        if (threadIdx.x % 128 == 0) arrive(empty + 8 * slot);
    }
    float* output = static_cast<float*>(arguments.output) + 64 * 64 * consumer;
#pragma unroll
    for (int i = 0; i < 32; ++i) output[64 * row_of(i) + column_of(i)] = d[i];
}

// Two CTAs, each with 64 rows of A; each loads half of every B for both. map 0: A, 128 rows x
// 64 steps, box of 64 rows; map 1: B, 64 rows x 64 steps, box of 32 rows. output = A B^T.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1)
    multicast(const __grid_constant__ Arguments arguments) {
    constexpr int kStage = 2 * kTile;
    const uint32_t stages = shared_address(shared_memory), full = stages + kStages * kStage,
                   empty = full + 8 * kStages;
    const uint32_t rank = blockIdx.x % 2;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 2);
        }
        publish_barriers();
    }
    meet_cluster();
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) {
            for (int step = 0; step < arguments.steps; ++step) {
                const int slot = step % kStages, turn = step / kStages;
                wait_for(empty + 8 * slot, turn % 2 ^ 1);
                expect_bytes(full + 8 * slot, kStage);
                const uint32_t a = stages + slot * kStage, b = a + kTile;
                load_box(a, arguments.maps[0], 0, 64 * rank, step, full + 8 * slot);
                load_box_for(3, b + rank * kTile / 2, arguments.maps[1], 0, 32 * rank, step,
                             full + 8 * slot);
            }
        }
    } else {
        float d[32];
        for (int step = 0; step < arguments.steps; ++step) {
            const int slot = step % kStages, turn = step / kStages;
            const uint32_t a = stages + slot * kStage, b = a + kTile;
            wait_for(full + 8 * slot, turn % 2);
            fence_registers();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                multiply(d, k_major<128, 64>(a, k), k_major<128, 64>(b, k), step + k != 0);
            commit_products();
            wait_for_products<0>();
            if (threadIdx.x % 128 < 2) arrive_at(empty + 8 * slot, threadIdx.x % 128);
        }
        float* output = static_cast<float*>(arguments.output) + 64 * 64 * rank;
#pragma unroll
        for (int i = 0; i < 32; ++i) output[64 * row_of(i) + column_of(i)] = d[i];
    }
    meet_cluster();
}

// Every result leaves through shared memory, drained while the next tile is computed. map 0: A,
// 64 steps rows x 64; map 1: B, 64 rows x 64; map 2: the output in float16, of any number of rows.
extern "C" __global__ void __launch_bounds__(128, 1)
    drained(const __grid_constant__ Arguments arguments) {
    const uint32_t a = shared_address(shared_memory), b = a + kTile, o = b + kTile,
                   full = o + kTile;
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        publish_barriers();
    }
    __syncthreads();
    for (int step = 0; step < arguments.steps; ++step) {
        if (threadIdx.x == 0) {
            expect_bytes(full, step ? kTile : 2 * kTile);
            load_box(a, arguments.maps[0], 0, 64 * step, 0, full);
            if (step == 0) load_box(b, arguments.maps[1], 0, 0, 0, full);
        }
        wait_for(full, step % 2);
        float d[32];
        fence_registers();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(d, k_major<128, 64>(a, k), k_major<128, 64>(b, k), k != 0);
        commit_products();
        wait_for_products<0>();
        if (threadIdx.x == 0) wait_until_stores_read<0>();
        meet(1, 128);
        store_tile(d, o);
        fence_async_proxy();
        meet(1, 128);
        if (threadIdx.x == 0) store_box(arguments.maps[2], 0, 64 * step, 0, o);
    }
    if (threadIdx.x == 0) wait_until_stores_read<0>();
}

// Two warpgroups take turns at one scratch tile: P = A B^T, then output += P A in float32, where
// each has an A of its own. map 0: A, 128 rows x 64; map 1: B, 64 rows x 64.
extern "C" __global__ void __launch_bounds__(256, 1)
    turns(const __grid_constant__ Arguments arguments) {
    const uint32_t a = shared_address(shared_memory), b = a + 2 * kTile, scratch = b + kTile,
                   full = scratch + kTile;
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        expect_bytes(full, 3 * kTile);
        load_box(a, arguments.maps[0], 0, 0, 0, full);
        load_box(b, arguments.maps[1], 0, 0, 0, full);
    }
    wait_for(full, 0);
    const int side = threadIdx.x / 128;
    const uint32_t own = a + side * kTile;
    float d[32], p[32];
    if (side == 1) signal(1, 256);
    for (int step = 0; step < arguments.steps; ++step) {
        fence_registers();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(p, k_major<128, 64>(own, k), k_major<128, 64>(b, k), k != 0);
        commit_products();
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < 32; ++i) p[i] *= float(step + 1);
        meet(1 + side, 256);
        store_tile(p, scratch);
        fence_async_proxy();
        meet(3 + side, 128);
        fence_registers();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply(d, k_major<128, 64>(scratch, k), k_major<128, 64>(own, k), step + k != 0);
        commit_products();
        wait_for_products<0>();
        if (side == 0 || step + 1 < arguments.steps) signal(2 - side, 256);
    }
    float* output = static_cast<float*>(arguments.output) + 64 * 64 * side;
#pragma unroll
    for (int i = 0; i < 32; ++i) output[64 * row_of(i) + column_of(i)] = d[i];
}
