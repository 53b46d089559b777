// 2^x by the special function unit, element by element. ex2_bits.py runs this on every float.
#include "common/ptx_functions.cuh"

extern "C" __global__ void exp2_each(const float* x, float* y, int count) {
    const int threads = blockDim.x * gridDim.x;
    for (int i = flashsmith::block_index() * blockDim.x + flashsmith::thread_index(); i < count;
         i += threads)
        y[i] = flashsmith::exp2_approx(x[i]);
}
