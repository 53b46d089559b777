"""Forward kernels of d_head 72 and 80, whose tiles have 96 columns of shared memory: both families'
proof configs, with the emulator's checks."""

from __future__ import annotations

from typing import Any

import pytest
from plain_run import full_after

from flashsmith.families import (
    MMA_SYNC,
    WGMMA,
    DType,
    KernelConfig,
    parse_kernel_name_into_config,
)
from flashsmith.verify import prove

WIDTHS = (72, 80)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seq": 192, "heads": 2},
    # Between the rows of 'nonfinite' inputs there is NaN, in whose place kernels need zeros.
    "packed": {
        "lens_q": (70, 130, 0),
        "lens_k": (90, 64, 40),
        "causal": True,
        "heads": 4,
        "heads_k": 2,
        "inputs": "nonfinite",
    },
    "few rows": {"seq": 40, "seq_k": 700, "heads": 2, "sinks": True, "sm_count": 40},
    "partial": {"seq": 130, "heads": 2, "partial": True},
    "narrower": {"seq": 100, "heads": 2, "window": (30, 0), "inputs": "nonfinite", "d": 56},
}
QUICK = (
    ("(BF16, 80, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
     "+rescale_8", "plain"),
    ("(FP16, 72, 64, 32, 1wg): tma+stages_4+q_buffers_1+regs_24_240+overlap+dynamic+direct_O"
     "+split_4", "packed"),
    ("(FP16, 72, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax", "plain"),
    ("(BF16, 80, 64, 32, 4): load_2_2_2_tiles+opt_softmax+lazy_rescale+trim+split_2", "packed"),
)  # fmt: skip


def prove_case(cfg: KernelConfig, case: str) -> None:
    verdict = prove(cfg, checks=True, **{"d": cfg.head_dims, **CASES[case]})
    assert verdict.ok, verdict


@pytest.mark.parametrize(("text", "case"), full_after(2, QUICK[::3] + QUICK[1:3]))
def test_some_kernels(text: str, case: str) -> None:
    prove_case(parse_kernel_name_into_config(text), case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "cfg",
    [
        cfg
        for family in (MMA_SYNC, WGMMA)
        for dtype in DType
        for width in WIDTHS
        for cfg in family.proof_configs(dtype, width)
    ],
    ids=str,
)
def test_every_proof_config(cfg: KernelConfig, case: str) -> None:
    prove_case(cfg, case)
