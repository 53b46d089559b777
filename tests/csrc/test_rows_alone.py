"""Free kernels: a row's bits depend neither on its neighbours nor on a requested LSE.

A warp has sixteen rows. Lazy rescaling and stale maxima correct a row if it outgrows its maximum;
that must not touch the warp's other rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.families import KernelConfig, Semantics
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import ForwardResult, run_forward
from flashsmith.verify.proof_inputs import numpy_dtype

LAZY = "(FP16, 64, 64, 64, 1wg): tma+stages_2+q_buffers_1+regs_24_240+rescale_8"
STALE = f"{LAZY}+stale_max"
OVERLAPPED = (
    "(BF16, 64, 128, 64, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+rescale_8+stale_max"
)
NARROW = (
    "(BF16, 96, 128, 32, 2wg): tma+stages_1+q_buffers_1+regs_32_232+overlap+rescale_8+stale_max"
)
SPLIT = (
    "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+pingpong_gemm+dynamic"
    "+longest_first+rescale_8+stale_max+split_4"
)
MMA = "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+lazy_rescale"
MMA_UNFOLDED = "(BF16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+stages_2+lazy_rescale"
PLAIN, CAUSAL, UNEVEN = Semantics(), Semantics(mask="causal"), Semantics(uneven=True)
CASES = [
    (LAZY, PLAIN),
    (STALE, PLAIN),
    (OVERLAPPED, CAUSAL),
    (NARROW, PLAIN),
    (SPLIT, UNEVEN),
    (MMA, PLAIN),
    (MMA_UNFOLDED, CAUSAL),
]
for text, semantics in CASES:
    shared_kernels.want([parse(text)], semantics)

# How far the neighbours' maxima grow in a block, in octaves: not at all, lazily, corrected from
# probabilities, and beyond what fp32 holds, where a row's scores are computed again.
JUMPS = (0.0, 4.0, 20.0, 200.0)


def tensors(
    cfg: KernelConfig, semantics: Semantics, rows: np.ndarray, jump: float
) -> list[np.ndarray]:
    """q, k and v. The given rows of q see scores that grow by up to `jump` in each block."""
    rng = np.random.default_rng(7)
    # Split tiles need a length that the kernel splits.
    count, keys = cfg.B_r - 5 * semantics.uneven, 8 * cfg.B_c - 3 * semantics.uneven
    q, k, v = (rng.standard_normal((1, n, 1, cfg.d_head)) for n in (count, keys, keys))
    q *= 0.3
    q[..., 0] = 0.0
    q[0, rows, 0, 0] = rng.uniform(0.2, 1.0, len(rows))
    block = (keys - 1 - np.arange(keys)) // cfg.B_c
    k[0, :, 0, 0] = np.maximum(block - 1, 0) * jump * rng.integers(0, 2, keys)
    return [x.astype(numpy_dtype(cfg.dtype)) for x in (q, k, v)]


def run(
    cfg: KernelConfig, semantics: Semantics, drawn: list[np.ndarray], **more: Any
) -> ForwardResult:
    options: Mapping[str, Any] = {"causal": True} if semantics == CAUSAL else {}
    return run_forward(cfg, *drawn, scale=math.log(2.0), emulate=True, **options, **more)


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(np.dtype(f"u{array.itemsize}"))


@pytest.mark.parametrize(("text", "semantics"), CASES, ids=str)
@pytest.mark.parametrize("jump", JUMPS)
def test_other_rows_of_a_warp_do_not_change_a_row(
    text: str, semantics: Semantics, jump: float
) -> None:
    cfg = parse(text)
    # Every third row grows; the others are looked at.
    growing = np.arange(0, cfg.B_r - 8, 3)
    kept = np.setdiff1d(np.arange(cfg.B_r - 5 * semantics.uneven), growing)
    drawn = tensors(cfg, semantics, growing, jump)
    calm = [drawn[0].copy(), *drawn[1:]]
    calm[0][0, growing, 0] = 0
    results = [run(cfg, semantics, x, return_lse=True) for x in (drawn, calm)]
    for name in ("o", "lse"):
        got, wanted = (bits(getattr(result, name)) for result in results)
        if name == "o":
            got, wanted = got[0, kept], wanted[0, kept]
        else:
            got, wanted = got[0, 0, kept], wanted[0, 0, kept]
        np.testing.assert_array_equal(got, wanted, err_msg=name)


@pytest.mark.parametrize(("text", "semantics"), CASES, ids=str)
@pytest.mark.parametrize("jump", JUMPS)
def test_a_requested_log_sum_exp_does_not_change_o(
    text: str, semantics: Semantics, jump: float
) -> None:
    cfg = parse(text)
    drawn = tensors(cfg, semantics, np.arange(0, cfg.B_r - 8, 3), jump)
    alone, both = run(cfg, semantics, drawn), run(cfg, semantics, drawn, return_lse=True)
    np.testing.assert_array_equal(bits(both.o), bits(alone.o))
