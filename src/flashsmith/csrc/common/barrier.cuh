// Barriers for some threads of a CTA: mbarriers in shared memory and numbered hardware barriers.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// ---- mbarriers ----------------------------------------------------------------------------------

FS_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// Makes the initialised barriers visible to TMA and to the other CTAs of the cluster.
FS_DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
FS_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and waits for all arrivals, like a numbered barrier, but threads may call it from
// different places in the code.
FS_DEVICE void mbarrier_arrive_and_wait(uint32_t barrier) {
    uint64_t phase;
    uint32_t done;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
                 : "=l"(phase)
                 : "r"(barrier)
                 : "memory");
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(barrier), "l"(phase)
            : "memory");
    } while (done == 0);
}
// Arrives at a barrier in another CTA of the cluster, given by its cluster_address().
FS_DEVICE void mbarrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase also wait for `bytes` that TMA writes.
FS_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
FS_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
// Waits until the phase of this parity is complete. A trap in this loop would make ptxas drop the
// register limit of the whole kernel.
FS_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// ---- numbered barriers --------------------------------------------------------------------------

// `threads` counts both the threads that wait and the threads that only arrive.
FS_DEVICE void named_barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FS_DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters -----------------------------------------------------------------------------------

FS_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The cluster address of the data that another CTA has at this CTA's address `smem`.
FS_DEVICE uint32_t cluster_address(uint32_t smem, uint32_t cta) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem), "r"(cta));
    return there;
}
// Stores 16 bytes to another CTA's shared memory; an mbarrier there counts them.
FS_DEVICE void store_remote_16B(uint32_t there, uint32_t barrier, uint4 x) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
        "[%1];" ::"r"(there),
        "r"(barrier), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
}
// Copies `bytes` of this CTA's shared memory to another CTA's; an mbarrier there counts them.
// Threads that have written these bytes must have called fence_for_copies() before.
FS_DEVICE void copy_shared(uint32_t there, uint32_t smem, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(there),
        "r"(smem), "r"(bytes), "r"(barrier)
        : "memory");
}
FS_DEVICE void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Whether this is the one lane that is elected to act for its warp. This instruction shows the
// compiler that one lane is active, so that it needs no loop over lanes around bulk copies.
FS_DEVICE bool elect_lane() {
    uint32_t is_elected;
    asm volatile(
        "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, elected;\n}"
        : "=r"(is_elected));
    return is_elected != 0;
}
// The two halves of a cluster barrier: no thread leaves cluster_wait() before all CTAs have
// arrived. The relaxed arrival orders only mbarriers that were initialised before a fence for them:
// a release would stall about 0.8 us on the thread's outstanding loads.
FS_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
FS_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
FS_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// Changes this warpgroup's registers per thread from kHeld to `kCount`. Increasing to a smaller
// count, and decreasing to a larger one, are undefined.
template <int kHeld, int kCount>
FS_DEVICE void set_registers() {
    if constexpr (kCount > kHeld)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace flashsmith
