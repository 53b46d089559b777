// A warp's MMA accumulators: 16x8 tiles in fp32.
//
// In each tile a lane holds columns 2 (lane % 4) + {0, 1} of row lane / 4 (elements 0, 1) and of
// row lane / 4 + 8 (elements 2, 3). The four lanes that share a row are a quad.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

template <int kMTiles, int kNTiles>
FS_DEVICE void zero(float (&tiles)[kMTiles][kNTiles][4]) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) tiles[m][n][e] = 0.0f;
}

// Two neighbouring tiles, rounded and packed, are the A fragment of a k16-step. Lanes exchange no
// values.
template <typename value_t>
FS_DEVICE void pack_fragment(uint32_t (&fragment)[4], const float (&left)[4],
                             const float (&right)[4]) {
    fragment[0] = pack_16bit<value_t>(left[0], left[1]);
    fragment[1] = pack_16bit<value_t>(left[2], left[3]);
    fragment[2] = pack_16bit<value_t>(right[0], right[1]);
    fragment[3] = pack_16bit<value_t>(right[2], right[3]);
}

FS_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

FS_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

}  // namespace flashsmith
