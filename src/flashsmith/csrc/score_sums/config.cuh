// The config of a kernel of the score_sums family, and the arguments of the kernel. Plain C++20
// without CUDA types, because the host compiler, the kernels and the tests read this file.
#pragma once

#include <compare>
#include <cstdint>

#include "backward/args.cuh"
#include "common/constants.cuh"

namespace flashsmith {

// The fields, their order and their meaning match the Python class.
struct ScoreSumsKernelConfig {
    DType dtype;
    int d_head;

    constexpr auto operator<=>(const ScoreSumsKernelConfig&) const = default;

    static constexpr int kTile = 64, kWarps = kTile / 16;
    // Sums are padded, so that rows, columns and diagonals are read without bank conflicts.
    static constexpr int kSumsStride = kTile + 1;

    constexpr int n_threads() const { return kWarpSize * kWarps; }
    constexpr int smem_bytes() const {
        const int tiles = 4 * kTile * d_head * kElementBytes, sums = kTile * kSumsStride * 4;
        return tiles > sums ? tiles : sums;
    }
};

// Which coordinate is the same for all elements that are added to one sum.
enum class SumsAxis : int { rows = 0, keys = 1, distances = 2, elements = 3 };

struct ScoreSums {
    float* sums;
    int64_t batch_stride, head_stride, row_stride;
    int32_t batch, heads;  // the problem's, or 1 if the sums include all of them
    int32_t rows, columns;
    SumsAxis axis;
};

// Kernels take these arguments.
struct ScoreSumsArgs : BackwardProgramArgs {
    ScoreSums to;
};

using score_sums_kernel_fn = void (*)(const ScoreSumsArgs);

}  // namespace flashsmith
