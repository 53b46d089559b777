// A warp's GEMM over k16-steps. The config determines when operand fragments are loaded.
#pragma once

#include "common/ptx_functions.cuh"

namespace flashsmith {

// An operand whose fragments are loaded from shared memory, `kLoadTiles` K-tiles (8 columns each)
// at a time; 0 keeps the whole block in registers. With double buffering the next load goes to a
// second set.
template <class Loader, int kTotalSteps_, int kLoadTiles, bool kDoubleBuffer>
struct StreamedOperand {
    static constexpr int kTotalSteps = kTotalSteps_;
    static constexpr bool kWhole = kLoadTiles == 0;
    static constexpr int kSteps = kWhole ? kTotalSteps : kLoadTiles / 2;
    static constexpr bool kBuffered = !kWhole && kDoubleBuffer;

    Loader loader;
    typename Loader::Fragment fragments[kBuffered ? 2 : 1][kSteps];

    template <typename... Place>
    FS_DEVICE explicit StreamedOperand(Place... place) : loader(place...) {}

    // Loads steps [load * kSteps, (load + 1) * kSteps).
    FS_DEVICE void load(int load) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
            loader.load(fragments[kBuffered ? load % 2 : 0][s], load * kSteps + s);
    }
    FS_DEVICE const typename Loader::Fragment& step(int k) const {
        return fragments[kBuffered ? k / kSteps % 2 : 0][k % kSteps];
    }
};

// An operand that is already in registers: P.
template <int kMTiles, int kTotalSteps_>
struct RegisterOperand {
    static constexpr int kTotalSteps = kTotalSteps_;
    static constexpr bool kWhole = true;
    uint32_t fragments[kTotalSteps][kMTiles][4];

    FS_DEVICE const uint32_t (&step(int k) const)[kMTiles][4] { return fragments[k]; }
};

// acc += A B for kMTiles x kNTiles tiles of 16x8. A whole A (kLoadTiles = 0) is in registers before
// the call.
template <typename value_t, int kMTiles, int kNTiles, class A, class B>
struct WarpGemm {
    static_assert(A::kTotalSteps == B::kTotalSteps);
    static constexpr int kStepsPerLoad = B::kSteps;
    static constexpr int kLoads = B::kTotalSteps / kStepsPerLoad;
    static constexpr bool kBuffered = B::kBuffered;

    FS_DEVICE static void run(float (&acc)[kMTiles][kNTiles][4], A& a, B& b) {
        if constexpr (kBuffered) load(a, b, 0);
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
            if constexpr (!kBuffered)
                load(a, b, l);
            else if (l + 1 < kLoads)
                load(a, b, l + 1);
#pragma unroll
            for (int k = l * kStepsPerLoad; k < (l + 1) * kStepsPerLoad; ++k)
                multiply(acc, a, b, k);
        }
    }

  private:
    FS_DEVICE static void load(A& a, B& b, int l) {
        if constexpr (!A::kWhole) {
            static_assert(A::kSteps == B::kSteps, "both operands stream in the same steps");
            a.load(l);
        }
        b.load(l);
    }
    FS_DEVICE static void multiply(float (&acc)[kMTiles][kNTiles][4], const A& a, const B& b,
                                   int k) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
                mma_m16n8k16<value_t>(acc[m][n], a.step(k)[m], b.step(k)[n]);
    }
};

}  // namespace flashsmith
