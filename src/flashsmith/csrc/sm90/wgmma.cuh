// wgmma, the MMA of a warpgroup: 64 rows by N columns, with a depth of 16 (sm_90a).
//
// Each warp's accumulator consists of the 16x8 tiles of mma.sync: d[0][n] of warp w of the
// warpgroup covers rows 16 w.. and columns 8 n... Packed to 16 bits, it is the A operand of the
// next GEMM.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// ---- matrices in shared memory ------------------------------------------------------------------

// A matrix in shared memory, as adjacent panels of `kColumns` 16-bit columns. The rows of a panel
// are contiguous. Their 16-byte chunks have the swizzle that TMA uses for the width of the panel.
template <int kColumns_>
struct Panel {
    static_assert(kColumns_ == 64 || kColumns_ == 32);
    static constexpr int kColumns = kColumns_;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kChunks = kColumns / 8;
    static constexpr int kGroupBytes = 8 * kRowBytes;  // eight rows: the swizzle's period
    static constexpr int kStepsPerPanel = kColumns / 16;

    FS_DEVICE static uint32_t offset(int row, int chunk) {
        chunk ^= kChunks == 8 ? row % 8 : row / 2 % 4;
        return row * kRowBytes + chunk * 16;
    }
    // The matrix descriptor for data at `smem`. `panel_stride` is the distance between panels in
    // bytes; it is used only if one instruction reads several panels.
    FS_DEVICE static uint64_t descriptor(uint32_t smem, uint32_t panel_stride = 16) {
        constexpr uint64_t kSwizzle = kColumns == 64 ? 1 : 2;  // 128 or 64 bytes
        return uint64_t{(smem & 0x3ffff) >> 4} | uint64_t{panel_stride >> 4} << 16 |
               uint64_t{kGroupBytes >> 4} << 32 | kSwizzle << 62;
    }
    // The amount to add to a descriptor for the k-th step of 16 columns, in a matrix with kRows
    // rows.
    template <int kRows>
    FS_DEVICE static constexpr uint64_t column_step(int k) {
        return (k / kStepsPerPanel * kRows * kRowBytes + k % kStepsPerPanel * 32) >> 4;
    }
    // The amount to add to a descriptor for the k-th step of 16 rows.
    FS_DEVICE static constexpr uint64_t row_step(int k) { return (k * 16 * kRowBytes) >> 4; }
};

// ---- order --------------------------------------------------------------------------------------

// The compiler does not move operations on these registers across this call.
template <int kTiles>
FS_DEVICE void pin(float (&d)[1][kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[0][n][e])::"memory");
}
template <int kSteps>
FS_DEVICE void pin(uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][i])::"memory");
}

// Must be called before the first wgmma that uses these registers.
template <typename... Registers>
FS_DEVICE void wgmma_fence(Registers&... registers) {
    (pin(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of wgmma, for which wgmma_wait() can wait.
FS_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all groups except the last `kPending`. Afterwards these registers may be used.
template <int kPending, typename... Registers>
FS_DEVICE void wgmma_wait(Registers&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(registers), ...);
}

// ---- the instruction ----------------------------------------------------------------------------

// Inline PTX needs a list of all operands: eight accumulator registers per 16 columns, and four for
// the last 8 of 72 columns (4_5).
#define FS_WGMMA_TEXT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FS_WGMMA_TEXT_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FS_WGMMA_TEXT_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FS_WGMMA_TEXT_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FS_WGMMA_TEXT_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FS_WGMMA_TEXT_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FS_WGMMA_TEXT_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FS_WGMMA_TEXT_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FS_WGMMA_TEXT_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FS_WGMMA_TEXT_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FS_WGMMA_TEXT_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FS_WGMMA_TEXT_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FS_WGMMA_TEXT_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FS_WGMMA_TEXT_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FS_WGMMA_TEXT_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FS_WGMMA_TEXT_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FS_WGMMA_TEXT_TO_1 FS_WGMMA_TEXT_0
#define FS_WGMMA_TEXT_TO_2 FS_WGMMA_TEXT_TO_1 ", " FS_WGMMA_TEXT_1
#define FS_WGMMA_TEXT_TO_3 FS_WGMMA_TEXT_TO_2 ", " FS_WGMMA_TEXT_2
#define FS_WGMMA_TEXT_TO_4 FS_WGMMA_TEXT_TO_3 ", " FS_WGMMA_TEXT_3
#define FS_WGMMA_TEXT_TO_5 FS_WGMMA_TEXT_TO_4 ", " FS_WGMMA_TEXT_4
#define FS_WGMMA_TEXT_TO_6 FS_WGMMA_TEXT_TO_5 ", " FS_WGMMA_TEXT_5
#define FS_WGMMA_TEXT_TO_7 FS_WGMMA_TEXT_TO_6 ", " FS_WGMMA_TEXT_6
#define FS_WGMMA_TEXT_TO_8 FS_WGMMA_TEXT_TO_7 ", " FS_WGMMA_TEXT_7
#define FS_WGMMA_TEXT_TO_9 FS_WGMMA_TEXT_TO_8 ", " FS_WGMMA_TEXT_8
#define FS_WGMMA_TEXT_TO_10 FS_WGMMA_TEXT_TO_9 ", " FS_WGMMA_TEXT_9
#define FS_WGMMA_TEXT_TO_11 FS_WGMMA_TEXT_TO_10 ", " FS_WGMMA_TEXT_10
#define FS_WGMMA_TEXT_TO_12 FS_WGMMA_TEXT_TO_11 ", " FS_WGMMA_TEXT_11
#define FS_WGMMA_TEXT_TO_13 FS_WGMMA_TEXT_TO_12 ", " FS_WGMMA_TEXT_12
#define FS_WGMMA_TEXT_TO_14 FS_WGMMA_TEXT_TO_13 ", " FS_WGMMA_TEXT_13
#define FS_WGMMA_TEXT_TO_15 FS_WGMMA_TEXT_TO_14 ", " FS_WGMMA_TEXT_14
#define FS_WGMMA_TEXT_TO_16 FS_WGMMA_TEXT_TO_15 ", " FS_WGMMA_TEXT_15

#define FS_WGMMA_TEXT_TO_4_5 FS_WGMMA_TEXT_TO_4 ", %32, %33, %34, %35"

#define FS_WGMMA_TILE(n) "+f"(d[0][n][0]), "+f"(d[0][n][1]), "+f"(d[0][n][2]), "+f"(d[0][n][3])
#define FS_WGMMA_D_1 FS_WGMMA_TILE(0), FS_WGMMA_TILE(1)
#define FS_WGMMA_D_2 FS_WGMMA_D_1, FS_WGMMA_TILE(2), FS_WGMMA_TILE(3)
#define FS_WGMMA_D_3 FS_WGMMA_D_2, FS_WGMMA_TILE(4), FS_WGMMA_TILE(5)
#define FS_WGMMA_D_4 FS_WGMMA_D_3, FS_WGMMA_TILE(6), FS_WGMMA_TILE(7)
#define FS_WGMMA_D_4_5 FS_WGMMA_D_4, FS_WGMMA_TILE(8)
#define FS_WGMMA_D_5 FS_WGMMA_D_4, FS_WGMMA_TILE(8), FS_WGMMA_TILE(9)
#define FS_WGMMA_D_6 FS_WGMMA_D_5, FS_WGMMA_TILE(10), FS_WGMMA_TILE(11)
#define FS_WGMMA_D_7 FS_WGMMA_D_6, FS_WGMMA_TILE(12), FS_WGMMA_TILE(13)
#define FS_WGMMA_D_8 FS_WGMMA_D_7, FS_WGMMA_TILE(14), FS_WGMMA_TILE(15)
#define FS_WGMMA_D_9 FS_WGMMA_D_8, FS_WGMMA_TILE(16), FS_WGMMA_TILE(17)
#define FS_WGMMA_D_10 FS_WGMMA_D_9, FS_WGMMA_TILE(18), FS_WGMMA_TILE(19)
#define FS_WGMMA_D_11 FS_WGMMA_D_10, FS_WGMMA_TILE(20), FS_WGMMA_TILE(21)
#define FS_WGMMA_D_12 FS_WGMMA_D_11, FS_WGMMA_TILE(22), FS_WGMMA_TILE(23)
#define FS_WGMMA_D_13 FS_WGMMA_D_12, FS_WGMMA_TILE(24), FS_WGMMA_TILE(25)
#define FS_WGMMA_D_14 FS_WGMMA_D_13, FS_WGMMA_TILE(26), FS_WGMMA_TILE(27)
#define FS_WGMMA_D_15 FS_WGMMA_D_14, FS_WGMMA_TILE(28), FS_WGMMA_TILE(29)
#define FS_WGMMA_D_16 FS_WGMMA_D_15, FS_WGMMA_TILE(30), FS_WGMMA_TILE(31)

// `pairs` of 16x8 tiles cover `columns`; i0... are the indices of the operands after d's.
#define FS_WGMMA_SS(type, pairs, columns, i0, i1, i2, i3)                                          \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #i2                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type       \
                 " {" FS_WGMMA_TEXT_TO_##pairs "}, %" #i0 ", %" #i1 ", accumulate, 1, 1, 0, %" #i3 \
                                               ";\n}"                                              \
                 : FS_WGMMA_D_##pairs                                                              \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB))

#define FS_WGMMA_RS(type, pairs, columns, i0, i1, i2, i3, i4, i5, i6)                        \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #i5                  \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
                 " {" FS_WGMMA_TEXT_TO_##pairs "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3     \
                                               "}, %" #i4 ", accumulate, 1, 1, %" #i6 ";\n}" \
                 : FS_WGMMA_D_##pairs                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),      \
                   "n"(kTransposeB))

// d = a b; if `accumulate`, d += a b. b is given by a descriptor. In memory b is K-major (each row
// of the matrix is a column of b) or, with kTransposeB, row-major.
template <typename value_t, int kColumns, bool kTransposeB>
struct Wgmma;

#define FS_WGMMA_SHAPE(pairs, columns, i0, i1, i2, i3, i4, i5, i6)                            \
    template <typename value_t, bool kTransposeB>                                             \
    struct Wgmma<value_t, columns, kTransposeB> {                                             \
        using D = float[1][columns / 8][4];                                                   \
        static constexpr bool kHalf = __is_same(value_t, __half);                             \
                                                                                              \
        /* a behind a descriptor, K-major */                                                  \
        FS_DEVICE static void run(D& d, uint64_t a, uint64_t b, int accumulate) {             \
            if constexpr (kHalf)                                                              \
                FS_WGMMA_SS("f16", pairs, columns, i0, i1, i2, i3);                           \
            else                                                                              \
                FS_WGMMA_SS("bf16", pairs, columns, i0, i1, i2, i3);                          \
        }                                                                                     \
        /* a in registers */                                                                  \
        FS_DEVICE static void run(D& d, const uint32_t (&a)[4], uint64_t b, int accumulate) { \
            if constexpr (kHalf)                                                              \
                FS_WGMMA_RS("f16", pairs, columns, i0, i1, i2, i3, i4, i5, i6);               \
            else                                                                              \
                FS_WGMMA_RS("bf16", pairs, columns, i0, i1, i2, i3, i4, i5, i6);              \
        }                                                                                     \
    };

FS_WGMMA_SHAPE(1, 16, 8, 9, 10, 11, 12, 13, 14)
FS_WGMMA_SHAPE(2, 32, 16, 17, 18, 19, 20, 21, 22)
FS_WGMMA_SHAPE(3, 48, 24, 25, 26, 27, 28, 29, 30)
FS_WGMMA_SHAPE(4, 64, 32, 33, 34, 35, 36, 37, 38)
FS_WGMMA_SHAPE(4_5, 72, 36, 37, 38, 39, 40, 41, 42)
FS_WGMMA_SHAPE(5, 80, 40, 41, 42, 43, 44, 45, 46)
FS_WGMMA_SHAPE(6, 96, 48, 49, 50, 51, 52, 53, 54)
FS_WGMMA_SHAPE(7, 112, 56, 57, 58, 59, 60, 61, 62)
FS_WGMMA_SHAPE(8, 128, 64, 65, 66, 67, 68, 69, 70)
FS_WGMMA_SHAPE(9, 144, 72, 73, 74, 75, 76, 77, 78)
FS_WGMMA_SHAPE(10, 160, 80, 81, 82, 83, 84, 85, 86)
FS_WGMMA_SHAPE(11, 176, 88, 89, 90, 91, 92, 93, 94)
FS_WGMMA_SHAPE(12, 192, 96, 97, 98, 99, 100, 101, 102)
FS_WGMMA_SHAPE(13, 208, 104, 105, 106, 107, 108, 109, 110)
FS_WGMMA_SHAPE(14, 224, 112, 113, 114, 115, 116, 117, 118)
FS_WGMMA_SHAPE(15, 240, 120, 121, 122, 123, 124, 125, 126)
FS_WGMMA_SHAPE(16, 256, 128, 129, 130, 131, 132, 133, 134)

#undef FS_WGMMA_SHAPE

}  // namespace flashsmith
