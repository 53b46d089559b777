"""Every schedule of the K/V loop, proven in the emulator with all checks on: races, bounds, copies.

Blocks are few and many, masks cut them, warps see nothing of some, and maxima jump.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.families import (
    FlashForwardKernelConfig,
    Semantics,
    parse_kernel_name_into_config,
)
from flashsmith.runtime import forward, run_forward
from flashsmith.verify import INPUT_KINDS, prove
from flashsmith.verify.proof_inputs import numpy_dtype
from ptxlab.checks import Bounds

CONFIGS = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+lazy_rescale",
        "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+stages_2+trim",
        "(BF16, 64, 64, 32, 2): async+eager+swizzled+load_2_2_2_tiles+stages_4+lazy_rescale+l2_16",
        "(FP16, 64, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+stages_3"
        "+lazy_rescale+ping_pong",
        "(BF16, 64, 128, 32, 8): async+eager+swizzled+load_0_2_2_tiles+stages_4+ping_pong+trim",
        "(FP16, 64, 64, 48, 4): eager+load_2_2_2_tiles+opt_softmax+lazy_rescale+trim",
        "(FP16, 64, 192, 32, 6): async+load_2_2_2_tiles+buffer+ctas_2+trim+l2_16",
    )
)
IDS = [cfg.short_form(include_tup=False) for cfg in CONFIGS]
LAZY = [cfg for cfg in CONFIGS if cfg.lazy_rescale]


def prove_right(cfg: FlashForwardKernelConfig, **problem: Any) -> None:
    verdict = prove(cfg, checks=True, **problem)
    assert verdict.ok, str(verdict)


GROUPED = [cfg for cfg in CONFIGS if cfg.l2_group_mib]
# The plain run has one mask for each config: a window where groups of heads need one.
CUT = [cfg for cfg in CONFIGS if cfg not in GROUPED]
shared_kernels.want(CONFIGS)
shared_kernels.want(CUT, Semantics("causal", uneven=True))
shared_kernels.want(GROUPED, Semantics("window", uneven=True))


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
@pytest.mark.parametrize("blocks", [(1, 2, 5), pytest.param((3, 7), marks=pytest.mark.full)])
def test_whole_tiles(cfg: FlashForwardKernelConfig, blocks: tuple[int, ...]) -> None:
    for count in blocks:
        prove_right(cfg, seq=cfg.B_r, seq_k=count * cfg.B_c)


# Fewer keys than queries leave whole Q blocks without any; 1 row leaves warps without any.
CAUSAL = [
    {"seq": 1, "seq_k": 130, "causal": True},
    {"seq": 203, "seq_k": 61, "causal": True},
]
WINDOW = [{"seq": 130, "seq_k": 200, "window": (50, 20)}]
MORE_RAGGED = [
    {"seq": 300, "seq_k": 300, "causal": True},
    {"seq": 70, "seq_k": 261, "causal": True},
    {"seq": 300, "seq_k": 330, "window": (50, 20)},
    {"seq": 130, "seq_k": 330, "window": (0, 0)},
]


@pytest.mark.parametrize(
    ("cfg", "problems"),
    [
        pytest.param(cfg, problems, id=f"{name}-{kind}", marks=[pytest.mark.full] * (not quick))
        for cfg, name in zip(CONFIGS, IDS, strict=True)
        for kind, problems, quick in (
            ("causal", CAUSAL, cfg in CUT),
            ("window", WINDOW, cfg in GROUPED),
            ("more", MORE_RAGGED, False),
        )
    ],
)
def test_masks_and_ragged_ends(
    cfg: FlashForwardKernelConfig, problems: list[dict[str, Any]]
) -> None:
    for problem in problems:
        prove_right(cfg, heads=2, **problem)


@pytest.mark.parametrize("cfg", GROUPED, ids=str)
def test_the_last_group_of_heads_may_be_smaller(
    cfg: FlashForwardKernelConfig,
) -> None:
    """Two heads' keys fill the L2 and there is a third; a window leaves few of them to look at."""
    keys, rows, window = 30_000, 2 * cfg.B_r - 1, (40, 0)
    assert cfg.l2_group_mib << 20 == 16 << 20
    assert 2 <= (16 << 20) / (2 * keys * cfg.d_head * 2) < 3
    rng = np.random.default_rng(4)
    q, k, v = (
        rng.standard_normal((1, length, 3, cfg.d_head)).astype(numpy_dtype(cfg.dtype))
        for length in (rows, keys, keys)
    )
    # Keys out of sight change nothing, and without them all heads are one group.
    last = slice((keys - rows - 40) // cfg.B_c * cfg.B_c, None)
    expected = forward(cfg, q, k[:, last], v[:, last], window=window)
    bounds = Bounds()
    o = run_forward(cfg, q, k, v, window=window, observers=[bounds]).o
    assert bounds.findings == []
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_a_lazy_rescale_is_right_whatever_the_maxima_do(kind: str) -> None:
    for cfg in LAZY:
        if cfg.B_c != 48:
            prove_right(cfg, seq=cfg.B_r, seq_k=4 * cfg.B_c, heads=2, inputs=kind)


@pytest.mark.parametrize("growth", [0.5, 7.9, 8.1, 30.0])
def test_a_lazy_rescale_keeps_the_true_maximum(growth: float) -> None:
    """Every row's maximum grows by `growth` (log2) a K/V block; blocks run last to first."""
    for cfg in LAZY[:2]:
        blocks, d = 4, cfg.d_head
        q = np.zeros((1, cfg.B_r, 1, d), np.float32)
        k = np.zeros((1, blocks * cfg.B_c, 1, d), np.float32)
        q[..., 0] = 1.0
        k[..., 0] = np.repeat(np.arange(blocks)[::-1], cfg.B_c)[None, :, None]
        v = np.random.default_rng(1).standard_normal(k.shape).astype(np.float32)
        arrays = [x.astype(numpy_dtype(cfg.dtype)) for x in (q, k, v)]
        scale = growth * np.log(2.0)
        o, lse, row_max = forward(cfg, *arrays, scale=scale, return_lse=True, return_row_max=True)
        scores = k[0, :, 0, 0].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        expected = weights @ arrays[2][0, :, 0].astype(np.float64) / weights.sum()
        np.testing.assert_allclose(row_max, scores.max(), rtol=1e-5)
        np.testing.assert_allclose(lse, np.log(np.exp(scores).sum()), rtol=1e-3)
        got = np.asarray(o)[0, :, 0].astype(np.float64)
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), atol=5e-3)
