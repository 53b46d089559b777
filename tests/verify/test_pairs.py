"""Kernels whose v has another d than q and k: every family's, with the emulator's checks."""

from __future__ import annotations

from typing import Any

import pytest

from flashsmith.families import (
    MMA_SYNC,
    MMA_SYNC_BACKWARD,
    WGMMA,
    WGMMA_BACKWARD,
    DType,
    KernelConfig,
    parse_kernel_name_into_config,
)
from flashsmith.families.head_dims import PAIRS
from flashsmith.verify import prove

DENSE: dict[str, Any] = {"seq": 128}
PACKED: dict[str, Any] = {
    "lens_q": (70, 130),
    "lens_k": (90, 64),
    "causal": True,
    "heads": 4,
    "heads_k": 2,
}
FAMILIES = (MMA_SYNC, WGMMA, MMA_SYNC_BACKWARD, WGMMA_BACKWARD)
EVERY = [
    pytest.param(cfg, id=f"{family.name}-{pair}-{number}")
    for family in FAMILIES
    for pair in PAIRS
    for number, cfg in enumerate(family.proof_configs(DType.BF16, pair))
]
QUICK = (
    "(BF16, 192:128, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+dynamic"
    "+longest_first+rescale_8+direct_O",
    "(FP16, 64:128, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3+lazy_rescale"
    "+ping_pong",
)


def _narrower(cfg: KernelConfig) -> dict[str, int]:
    return {"d": cfg.d_head - 8, "d_v": cfg.d_head_v - 16}


@pytest.mark.parametrize("text", QUICK, ids=["wgmma", "mma_sync"])
def test_the_forward_pass_of_two_pairs(text: str) -> None:
    cfg = parse_kernel_name_into_config(text)
    verdict = prove(cfg, checks=True, **_narrower(cfg), **PACKED)
    assert verdict.ok, verdict


@pytest.mark.full
@pytest.mark.parametrize("case", ["whole", "packed"])
@pytest.mark.parametrize("cfg", EVERY)
def test_every_pair(cfg: KernelConfig, case: str) -> None:
    how = {**DENSE, "seq_k": 2 * DENSE["seq"]} if case == "whole" else {**PACKED, **_narrower(cfg)}
    verdict = prove(cfg, checks=True, **how)
    assert verdict.ok, verdict
