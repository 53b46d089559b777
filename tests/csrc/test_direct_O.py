"""O straight from registers to global memory: what is written, what is not, and Q's early release.

Few SMs, so that a CTA has several tiles: the next one's Q arrives while O is not even done.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from hopper_plans import wgmma_config
from plain_run import full_after

from flashsmith.builder import KernelLibrary
from flashsmith.families import (
    Semantics,
    WgmmaForwardKernelConfig,
    device_spec,
)
from flashsmith.runtime import run_forward
from flashsmith.verify import prove
from flashsmith.verify.attention_semantics import offsets
from flashsmith.verify.proof_inputs import numpy_dtype
from ptxlab.checks import Bounds
from ptxlab.interface import EngineDone, MbarrierEvent, Observer


def direct(text: str) -> WgmmaForwardKernelConfig:
    return wgmma_config(f"{text}+direct_O")


WIDE = direct(
    "(FP16, 256, 128, 80, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+dynamic+rescale_8"
)
# Panels of 32 columns.
NARROW = direct("(BF16, 96, 64, 48, 1wg): tma+stages_2+q_buffers_2+regs_24_240+static_persistent")
PLAIN = Semantics()
CAUSAL = Semantics(mask="causal", uneven=True)
WINDOW = Semantics(mask="window", uneven=True)
PACKED = Semantics(mask="causal", packed=True, uneven=True)
CONFIGS = pytest.mark.parametrize("cfg", [WIDE, NARROW], ids=["wide", "narrow"])


THROUGH_Q = [replace(cfg, direct_O=False) for cfg in (WIDE, NARROW)]
# The plain run has each mask, and packed sequences, with one of the two.
QUICK = {PLAIN: [WIDE, NARROW], CAUSAL: [WIDE], WINDOW: [NARROW], PACKED: [NARROW]}
for known, configs in QUICK.items():
    shared_kernels.want(configs, known)
shared_kernels.want(THROUGH_Q)
CASES = {
    "plain": (PLAIN, {"seq": 200, "seq_k": 240, "heads": 2}),
    "causal": (CAUSAL, {"seq": 203, "seq_k": 130, "heads": 2, "heads_k": 1, "causal": True}),
    "true d": (
        CAUSAL,
        {"seq": 131, "seq_k": 200, "heads": 2, "causal": True, "short_of_d_head": True},
    ),
    "window": (WINDOW, {"seq": 200, "seq_k": 300, "heads": 2, "window": (90, 20)}),
    "packed": (PACKED, {"lens_q": (70, 0, 1, 150), "lens_k": (70, 9, 0, 200), "causal": True}),
}


def load(cfg: WgmmaForwardKernelConfig, semantics: Semantics) -> KernelLibrary:
    return shared_kernels.load([cfg], semantics)


@pytest.mark.parametrize(
    ("cfg", "semantics", "problem"),
    [
        pytest.param(
            *(cfg, *case),
            id=f"{name}-{width}",
            marks=[pytest.mark.full] * (cfg not in QUICK[case[0]]),
        )
        for name, case in CASES.items()
        for width, cfg in (("wide", WIDE), ("narrow", NARROW))
    ],
)
def test_outputs_are_right_and_nothing_is_found(
    cfg: WgmmaForwardKernelConfig, semantics: Semantics, problem: dict[str, Any]
) -> None:
    load(cfg, semantics)
    problem = dict(problem)
    d = cfg.d_head - 8 if problem.pop("short_of_d_head", False) else None
    verdict = prove(cfg, d=d, **problem, row_max=False, checks=True, sm_count=2)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("cfg", "packed"),
    full_after(2, [(WIDE, False), (NARROW, True), (WIDE, True), (NARROW, False)]),
    ids=["wide-dense", "narrow-packed", "wide-packed", "narrow-dense"],
)
def test_nothing_else_is_written(cfg: WgmmaForwardKernelConfig, packed: bool) -> None:
    """Between rows, heads and sequences, beyond columns, and before and after it all."""
    load(cfg, PACKED if packed else CAUSAL)
    rng = np.random.default_rng(0)
    lens, heads, d = (67, 0, 30), 2, cfg.d_head - 24
    rows = (sum(lens),) if packed else (2, 67)
    q, k, v = (rng.standard_normal((*rows, heads, d)).astype(numpy_dtype(cfg.dtype)) for _ in "qkv")
    options: dict[str, Any] = {"causal": True}
    if packed:
        options |= {"cu_seqlens_q": offsets(lens), "cu_seqlens_k": offsets(lens)}
    room = np.full((*rows[:-1], rows[-1] + 5, heads + 1, d + 8), 7, q.dtype)
    inside = (..., slice(2, -3), slice(0, heads), slice(0, d))
    bounds = Bounds()
    device = replace(device_spec(90), sm_count=2)
    run_forward(
        cfg, q, k, v, room[inside], **options, emulate=True, arch=device, observers=[bounds]
    )
    assert bounds.findings == []
    expected = run_forward(cfg, q, k, v, **options, emulate=True).o
    assert room[inside].tobytes() == np.asarray(expected).tobytes()
    room[inside] = 7
    assert (room == 7).all()


@CONFIGS
def test_no_bulk_copy_stores_it(cfg: WgmmaForwardKernelConfig) -> None:
    text = load(cfg, PLAIN).ptx(cfg)
    assert re.search(r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global", text)
    assert not re.search(r"cp\.async\.bulk\.tensor\S*\.global\.shared", text)
    # Of every 16 columns a lane writes eight bytes, in two rows.
    assert len(re.findall(r"\bst\.global\.v2\.", text)) == cfg.d_head // 8


class Releases(Observer):
    """When each warp gives Q's place back, and when it has waited for its last product."""

    def __init__(self, cfg: WgmmaForwardKernelConfig) -> None:
        super().__init__()
        slots = cfg.n_warpgroups * cfg.q_buffers
        self.empty = {cfg.tile_bytes() + 16 * slot + 8 for slot in range(slots)}
        self.released: dict[int, int] = {}
        self.products_over: dict[int, int] = {}

    def mbarrier(self, event: MbarrierEvent) -> None:
        if event.kind == "arrive" and event.address in self.empty:
            self.released |= {int(thread) // 32: event.clock for thread in event.threads}

    def engine_done(self, event: EngineDone) -> None:
        if event.engine.kind == "warpgroup":
            self.products_over |= {int(thread) // 32: event.clock for thread in event.threads}


@CONFIGS
def test_Q_is_released_before_the_last_product_is_over(cfg: WgmmaForwardKernelConfig) -> None:
    for one in (cfg, replace(cfg, direct_O=False)):
        seen = Releases(one)
        prove(one, seq=one.B_r, seq_k=3 * one.B_c, row_max=False, observers=[seen], sm_count=1)
        early = [w for w, clock in seen.released.items() if clock < seen.products_over[w]]
        assert len(seen.products_over) == 4 * one.n_warpgroups
        assert len(early) == (4 * one.n_warpgroups if one.direct_O else 0)
