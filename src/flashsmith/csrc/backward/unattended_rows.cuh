// Rows of queries that see no key. They contribute nothing, but may contain NaN, and 0 times NaN
// would be NaN: consumers set them to zero in shared memory before they multiply them.
//
// Causal and window limits hide all keys from the first rows of a sequence. A program may hide them
// from any row: log2(e) lse is then infinite; see backward_prepare_kernel.
#pragma once

#include "common/constants.cuh"
#include "common/ptx_functions.cuh"
#include "common/types.cuh"

namespace flashsmith {

// The rows without a key in a block of B_r queries.
template <Semantics SEMANTICS, int B_r>
struct UnattendedRows {
    int limited;        // this many rows see no key because of causal and window limits
    int count;          // number of rows of the block that exist
    uint32_t lse_log2;  // with a program: the rows' statistic in shared memory

    FS_DEVICE bool contains(int row) const {
        if constexpr (kHasProgram<SEMANTICS>)
            if (row < count && is_infinite(row)) return true;
        return row < limited;
    }
    // Whether the block has such rows. The result is the same in all lanes of all warps.
    FS_DEVICE bool any(int lane) const {
        bool found = limited > 0;
        if constexpr (kHasProgram<SEMANTICS>) {
#pragma unroll
            for (int row = 0; row < B_r; row += kWarpSize)
                found |= row + lane < count && is_infinite(row + lane);
            return any_lane(found);
        }
        return found;
    }
    // All rows from this index on see a key.
    FS_DEVICE int end() const { return kHasProgram<SEMANTICS> ? min(count, B_r) : limited; }

  private:
    FS_DEVICE bool is_infinite(int row) const {
        return load_shared_float(lse_log2 + 4 * row) == INFINITY;
    }
};

}  // namespace flashsmith
