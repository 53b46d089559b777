"""A csrc in miniature for wgmma kernels, with a fault of one's choice that only ptxas tells of."""

from __future__ import annotations

import shutil
from pathlib import Path

from stand_in_sources import write_sources

_REAL_CSRC = Path(__file__).parents[2] / "src" / "flashsmith" / "csrc"

# Kernels of configs with this many keys a tile have the fault, others have none.
FAULTY_B_C = 128

# One wgmma of 64 x 8 x 16, whose operands are never read.
_KERNEL = """\
#pragma once
#include "sm90_forward/config.cuh"
namespace flashsmith {
template <WgmmaForwardKernelConfig C, Semantics S = Semantics{}>
struct StaticHopperKernelConfig {
    static constexpr WgmmaForwardKernelConfig CFG = C;
};

__device__ inline void wgmma(float (&d)[4]) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(0ll));
}

template <class Kernel>
__global__ void BOUNDS hopper_forward_kernel(const __grid_constant__ HopperForwardKernelArgs args) {
    constexpr bool faulty = Kernel::CFG.B_c == FAULTY_B_C;
    float d[4] = {}, *out = args.problem.lse + threadIdx.x;
    asm volatile("wgmma.fence.sync.aligned;");
    wgmma(d);
    FAULT
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; ++i) out[i] = d[i];
}
}  // namespace flashsmith
"""

_FAULTS = {
    "none": "",
    # A product's sums are used before it is waited for.
    "serialized": "if constexpr (faulty) d[0] = d[1] * 2, wgmma(d);",
    "setmaxnreg": 'if constexpr (faulty) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");',
    # 160 numbers at once in 128 registers.
    "spills": """\
if constexpr (faulty) {
        float x[160];
#pragma unroll
        for (int i = 0; i < 160; ++i) x[i] = out[i * args.problem.seq_q];
        asm volatile("" ::: "memory");
#pragma unroll
        for (int i = 0; i < 160; ++i) out[i * args.problem.seq_k] = x[i] * x[159 - i];
    }""",
}

_PLAN = """\
#include "wgmma/plan.h"
flashsmith::Plan flashsmith::plan_forward(const WgmmaForwardKernelConfig&, NumberReader&, Tensors,
                                          const DeviceSpec&, const Semantics&) {
    return {};
}
"""


def write_hopper_sources(folder: Path, fault: str) -> Path:
    """The miniature csrc with `fault` ('none', 'serialized', 'setmaxnreg' or 'spills'), in
    ``folder``."""
    write_sources(folder)
    for name in ("sm90_forward/config.cuh", "wgmma/plan.h"):
        (folder / name).parent.mkdir()
        shutil.copy(_REAL_CSRC / name, folder / name)
    (folder / "wgmma" / "plan.cc").write_text(_PLAN)
    # Without bounds ptxas cannot determine how many registers a thread begins with.
    bounds = "" if fault == "setmaxnreg" else "__launch_bounds__(512, 1)"
    text = _KERNEL.replace("BOUNDS", bounds).replace("FAULTY_B_C", str(FAULTY_B_C))
    text = text.replace("    FAULT\n", f"    {_FAULTS[fault]}\n")
    (folder / "wgmma" / "forward_kernel.cuh").write_text(text)
    return folder
