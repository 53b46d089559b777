// Measures how many exponentials an SM computes: ex2.approx with two additions each, as in a
// softmax.
//
// The operand alternates between two random values, so that the compiler cannot reuse a result.
#include "roofline/operands.cuh"

namespace flashsmith::roofline {

constexpr int kChains = 8;
constexpr float kMirror = -8.0f;

// x and sums are fp32 (threads, kChains). Even rounds add exp2(x) to the sum of a chain, odd rounds
// add exp2(kMirror - x).
extern "C" __global__ void __launch_bounds__(512)
    exp2_rate(const float* x, float* sums, int rounds) {
    const int64_t first = (static_cast<int64_t>(block_index()) * 512 + thread_index()) * kChains;
    float operand[kChains], sum[kChains] = {};
#pragma unroll
    for (int i = 0; i < kChains; ++i) operand[i] = x[first + i];
#pragma unroll 4
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int i = 0; i < kChains; ++i) {
            sum[i] += exp2_approx(operand[i]);
            operand[i] = kMirror - operand[i];
        }
#pragma unroll
    for (int i = 0; i < kChains; ++i) sums[first + i] = sum[i];
}

}  // namespace flashsmith::roofline
