// Values of which the compiler knows nothing.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// What follows from such a number is computed where it is used: in a main loop the descriptors of
// all GEMMs would otherwise be computed ahead, and take more registers than there are.
FS_DEVICE uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The compiler must have computed both values by here: it puts off nothing that they depend on.
FS_DEVICE void materialize(int& x, int& y) {
    asm volatile("" : "+r"(x), "+r"(y));
}
template <typename T>
FS_DEVICE void materialize(T*& x, T*& y) {
    asm volatile("" : "+l"(x), "+l"(y));
}
template <typename T>
FS_DEVICE void materialize(T*& x, int& y) {
    asm volatile("" : "+l"(x), "+r"(y));
}

}  // namespace flashsmith
