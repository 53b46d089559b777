"""Mistakes in kernels whose GEMMs read Q from registers. All must be caught.

Mutants of such kernels' PTX are those of test_wgmma_mutants.py.
"""

from __future__ import annotations

from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CAUSAL = Semantics("causal", uneven=True)
# One SM: a CTA computes several tiles, the last rows of which fill no warpgroup.
VICTIMS = {
    "half": OperationVictim(
        config(
            "(BF16, 128, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+dynamic"
            "+rescale_8+direct_O+register_Q_4"
        ),
        CAUSAL,
        (AskedForward("b1 s150:190 h3 d112 causal", options={"sinks": True}),),
        sm_count=1,
    ),
    "all": OperationVictim(
        config(
            "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_2+regs_32_232+overlap+pingpong_gemm"
            "+dynamic+longest_first+rescale_8+register_Q_4"
        ),
        CAUSAL,
        (AskedForward("b1 s150:100 h4 d56 causal", "nonfinite"),),
        sm_count=1,
    ),
}

_CONSUMER = "sm90_forward/consumer.cuh"
_OF_BOTH = (
    SourcePatch("Q of the tile before", _CONSUMER, "load_register_Q();\n        K.consumer_wait();",
                "if (Q_state.phase() == 0) load_register_Q();\n        K.consumer_wait();"),
    SourcePatch("Q before it is there", _CONSUMER, "while (receive_tile()) {",
                "while (load_register_Q(), receive_tile()) {"),
    SourcePatch("Q of the first warpgroup", _CONSUMER, "panel = Q_tile() + column",
                "panel = smem + Kernel::Q_offset + column"),
    SourcePatch("rows of the first warp", _CONSUMER, "warp * kWarpRows + lane % 16, chunk",
                "lane % 16, chunk"),
    SourcePatch("the first eight rows twice", _CONSUMER, "kWarpRows + lane % 16, chunk",
                "kWarpRows + lane % 8, chunk"),
    SourcePatch("the first eight columns twice", _CONSUMER,
                "column % Panel::kColumns / 8 + lane / 16;", "column % Panel::kColumns / 8;"),
    SourcePatch("a panel without a swizzle", _CONSUMER,
                "Panel::offset(warp * kWarpRows + lane % 16, chunk)",
                "(warp * kWarpRows + lane % 16) * Panel::kColumns * 2 + chunk * 16"),
    SourcePatch("the first step's registers for all", _CONSUMER,
                "register_Q[step / Kernel::register_Q_stride],", "register_Q[0],"),
    SourcePatch("registers with K of the step before", _CONSUMER,
                "(step), step > 0);\n            else",
                "(max(step, 1) - 1), step > 0);\n            else"),
    SourcePatch("scores of the block before are added to", _CONSUMER,
                "(step), step > 0);\n            else", "(step), true);\n            else"),
)  # fmt: skip
MISTAKES = {
    "half": (
        *_OF_BOTH,
        SourcePatch("the first steps' columns", _CONSUMER,
                    "column = i * Kernel::register_Q_stride * 16;", "column = i * 16;"),
        SourcePatch("columns of the first panel", _CONSUMER,
                    "column / Panel::kColumns * Kernel::Q_panel_bytes", "0"),
        SourcePatch("columns of the tile in a panel", _CONSUMER,
                    "chunk = column % Panel::kColumns / 8", "chunk = column / 8"),
        SourcePatch("steps in shared memory are left out", _CONSUMER,
                    "else\n                GEMM::run(scores, q +",
                    "else if (CFG.register_Q == 0)\n                GEMM::run(scores, q +"),
        SourcePatch("the first steps read registers", _CONSUMER,
                    "step % Kernel::register_Q_stride == 0)", "step < CFG.register_Q)"),
    ),
    "all": _OF_BOTH,
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)
