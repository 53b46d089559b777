"""split_keys: tiles in parts of their keys, and the launch that merges them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from _pytest.mark import ParameterSet

from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime import run_forward
from flashsmith.runtime.forward_pass import plan_forward
from flashsmith.runtime.launch_plan import InitialContents
from flashsmith.verify import prove
from flashsmith.verify.attention_semantics import offsets
from flashsmith.verify.proof_inputs import numpy_dtype

# O by TMA through Q's only buffer, and from registers.
THROUGH_Q = config(
    "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+pingpong_gemm+dynamic"
    "+longest_first+rescale_8+stale_max+split_4"
)
DIRECT = config("(BF16, 128, 192, 32, 3wg): tma+stages_2+q_buffers_1+regs_32_160+direct_O+split_2")
# One pair of K and V tiles, and a ring of them with two halves of the warps in turns.
MMA = config("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+split_2")
RING = config(
    "(BF16, 128, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3+lazy_rescale"
    "+ping_pong+trim+split_8"
)
CONFIGS = {"through Q": THROUGH_Q, "one stage": MMA, "direct": DIRECT, "ring": RING}
PLAIN = Semantics(uneven=True)
CAUSAL = replace(PLAIN, mask="causal")
WINDOW = replace(PLAIN, mask="window", softcap=True)
PACKED = replace(CAUSAL, packed=True)
PARTIAL = replace(CAUSAL, partial=True)
# What the plain run needs.
for known in (PLAIN, CAUSAL, PACKED):
    shared_kernels.want([THROUGH_Q], known)
for known in (PLAIN, WINDOW, PARTIAL):
    shared_kernels.want([MMA], known)
shared_kernels.want([replace(MMA, split_keys=0)], PLAIN)  # type: ignore[type-var]
GROUPS = replace(THROUGH_Q, pack_gqa=True)  # type: ignore[type-var]
shared_kernels.want([GROUPS], PACKED)


def params(*plain: str) -> list[ParameterSet]:
    """The configs, of which the plain run takes these."""
    return [
        pytest.param(cfg, marks=[pytest.mark.full] * (name not in plain), id=name)
        for name, cfg in CONFIGS.items()
    ]


# Sequences of which some see no key, or have none, or no row.
LENS = {"lens_q": (70, 0, 33, 150), "lens_k": (70, 9, 0, 201)}


CASES: dict[str, tuple[Semantics, dict[str, Any]]] = {
    "plain": (PLAIN, {"seq": 150, "seq_k": 333, "heads": 4, "heads_k": 2, "sinks": True}),
    "nonfinite": (PLAIN, {"seq": 40, "seq_k": 40, "heads": 2, "inputs": "nonfinite"}),
    # Fewer blocks than parts, and rows before the first key.
    "unseeing": (CAUSAL, {"seq": 140, "seq_k": 60, "heads": 2, "sinks": True}),
    "causal": (CAUSAL, {"seq": 203, "seq_k": 290, "heads": 2, "short_of_d_head": True}),
    "window": (
        WINDOW,
        {"seq": 200, "seq_k": 300, "heads": 2, "window": (90, 20), "softcap": 3.0},
    ),
    "packed": (PACKED, {**LENS, "heads": 2, "sinks": True, "causal": True}),
}
QUICK = {("through Q", case) for case in ("unseeing", "causal", "packed")} | {
    ("one stage", case) for case in ("plain", "nonfinite", "window")
}


@pytest.mark.parametrize(
    ("cfg", "semantics", "problem"),
    [
        pytest.param(
            cfg, *case, marks=[pytest.mark.full] * ((who, what) not in QUICK), id=f"{what}-{who}"
        )
        for who, cfg in CONFIGS.items()
        for what, case in CASES.items()
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


@pytest.mark.parametrize("cfg", params("through Q", "one stage"))
@pytest.mark.parametrize("sm_count", [pytest.param(3, marks=pytest.mark.full), 4])
def test_whole_tiles_and_parts_of_one_call_are_right(cfg: KernelConfig, sm_count: int) -> None:
    """Five heads' tiles: some fill the SMs, and the others' parts do. Without row maxima kernels
    rescale late."""
    shared_kernels.load([cfg], PLAIN)
    verdict = prove(
        cfg, seq=120, seq_k=260, heads=5, sinks=True, row_max=False, checks=True, sm_count=sm_count
    )
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "cfg",
    [pytest.param(THROUGH_Q, marks=pytest.mark.full, id="wgmma"), pytest.param(MMA, id="mma_sync")],
)
def test_a_part_of_a_partial_call_is_right(cfg: KernelConfig) -> None:
    shared_kernels.load([cfg], PARTIAL)
    verdict = prove(cfg, seq=150, seq_k=300, heads=2, causal=True, partial=True, checks=True)
    assert verdict.ok, str(verdict)


def test_what_is_not_finite_is_merged_as_one_kernel_would_have_it() -> None:
    """By head: a row that is NaN, NaN in one part, infinite scores in the other, and both."""
    whole = replace(MMA, split_keys=0)  # type: ignore[type-var]
    shared_kernels.load([MMA, whole], PLAIN)
    q, k, v = (
        np.random.default_rng(place).standard_normal((1, 70, 4, 64)).astype(np.float16)
        for place in range(3)
    )
    q[0, 3, 0], k[0, 5, [1, 3]], k[0, 68, [2, 3], 7] = np.nan, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        one, parts = (
            run_forward(cfg, q, k, v, return_lse=True, return_row_max=True, emulate=True, arch=80)
            for cfg in (whole, MMA)
        )
    for name in ("o", "lse", "row_max"):
        expected, found = (np.asarray(getattr(result, name), np.float32) for result in (one, parts))
        assert 0 < np.isnan(expected).sum() < expected.size
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def _later(*values: Any) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("cfg", "problem", "sm_count", "tiles", "items"),
    [
        (THROUGH_Q, "b1 s128:4096 h32 d64 fp16", 132, 32, 128),
        # A last round that parts make shorter: of the last three tiles, of 60 tiles.
        (THROUGH_Q, "b1 s128:4096 h11 d64 fp16", 8, 3, 8 + 12),
        _later(DIRECT, "b1 s1152:4096 h32 d128 bf16", 132, 60, 132 + 120),
        # Not of 100 tiles: two rounds of half the keys take as long.
        _later(DIRECT, "b1 s192:4096 h100 d128 bf16", 132, 0, 100),
        (THROUGH_Q, "b1 s128:4096 h100 d64 fp16", 132, 0, 100),
        # All tiles fill all SMs, or the keys are one block.
        (THROUGH_Q, "b1 s128:4096 h132 d64 fp16", 132, 0, 132),
        (THROUGH_Q, "b1 s128:32 h4 d64 fp16", 132, 0, 4),
        (THROUGH_Q, "b0 s128:4096 h4 d64 fp16", 132, 0, 0),
        # Causal, the longest tile alone takes as long as a round.
        (THROUGH_Q, "b1 s512 h40 d64 fp16 causal", 132, 160, 640),
        (THROUGH_Q, "b1 s512 h132 d64 fp16 causal", 132, 0, 528),
        # The mma.sync family's SMs hold eight warps, so that two of these CTAs run on each.
        (MMA, "b1 s128:4096 h32 d64 fp16", 132, 64, 128),
        (MMA, "b1 s128:4096 h90 d64 fp16", 132, 0, 180),
        _later(RING, "b1 s128:4096 h32 d128 bf16", 132, 32, 256),
        # By the longest sequence, of packed ones.
        (THROUGH_Q, "b4 s128:4096 h8 d64 fp16 packed causal", 132, 32, 128),
    ],
)
def test_which_tiles_are_split_follows_from_the_launch(
    cfg: KernelConfig, problem: str, sm_count: int, tiles: int, items: int
) -> None:
    asked = Problem.parse(problem)
    semantics = asked.required_semantics(cfg)
    shared_kernels.load([cfg], replace(semantics, uneven=True))
    asked = replace(asked, semantics=replace(semantics, uneven=True))
    plan = plan_forward(cfg, asked, replace(device_spec(cfg.OLDEST_ARCH), sm_count=sm_count))
    parts = cfg.split_keys  # type: ignore[attr-defined]
    assert plan.grid[0] == (min(sm_count, items) if cfg is THROUGH_Q else items)
    spaces = {space.name: space for space in plan.workspaces}
    assert ("parts" in spaces) == (len(plan.launches) == 2) == (tiles > 0)
    if tiles:
        rows = tiles * parts * cfg.B_r  # type: ignore[attr-defined]
        assert spaces["parts"][1:] == (rows * (cfg.d_head + 2) * 4, InitialContents.UNDEFINED)
        merge = plan.launches[1]
        assert merge.grid[0] * merge.block[0] == tiles * cfg.B_r * cfg.d_head // 4  # type: ignore[attr-defined]


def outputs(
    cfg: KernelConfig, seed: int, lens_q: tuple[int, ...], lens_k: tuple[int, ...]
) -> list[np.ndarray]:
    """o and lse of packed sequences, each with inputs of its own length and place."""
    tensors = [
        np.concatenate(
            [
                np.random.default_rng([seed, place, length, heads]).standard_normal(
                    (length, heads, cfg.d_head)
                )
                for place, length in enumerate(lens)
            ]
        ).astype(numpy_dtype(cfg.dtype))
        for lens, heads in ((lens_q, 4), (lens_k, 2), (lens_k, 2))
    ]
    result = run_forward(
        cfg,
        *tensors,
        cu_seqlens_q=offsets(lens_q),
        cu_seqlens_k=offsets(lens_k),
        max_seqlen_q=150,
        max_seqlen_k=260,
        causal=True,
        return_lse=True,
        emulate=True,
        arch=cfg.OLDEST_ARCH,
    )
    first = lens_q[0]
    return [result.o[first : first + lens_q[1]], result.lse[:, first : first + lens_q[1]]]


@pytest.mark.parametrize("cfg", [*params("through Q"), pytest.param(GROUPS, id="groups")])
def test_a_packed_sequence_has_the_same_bits_beside_any_others(cfg: KernelConfig) -> None:
    shared_kernels.load([cfg], PACKED)
    alone = outputs(cfg, 0, (0, 101, 0), (0, 210, 0))
    beside = outputs(cfg, 0, (150, 101, 3), (17, 210, 260))
    for one, other in zip(alone, beside, strict=True):
        assert one.size > 0
        assert one.tobytes() == other.tobytes()
