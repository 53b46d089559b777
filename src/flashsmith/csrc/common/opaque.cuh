// Values that are opaque to the compiler.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// Makes the compiler compute values that depend on the result at their point of use. Otherwise a
// main loop would compute the descriptors of all GEMMs ahead, which takes more registers than a
// thread has.
FS_DEVICE uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Forces the compiler to have computed both values at this point, so that it defers no part of
// them.
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
