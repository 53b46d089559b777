// Inline PTX for any family, one thin function per instruction. Shared-memory addresses are 32-bit
// addresses of the shared window.
//
// The statements are volatile so that the PTX keeps the order of the source. A config's placement
// of loads and copies is then visible in the PTX and not only intended. ptxas remains free to
// schedule.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/constants.cuh"

#define FS_DEVICE __device__ __forceinline__

namespace flashsmith {

FS_DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Reads the special register at every call, whereas the compiler may keep threadIdx and blockIdx in
// a register throughout.
FS_DEVICE int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
FS_DEVICE int lane_index() {
    return unsigned(thread_index()) % kWarpSize;
}
FS_DEVICE uint32_t block_index() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// ---- copies -------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory and bypasses L1: a CTA reads tiles once.
FS_DEVICE void cp_async_16B(uint32_t smem, const void* gmem) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem) : "memory");
}

// Copies 16 bytes like cp_async_16B() or, if `present` is false, writes 16 zero bytes and reads
// nothing.
FS_DEVICE void cp_async_16B_or_zeros(uint32_t smem, const void* gmem, bool present) {
    const int bytes = present ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(bytes)
                 : "memory");
}

// An L2 cache policy: evict the copied lines first, or evict_unchanged, which behaves like no hint
// (evict_normal does not).
FS_DEVICE uint64_t cache_hint(bool evicted_first) {
    uint64_t first, usual;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(usual));
    return evicted_first ? first : usual;
}

// The copy of cp_async_16B_or_zeros() with an L2 cache policy.
FS_DEVICE void cp_async_16B_or_zeros(uint32_t smem, const void* gmem, bool present, uint64_t hint) {
    const int bytes = present ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem),
                 "l"(gmem), "r"(bytes), "l"(hint)
                 : "memory");
}

FS_DEVICE void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
FS_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

FS_DEVICE uint4 load_global_16B(const void* gmem) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(gmem)
                 : "memory");
    return x;
}

FS_DEVICE int load_global_4B(const int32_t* gmem) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}

FS_DEVICE void store_global_16B(void* gmem, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

FS_DEVICE void store_global_4B(void* gmem, uint32_t x) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

FS_DEVICE void store_global_8B(void* gmem, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(gmem), "r"(x.x), "r"(x.y) : "memory");
}

FS_DEVICE void store_global_8B(void* gmem, float2 x) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(gmem), "f"(x.x), "f"(x.y) : "memory");
}

// Stores and loads of words that other CTAs may poll. Each word becomes visible independently, in
// no order.
FS_DEVICE void send_global_16B(void* gmem, uint4 x) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
FS_DEVICE void send_global_8B(void* gmem, uint2 x) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(gmem), "r"(x.x), "r"(x.y)
                 : "memory");
}
FS_DEVICE uint4 poll_global_16B(const void* gmem) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(gmem)
                 : "memory");
    return x;
}
FS_DEVICE uint2 poll_global_8B(const void* gmem) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(gmem)
                 : "memory");
    return x;
}

// Loads a word that the preceding launch may still be writing. The result is the old or the new
// value.
FS_DEVICE int load_relaxed(const int32_t* gmem) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
    return x;
}

// Adds to global memory; the order depends on the timing of CTAs.
FS_DEVICE void add_global(float* gmem, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

// Adds four floats aligned to 16 bytes, from sm_90 on. Elements are added independently, with one
// instruction and one request to L2 instead of four.
FS_DEVICE void add_global(float* gmem, float4 x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

// Adds two floats aligned to 8 bytes.
FS_DEVICE void add_global(float* gmem, float2 x) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(gmem), "f"(x.x), "f"(x.y)
                 : "memory");
}

FS_DEVICE uint4 load_shared_16B(uint32_t smem) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(smem)
                 : "memory");
    return x;
}

FS_DEVICE float2 load_shared_float2(uint32_t smem) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
    return x;
}

FS_DEVICE float load_shared_float(uint32_t smem) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem) : "memory");
    return x;
}

FS_DEVICE uint32_t load_shared_4B(uint32_t smem) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
    return x;
}

FS_DEVICE void store_shared_16B(uint32_t smem, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

FS_DEVICE void store_shared_8B(uint32_t smem, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(x.x), "r"(x.y) : "memory");
}

FS_DEVICE void store_shared_4B(uint32_t smem, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}

FS_DEVICE void store_shared_1B(uint32_t smem, uint32_t x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}

// ---- matrix fragments ---------------------------------------------------------------------------

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l /
// 8.
FS_DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(smem)
                 : "memory");
}

FS_DEVICE void ldmatrix_x4_transposed(uint32_t (&d)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(smem)
                 : "memory");
}

// Loads two matrices. Lane l < 16 passes the address of row l % 8 of matrix l / 8.
FS_DEVICE void ldmatrix_x2(uint32_t (&d)[2], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(smem)
                 : "memory");
}
FS_DEVICE void ldmatrix_x2_transposed(uint32_t (&d)[2], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(smem)
                 : "memory");
}

// c += a b, where a is 16x16 row-major, b is 16x8 column-major and c is 16x8 in fp32.
template <typename value_t>
FS_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
FS_DEVICE void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
FS_DEVICE void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- named barriers -----------------------------------------------------------------------------

// The barrier `kId` (1 to 15; 0 is __syncthreads) opens once `kThreads` threads have reached it. A
// thread that only arrives does not wait. Waiting threads see what was written before an arrival.
template <int kId, int kThreads>
FS_DEVICE void named_barrier_wait() {
    asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
FS_DEVICE void named_barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// ---- launches -----------------------------------------------------------------------------------

// Waits until the preceding launch is over and its writes are visible, if this launch is
// programmatic. Otherwise the preceding launch is over already.
FS_DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch begin once all CTAs have called this, if that launch is programmatic.
FS_DEVICE void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- votes --------------------------------------------------------------------------------------

// Whether the predicate is true in any lane of the warp.
FS_DEVICE bool any_lane(bool predicate) {
    return __any_sync(0xffffffffu, predicate);
}

// Whether the predicate is true in any of the four lanes that share this lane's rows. All lanes of
// the warp must take part.
FS_DEVICE bool any_lane_of_quad(bool predicate) {
    return (__ballot_sync(0xffffffffu, predicate) >> (threadIdx.x % 32 / 4 * 4) & 0xfu) != 0;
}

// ---- arithmetic ---------------------------------------------------------------------------------

FS_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FS_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FS_DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds two fp32 values to 16 bits and packs them, `low` in the low half.
template <typename value_t>
FS_DEVICE uint32_t pack_16bit(float low, float high);

template <>
FS_DEVICE uint32_t pack_16bit<__half>(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

template <>
FS_DEVICE uint32_t pack_16bit<__nv_bfloat16>(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

}  // namespace flashsmith
