"""pack_gqa: tiles whose rows are the query heads of a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime import run_forward
from flashsmith.runtime.forward_pass import plan_forward
from flashsmith.verify import prove

# O by TMA through Q's only buffer, through its own, and from registers; K in clusters.
THROUGH_Q = config(
    "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+pingpong_gemm+dynamic"
    "+longest_first+rescale_8+stale_max+split_4+pack_gqa"
)
SEPARATE = config(
    "(BF16, 96, 128, 64, 2wg): tma+stages_2+q_buffers_2+regs_32_232+cluster_2+separate_O"
    "+short_16+pack_gqa"
)
DIRECT = config("(BF16, 128, 192, 32, 3wg): tma+stages_2+q_buffers_1+regs_32_160+direct_O+pack_gqa")
# One pair of K and V tiles, copies through registers, and a ring of tiles.
MMA = config("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+pack_gqa")
PLAIN_COPIES = config("(FP16, 96, 64, 32, 4): load_2_2_2_tiles+split_2+pack_gqa")
RING = config(
    "(BF16, 128, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3+lazy_rescale"
    "+ping_pong+trim+l2_16+split_16+pack_gqa"
)
CONFIGS = {
    "through Q": THROUGH_Q,
    "separate": SEPARATE,
    "direct": DIRECT,
    "one stage": MMA,
    "plain copies": PLAIN_COPIES,
    "ring": RING,
}
PLAIN = Semantics(uneven=True)
CAUSAL = replace(PLAIN, mask="causal")
WINDOW = replace(PLAIN, mask="window", softcap=True)
PACKED = replace(CAUSAL, packed=True)
PARTIAL = replace(CAUSAL, partial=True)
# What the plain run needs.
UNPACKED = replace(MMA, pack_gqa=False)  # type: ignore[type-var]
for known in (PLAIN, CAUSAL, PACKED):
    shared_kernels.want([MMA], known)
for known in (CAUSAL, PACKED):
    shared_kernels.want([THROUGH_Q], known)
shared_kernels.want([UNPACKED], CAUSAL)

# Sequences of which some see no key, or have none, or no row.
LENS = {"lens_q": (30, 0, 9, 50), "lens_k": (30, 9, 0, 101)}
CASES: dict[str, tuple[Semantics, dict[str, Any]]] = {
    "plain": (PLAIN, {"seq": 50, "seq_k": 133, "heads": 8, "heads_k": 2, "sinks": True}),
    "one token": (PLAIN, {"seq": 1, "seq_k": 150, "heads": 32, "heads_k": 2, "sinks": True}),
    "one K/V head": (PLAIN, {"seq": 5, "seq_k": 60, "heads": 64, "heads_k": 1}),
    "no group": (PLAIN, {"seq": 70, "seq_k": 40, "heads": 2, "inputs": "nonfinite"}),
    # Rows before the first key.
    "unseeing": (CAUSAL, {"seq": 50, "seq_k": 20, "heads": 8, "heads_k": 2, "sinks": True}),
    "causal": (
        CAUSAL,
        {"seq": 61, "seq_k": 90, "heads": 8, "heads_k": 2, "sinks": True, "short_of_d_head": True},
    ),
    "window": (
        WINDOW,
        {"seq": 60, "seq_k": 100, "heads": 8, "heads_k": 2, "window": (30, 8), "softcap": 3.0},
    ),
    "packed": (PACKED, {**LENS, "heads": 16, "heads_k": 2, "sinks": True, "causal": True}),
    "partial": (PARTIAL, {"seq": 40, "seq_k": 90, "heads": 8, "heads_k": 2, "partial": True}),
}
# Groups that divide no tile, for the family whose rows have addresses.
ANY_GROUP: dict[str, tuple[Semantics, dict[str, Any]]] = {
    "causal of 7": (CAUSAL, {"seq": 40, "seq_k": 60, "heads": 14, "heads_k": 2, "sinks": True}),
    "packed of 3": (PACKED, {**LENS, "heads": 6, "heads_k": 2, "sinks": True, "causal": True}),
    "plain of 100": (PLAIN, {"seq": 2, "seq_k": 60, "heads": 100, "heads_k": 1}),
}
QUICK = {("through Q", case) for case in ("unseeing", "causal", "packed")} | {
    ("one stage", case) for case in ("plain", "one token", "causal", "causal of 7", "packed of 3")
}


@pytest.mark.parametrize(
    ("cfg", "semantics", "problem"),
    [
        pytest.param(
            cfg, *case, marks=[pytest.mark.full] * ((who, what) not in QUICK), id=f"{what}-{who}"
        )
        for who, cfg in CONFIGS.items()
        for what, case in {**CASES, **(ANY_GROUP if not cfg.family.needs_tma else {})}.items()
    ],
)
def test_outputs_are_right_and_nothing_is_found(
    cfg: KernelConfig, semantics: Semantics, problem: dict[str, Any]
) -> None:
    shared_kernels.load([cfg], semantics)
    problem = {"causal": semantics.mask == "causal", **problem}
    d = cfg.d_head - 8 if problem.pop("short_of_d_head", False) else None
    verdict = prove(cfg, d=d, **problem, checks=True)
    assert verdict.ok, str(verdict)


def test_rows_are_those_of_tiles_of_one_head() -> None:
    """Of q head by head, with gaps between rows, as well."""
    shared_kernels.load([MMA, UNPACKED], CAUSAL)
    draw = np.random.default_rng(0)
    q = draw.standard_normal((2, 8, 37, 72)).astype(np.float16).transpose(0, 2, 1, 3)[..., :56]
    k, v = (draw.standard_normal((2, 45, 2, 56)).astype(np.float16) for _ in range(2))
    sinks = draw.standard_normal(8).astype(np.float32)
    packed, whole = (
        run_forward(
            cfg, q, k, v, causal=True, sinks=sinks, return_lse=True, return_row_max=True,
            emulate=True, arch=80,
        )
        for cfg in (MMA, UNPACKED)
    )  # fmt: skip
    for name in ("o", "lse", "row_max"):
        one, other = (np.asarray(getattr(result, name), np.float32) for result in (packed, whole))
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("cfg", "problem", "tiles"),
    [
        # Sixteen tokens of four heads are one tile of 64 rows in place of four of 16.
        (MMA, "b1 s16:8192 h32:8 d64 fp16", 8),
        (replace(MMA, pack_gqa=False), "b1 s16:8192 h32:8 d64 fp16", 32),  # type: ignore[type-var]
        (MMA, "b2 s17:8192 h32:8 d64 fp16", 32),
        (MMA, "b1 s100 h7:1 d64 fp16 causal", 11),
        (DIRECT, "b1 s48:8192 h32:8 d128 bf16", 8),
        (DIRECT, "b3 s49:8192 h32:8 d128 bf16", 48),
        (DIRECT, "b3 s49:8192 h8 d128 bf16", 24),
    ],
)
def test_a_tile_has_the_rows_of_a_group(cfg: KernelConfig, problem: str, tiles: int) -> None:
    asked = Problem.parse(problem)
    asked = replace(asked, semantics=replace(asked.required_semantics(cfg), uneven=True))
    shared_kernels.load([cfg], asked.semantics)
    # A last round that leaves SMs idle would be of smaller tiles.
    device = replace(device_spec(cfg.OLDEST_ARCH), sm_count=tiles)
    assert plan_forward(cfg, asked, device).grid[0] == tiles


@pytest.mark.parametrize("heads", ["h6:2", "h128:1"])
def test_a_group_that_no_box_has_is_refused_by_name(heads: str) -> None:
    asked = Problem.parse(f"b1 s40 {heads} d64 fp16 causal")
    asked = replace(asked, semantics=CAUSAL)
    shared_kernels.load([THROUGH_Q], CAUSAL)
    with pytest.raises(ArgumentError, match=r"pack_gqa: heads_q / heads_k is (3|128); .* take"):
        plan_forward(THROUGH_Q, asked, device_spec("H200"))
