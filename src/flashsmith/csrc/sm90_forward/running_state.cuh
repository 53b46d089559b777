// The state of a warpgroup's rows over the finished chunks, while the next chunk is computed. It is
// in global memory, where L2 keeps it. Registers and shared memory have room for only one O. The
// state of a partner has no statistics of its own.
#pragma once

#include "common/canonical.cuh"
#include "common/opaque.cuh"
#include "sm90_forward/static_kernel_configuration.cuh"

namespace flashsmith {

// A thread reads only what it has written, so that no order between threads is needed.
template <class Kernel>
struct RunningState {
    static constexpr int kTiles = Kernel::O_columns / 8;
    float* const own;  // this thread's first four floats; the next are a warpgroup further on

    // `warpgroup` is the index among the CTA's consumers, or of the partner, which comes last.
    FS_DEVICE RunningState(const ForwardKernelArgs& args, int warpgroup)
        : own(args.parts +
              (int64_t{block_index()} * Kernel::consumers + warpgroup) *
                  (Kernel::running_state_bytes / 4) +
              opaque(thread_index()) % kWarpgroupThreads * 4) {}

    FS_DEVICE float* tile(int n) const { return own + n * kWarpgroupThreads * 4; }

    // Marks that no row has seen a key. The sums of a row without keys are ignored.
    FS_DEVICE void clear(const CanonicalRows<1>& rows) const {
        store_4(kTiles, rows.floor(), rows.floor(), 0.0f, 0.0f);
    }
    FS_DEVICE void store(const CanonicalRows<1>& rows, const typename Kernel::O_t& O) const {
        store_4(kTiles, rows.row_max[0][0], rows.row_max[0][1], rows.row_sum[0][0],
                rows.row_sum[0][1]);
        store(O);
    }
    FS_DEVICE void store(const typename Kernel::O_t& O) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) store_4(n, O[0][n][0], O[0][n][1], O[0][n][2], O[0][n][3]);
    }
    // Merges the state of the earlier chunks into this chunk's state, which then covers all chunks
    // so far. `send` gets the two rows' StateMerge before O is merged.
    template <class Send>
    FS_DEVICE void merge_into(CanonicalRows<1>& rows, typename Kernel::O_t& O,
                              const Send& send) const {
        const float4 statistics = *reinterpret_cast<const float4*>(tile(kTiles));
        const StateMerge merge[2] = {rows.merge_after(0, 0, statistics.x, statistics.z),
                                     rows.merge_after(0, 1, statistics.y, statistics.w)};
        send(merge);
        merge_into(merge, O);
    }
    FS_DEVICE void merge_into(const StateMerge (&merge)[2], typename Kernel::O_t& O) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 before = *reinterpret_cast<const float4*>(tile(n));
            O[0][n][0] = merge[0].merged(before.x, O[0][n][0]);
            O[0][n][1] = merge[0].merged(before.y, O[0][n][1]);
            O[0][n][2] = merge[1].merged(before.z, O[0][n][2]);
            O[0][n][3] = merge[1].merged(before.w, O[0][n][3]);
        }
    }

  private:
    FS_DEVICE void store_4(int n, float a, float b, float c, float d) const {
        *reinterpret_cast<float4*>(tile(n)) = {a, b, c, d};
    }
};

}  // namespace flashsmith
