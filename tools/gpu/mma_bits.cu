// Computes the same sums of products by mma.sync m16n8k16, and by every form of wgmma m64nNk16 that
// flashsmith's kernels use. mma_bits.py compares their bits.
//
// One CTA, a warpgroup, computes 64 rows by 256 columns of C + A B. It uses a tile of A (64 rows)
// and a tile of B (256 rows) in global memory; k is along the rows of both. Each tile of A is
// multiplied with each tile of B. All kernels have the same arguments, and write the same elements
// of D.
#include "common/ptx_functions.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashsmith {

// wgmma with 8 columns is defined here, because csrc/ does not use it.
#define WGMMA_8(type)                                                                \
    if constexpr (kRegisters)                                                        \
        asm volatile(                                                                \
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %9, 0;\n"            \
            "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type               \
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, accumulate, 1, 1, %10;\n}"     \
            : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),   \
              "n"(kTransposeB));                                                     \
    else                                                                             \
        asm volatile(                                                                \
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %6, 0;\n"            \
            "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type               \
            " {%0, %1, %2, %3}, %4, %5, accumulate, 1, 1, 0, %7;\n}"                 \
            : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]) \
            : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB))

template <typename value_t, bool kTransposeB>
struct Wgmma<value_t, 8, kTransposeB> {
    using D = float[1][1][4];

    template <typename A>
    FS_DEVICE static void run(D& d, const A& a, uint64_t b, int accumulate) {
        constexpr bool kRegisters = !__is_same(A, uint64_t);
        if constexpr (__is_same(value_t, __half)) {
            WGMMA_8("f16");
        } else {
            WGMMA_8("bf16");
        }
    }
};

}  // namespace flashsmith

using namespace flashsmith;

constexpr int kRows = kWarpgroupRows, kColumns = 256;
// How many steps of k are copied to shared memory at once.
constexpr int kSteps = 4, kDepth = 16 * kSteps;
using Tile = Panel<kDepth>;

// The arguments of every kernel. `stride` is how many elements there are from one row of A or B to
// the next, at least 64; B has `b_tiles` tiles. Without `accumulate`, mma.sync starts with 0 and
// does not read C; wgmma must ignore C, because its first step has predicate 0.
struct Sums {
    const uint16_t *a, *b;
    const float* c;
    float* d;
    int steps, stride, accumulate;

    FS_DEVICE Sums(const uint16_t* a, const uint16_t* b, const float* c, float* d, int steps,
                   int stride, int b_tiles, int accumulate)
        : a(a + block_index() / b_tiles * kRows * stride),
          b(b + block_index() % b_tiles * kColumns * stride),
          c(c + block_index() / b_tiles * kRows * kColumns),
          d(d + block_index() * kRows * kColumns),
          steps(steps),
          stride(stride),
          accumulate(accumulate) {}

    // The index of the accumulator element e of this lane, for the 16x8 tile at this row and
    // column.
    FS_DEVICE int place(int row, int column, int e) const {
        const int lane = lane_index();
        return (row + lane / 4 + e / 2 * 8) * kColumns + column + lane % 4 * 2 + e % 2;
    }
    FS_DEVICE uint32_t pair(const uint16_t* operand, int row, int k) const {
        return *reinterpret_cast<const uint32_t*>(operand + row * stride + k);
    }
    // Loads the 16x16 part of A for this warp that begins at column k.
    FS_DEVICE void load_a(uint32_t (&registers)[4], int k) const {
        const int lane = lane_index(), row = thread_index() / kWarpSize * kWarpRows + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            registers[i] = pair(a, row + i % 2 * 8, k + i / 2 * 8 + lane % 4 * 2);
    }
};

// ---- mma.sync -----------------------------------------------------------------------------------

template <typename value_t>
FS_DEVICE void by_mma_sync(const Sums& sums) {
    const int lane = lane_index(), row = thread_index() / kWarpSize * kWarpRows;
    for (int column = 0; column < kColumns; column += 8) {
        float d[4];
        for (int e = 0; e < 4; ++e) d[e] = sums.accumulate ? sums.c[sums.place(row, column, e)] : 0;
        for (int k = 0; k < 16 * sums.steps; k += 16) {
            uint32_t a[4], b[2];
            sums.load_a(a, k);
            for (int i = 0; i < 2; ++i)
                b[i] = sums.pair(sums.b, column + lane / 4, k + i * 8 + lane % 4 * 2);
            mma_m16n8k16<value_t>(d, a, b);
        }
        for (int e = 0; e < 4; ++e) sums.d[sums.place(row, column, e)] = d[e];
    }
}

// ---- wgmma --------------------------------------------------------------------------------------

// Copies the columns k to k + 63 of `rows` rows.
FS_DEVICE void copy_rows(const Sums& sums, const uint16_t* from, uint8_t* tile, int rows, int k) {
    for (int i = thread_index(); i < rows * Tile::kChunks; i += kWarpgroupThreads) {
        const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
        const uint4 x = load_global_16B(from + row * sums.stride + k + 8 * chunk);
        store_shared_16B(shared_address(tile) + Tile::offset(row, chunk), x);
    }
}
// The same, transposed: k is along the columns of panels with 64 rows, which are next to each
// other.
FS_DEVICE void copy_transposed(const Sums& sums, const uint16_t* from, uint8_t* tile, int rows,
                               int k) {
    for (int i = thread_index(); i < kDepth * rows / 8; i += kWarpgroupThreads) {
        const int row = i % (rows / 8) * 8, column = i / (rows / 8);
        uint32_t x[4];
        for (int j = 0; j < 8; j += 2) {
            const uint16_t* two = from + (row + j) * sums.stride + k + column;
            x[j / 2] = two[0] | uint32_t{two[sums.stride]} << 16;
        }
        const int panel = row / Tile::kColumns * kDepth * Tile::kRowBytes;
        const int chunk = row % Tile::kColumns / 8;
        store_shared_16B(shared_address(tile) + panel + Tile::offset(column, chunk),
                         {x[0], x[1], x[2], x[3]});
    }
}

template <typename value_t, int kN, bool kTransposeB, bool kRegistersA>
FS_DEVICE void by_wgmma(const Sums& sums) {
    using Mma = Wgmma<value_t, kN, kTransposeB>;
    alignas(1024) __shared__ uint8_t a_tile[kRows * Tile::kRowBytes];
    alignas(1024) __shared__ uint8_t b_tile[kColumns * Tile::kRowBytes];
    const uint64_t a = Tile::descriptor(shared_address(a_tile));
    const uint64_t b = Tile::descriptor(shared_address(b_tile), kDepth * Tile::kRowBytes);
    const int row = thread_index() / kWarpSize * kWarpRows;

    for (int column = 0; column < kColumns; column += kN) {
        typename Mma::D d;
#pragma unroll
        for (int n = 0; n < kN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) d[0][n][e] = sums.c[sums.place(row, column + 8 * n, e)];
        int accumulate = sums.accumulate;
        uint32_t registers[kSteps][4] = {};
        const auto multiply = [&](int step) {
            const uint64_t b_step =
                kTransposeB ? Tile::row_step(step) : Tile::template column_step<kColumns>(step);
            if constexpr (kRegistersA)
                Mma::run(d, registers[step], b + b_step, accumulate);
            else
                Mma::run(d, a + Tile::template column_step<kRows>(step), b + b_step, accumulate);
            accumulate = 1;
        };

        for (int first = 0; first < sums.steps; first += kSteps) {
            __syncthreads();
            const uint16_t* columns = sums.b + column * sums.stride;
            if constexpr (kTransposeB)
                copy_transposed(sums, columns, b_tile, kN, 16 * first);
            else
                copy_rows(sums, columns, b_tile, kN, 16 * first);
            if constexpr (kRegistersA) {
#pragma unroll
                for (int s = 0; s < kSteps; ++s) sums.load_a(registers[s], 16 * (first + s));
            } else {
                copy_rows(sums, sums.a, a_tile, kRows, 16 * first);
            }
            tma_store_fence();  // The same proxy fence is needed before wgmma reads
            __syncthreads();
            // A whole tile is one group of wgmma, as in the kernels. For a part of a tile, each
            // step is waited for.
            wgmma_fence(d, registers);
            if (sums.steps - first >= kSteps) {
#pragma unroll
                for (int s = 0; s < kSteps; ++s) multiply(s);
                wgmma_commit();
                wgmma_wait<0>(d, registers);
            } else {
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    if (first + s == sums.steps) break;
                    multiply(s);
                    wgmma_commit();
                    wgmma_wait<0>(d, registers);
                    wgmma_fence(d, registers);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums.d[sums.place(row, column + 8 * n, e)] = d[0][n][e];
    }
}

// ---- kernels ------------------------------------------------------------------------------------

#define KERNEL(name, function)                                                          \
    extern "C" __global__ void __launch_bounds__(kWarpgroupThreads)                     \
        name(const uint16_t* a, const uint16_t* b, const float* c, float* d, int steps, \
             int stride, int b_tiles, int accumulate) {                                 \
        function(Sums(a, b, c, d, steps, stride, b_tiles, accumulate));                 \
    }
#define WGMMA_KERNELS(type, value_t, n)                                            \
    KERNEL(wgmma_##type##_n##n##_shared_k, (by_wgmma<value_t, n, false, false>))   \
    KERNEL(wgmma_##type##_n##n##_shared_mn, (by_wgmma<value_t, n, true, false>))   \
    KERNEL(wgmma_##type##_n##n##_registers_k, (by_wgmma<value_t, n, false, true>)) \
    KERNEL(wgmma_##type##_n##n##_registers_mn, (by_wgmma<value_t, n, true, true>))
#define KERNELS(type, value_t)               \
    KERNEL(mma_##type, by_mma_sync<value_t>) \
    WGMMA_KERNELS(type, value_t, 8)          \
    WGMMA_KERNELS(type, value_t, 64)         \
    WGMMA_KERNELS(type, value_t, 128)        \
    WGMMA_KERNELS(type, value_t, 256)

KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

// Counts how many of `count` words differ.
extern "C" __global__ void count_differences(const uint32_t* one, const uint32_t* other, int count,
                                             unsigned long long* differing) {
    const int words = blockDim.x * gridDim.x;
    int found = 0;
    for (int i = block_index() * blockDim.x + thread_index(); i < count; i += words)
        found += one[i] != other[i];
    if (found) atomicAdd(differing, static_cast<unsigned long long>(found));
}
