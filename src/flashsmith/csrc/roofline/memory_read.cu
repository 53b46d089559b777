// Measures the bandwidth with which all SMs together read: from the L2 if the buffer fits in it,
// from DRAM if it does not. Each word is added to a sum, so each load must complete.
#include "roofline/operands.cuh"

namespace flashsmith::roofline {

constexpr int kReaders = 512;  // threads of a CTA
constexpr int kInFlight = 8;   // 16-byte loads that a thread issues before it needs the first one
constexpr uint32_t kPeriod = 1 << 20;

// Pseudo-random words that repeat after kPeriod words, so that their sum is known for any length.
FS_DEVICE uint32_t word_at(uint32_t index) {
    uint32_t x = index % kPeriod * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

extern "C" __global__ void __launch_bounds__(kReaders) fill_words(uint4* words, int64_t vectors) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kReaders;
    for (int64_t i = static_cast<int64_t>(block_index()) * kReaders + thread_index(); i < vectors;
         i += stride) {
        const uint32_t first = static_cast<uint32_t>(4 * i);
        words[i] = {word_at(first), word_at(first + 1), word_at(first + 2), word_at(first + 3)};
    }
}

// Bypasses L1, so that the loads measure L2 and are not answered by L1.
FS_DEVICE uint4 load_past_l1(const uint4* address) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

// sums (threads of the grid): the sum modulo 2^32 of the words that a thread has read in all
// passes. `vectors` is a multiple of kReaders * kInFlight. Parts of the buffer are given to CTAs in
// rotation, across passes, so that all CTAs do the same amount of work.
extern "C" __global__ void __launch_bounds__(kReaders)
    read_words(const uint4* words, uint32_t* sums, int64_t vectors, int passes) {
    constexpr int64_t kSpan = kReaders * kInFlight;
    const uint32_t spans = static_cast<uint32_t>(vectors / kSpan);
    const uint32_t block = block_index(), thread = thread_index(), ctas = gridDim.x;
    const uint32_t step = ctas % spans;
    uint32_t sum = 0, span = block % spans;
    for (int64_t i = block; i < static_cast<int64_t>(passes) * spans; i += ctas) {
        const uint4* const first = words + span * kSpan + thread;
        uint4 x[kInFlight];
#pragma unroll
        for (int load = 0; load < kInFlight; ++load)
            x[load] = load_past_l1(first + load * kReaders);
#pragma unroll
        for (int load = 0; load < kInFlight; ++load)
            sum += (x[load].x + x[load].y) + (x[load].z + x[load].w);
        span += step;
        if (span >= spans) span -= spans;
    }
    sums[static_cast<int64_t>(block) * kReaders + thread] = sum;
}

}  // namespace flashsmith::roofline
