"""Exponents relative to a maximum that is out of date: whatever scores do, outputs are right.

Blocks are visited from the last to the first. The first two that all rows see find their maximum
before their exponentials; in those after them it may have jumped by any amount.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from hopper_plans import wgmma_config
from plain_run import full_after

from flashsmith.families import (
    Semantics,
    WgmmaForwardKernelConfig,
)
from flashsmith.runtime import ForwardResult, run_forward
from flashsmith.runtime.emulation import all_checks
from flashsmith.semantics.program import BoundProgram, K, Q, program_of
from flashsmith.semantics.typed import Typed, apply
from flashsmith.verify import prove
from flashsmith.verify.attention_semantics import Attention, offsets
from flashsmith.verify.proof_inputs import INPUT_KINDS, numpy_dtype
from flashsmith.verify.reference import References, compute_references, references_of
from flashsmith.verify.tolerance import compare
from ptxlab.translate import translator
from ptxlab.translate.opcodes_float import transcendental


def stale(text: str) -> WgmmaForwardKernelConfig:
    return wgmma_config(f"{text}+stale_max")


ALONE = stale("(FP16, 64, 64, 64, 1wg): tma+stages_2+q_buffers_1+regs_24_240+rescale_8")
EARLY = stale(
    "(FP16, 64, 64, 48, 1wg): tma+stages_2+q_buffers_2+regs_24_240+overlap+dynamic+rescale_8"
    "+early_exp"
)
# Panels of 32 columns; one stage for K, which consumers release when the sums are known.
NARROW = stale("(BF16, 96, 128, 32, 2wg): tma+stages_1+q_buffers_1+regs_32_232+overlap+rescale_8")
# A late warpgroup delays the other through the order barrier.
ORDERED = stale(
    "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_2+regs_32_232+pingpong_gemm+dynamic+rescale_8"
)
PLAIN = Semantics()
CAUSAL = Semantics(mask="causal", uneven=True)
WINDOW = Semantics(mask="window", uneven=True)
SOFTCAP = Semantics(softcap=True)
PACKED = Semantics(mask="causal", packed=True, uneven=True)

# Of a row's maximum from block to block at most, log2. Probabilities are brought back from below
# 2^100.
JUMPS: tuple[float, ...] = (0, 1, 3, 7, 9, 12, 15, 20, 60, 100, 127, 129, 200, 1000)
SOME_JUMPS = (9, 60, 200, 1000)
OVERFLOWS = 200


def up_to_date(cfg: WgmmaForwardKernelConfig) -> WgmmaForwardKernelConfig:
    """The same config's kernel that keeps every maximum up to date."""
    return replace(cfg, stale_max=False)


shared_kernels.want(
    [ALONE, EARLY, NARROW, ORDERED, *map(up_to_date, (ALONE, EARLY, NARROW))], PLAIN
)
shared_kernels.want([EARLY, up_to_date(EARLY), NARROW], CAUSAL)
shared_kernels.want([ALONE], WINDOW)
shared_kernels.want([EARLY], SOFTCAP)
shared_kernels.want([NARROW], PACKED)


@dataclass(frozen=True)
class Problem:
    """Tensors and how to attend; scores are q k^T in log2 units."""

    semantics: Semantics
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    lens: dict[str, Any] = field(default_factory=dict)
    scale = math.log(2.0)

    def run(self, cfg: WgmmaForwardKernelConfig, **more: Any) -> ForwardResult:
        packed = {f"cu_seq{name}": offsets(lens) for name, lens in self.lens.items()}
        options = self.options | packed | more
        tensors = self.q, self.k, self.v
        return run_forward(
            cfg, *tensors, scale=self.scale, return_lse=True, emulate=True, **options
        )

    def references(self) -> References:
        return compute_references(self.q, self.k, self.v, self.scale, **self.options, **self.lens)


def jumping(
    cfg: WgmmaForwardKernelConfig, semantics: Semantics, jump: float, **options: Any
) -> Problem:
    """From the third block from the end on, a row's maximum grows by up to `jump` a block."""
    rng = np.random.default_rng(0)
    sizes = [(cfg.B_r, 6 * cfg.B_c)]
    if semantics.uneven:
        # As many blocks more as the diagonal passes through.
        keys = cfg.B_r + 7 * cfg.B_c - 5
        sizes = [(cfg.B_r - 7, keys)]
    if semantics.packed:
        sizes = [*sizes, (3, 0), (cfg.B_r - 40, keys - cfg.B_c)]
    drawn = [_jumping_sequence(cfg, rng, jump, *size) for size in sizes]
    q, k, v = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    if semantics.packed:
        lens_q, lens_k = zip(*sizes, strict=True)
        return Problem(semantics, q, k, v, options, {"lens_q": lens_q, "lens_k": lens_k})
    return Problem(semantics, q[None], k[None], v[None], options)


def _jumping_sequence(
    cfg: WgmmaForwardKernelConfig, rng: np.random.Generator, jump: float, rows: int, keys: int
) -> list[np.ndarray]:
    q, k, v = (rng.standard_normal((n, 1, cfg.d_head)) for n in (rows, keys, keys))
    # The first column has the jumps: every row has its own share of them, not every key jumps.
    q *= 0.3
    q[..., 0] = rng.uniform(0.2, 1.0, (rows, 1))
    block = (keys - 1) // cfg.B_c - np.arange(keys) // cfg.B_c
    k[:, 0, 0] = np.maximum(block - 1, 0) * jump * rng.integers(0, 2, keys)
    return [x.astype(numpy_dtype(cfg.dtype)) for x in (q, k, v)]


def check_right(problem: Problem, result: ForwardResult, cfg: WgmmaForwardKernelConfig) -> None:
    """By the rule of proofs, and at most half as far off again as a textbook kernel."""
    references = problem.references()
    lens = problem.lens.get("lens_q")
    found = compare(cfg, result.o, result.lse, references, row_max=result.row_max, lens_q=lens)
    assert not found.reasons, found.reasons
    textbook = np.abs(references.same_precision.astype(np.float64) - references.o).max()
    assert found.max_error <= 1.5 * textbook + 1e-5


def executed(result: ForwardResult, beginning: str) -> int:
    """Warp instructions whose mnemonic begins like this."""
    assert result.emulation is not None
    counts = result.emulation.instructions.items()
    return sum(count for mnemonic, count in counts if mnemonic.startswith(beginning))


# --- jumps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "jumps"),
    [
        (ALONE, JUMPS),
        (EARLY, SOME_JUMPS),
        (NARROW, SOME_JUMPS),
        pytest.param(EARLY, JUMPS, marks=pytest.mark.full),
        pytest.param(NARROW, JUMPS, marks=pytest.mark.full),
    ],
)
def test_a_maximum_may_jump_by_anything(
    cfg: WgmmaForwardKernelConfig, jumps: tuple[float, ...]
) -> None:
    for jump in jumps:
        problem = jumping(cfg, PLAIN, jump)
        result = problem.run(cfg)
        check_right(problem, result, cfg)
        # Scores are not lost until 2^100, and noise adds to jumps.
        if not 80 < jump < OVERFLOWS:
            assert (executed(result, "mma.sync") > 0) is (jump >= OVERFLOWS), jump


@pytest.mark.parametrize(
    ("cfg", "semantics", "options"),
    [
        (EARLY, CAUSAL, {"causal": True}),
        (NARROW, CAUSAL, {"causal": True}),
        (NARROW, PACKED, {"causal": True}),
        # Scores computed again are capped again, at 2^288.
        (EARLY, SOFTCAP, {"softcap": 200.0}),
    ],
    ids=["causal", "causal, narrow", "packed", "softcap"],
)
def test_whatever_else_is_asked_for(
    cfg: WgmmaForwardKernelConfig, semantics: Semantics, options: dict[str, Any]
) -> None:
    for jump in SOME_JUMPS:
        problem = jumping(cfg, semantics, jump, **options)
        result = problem.run(cfg)
        check_right(problem, result, cfg)
        assert (executed(result, "mma.sync") > 0) is (jump >= OVERFLOWS), jump


@pytest.mark.parametrize("cfg", [ALONE, EARLY], ids=str)
def test_maxima_that_grow_as_fast_as_sums_do(cfg: WgmmaForwardKernelConfig) -> None:
    """Growth alone keeps probabilities within fp16: each block's are too few to outgrow the sum."""
    verdict = prove(cfg, seq=64, seq_k=24 * cfg.B_c, inputs="growing_maxima", row_max=False)
    assert verdict.ok, str(verdict)


@pytest.fixture
def flushed_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """ex2.approx.ftz knows no subnormal results; the emulator's does."""
    flushed = "(lambda x: np.where(x < np.float32(2.0**-126), np.float32(0), x))(np.exp2({0}))"
    monkeypatch.setitem(translator.HANDLERS, "ex2", transcendental(flushed))
    monkeypatch.setattr(translator, "_translations", OrderedDict())


@pytest.mark.usefixtures("flushed_to_zero")
@pytest.mark.parametrize("jump", [125.5, 126.5, 127.5, 128.5])
def test_a_factor_that_hardware_takes_for_zero(jump: float) -> None:
    """All rows jump alike, by about what fp32 holds, to the one key that has any weight."""
    problem = jumping(ALONE, PLAIN, 0)
    problem.q[:], problem.q[..., 0] = 0, jump
    problem.k[0, 2 * ALONE.B_c, 0, 0] = 1
    check_right(problem, problem.run(ALONE), ALONE)


@pytest.mark.parametrize("key", [50, 100, 200])
def test_keys_that_leave_the_window_stay_out_of_it(key: int) -> None:
    """One key far above all others, which only some rows still see."""
    rng = np.random.default_rng(0)
    shapes = [(1, rows, 1, ALONE.d_head) for rows in (64, 512, 512)]
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    q[..., 0], k[..., 0], k[0, key, 0, 0] = 8, 0, 200
    problem = Problem(WINDOW, q, k, v, {"window": (400, 0)})
    check_right(problem, problem.run(ALONE), ALONE)


# --- what is no number ---------------------------------------------------------------------------


def check_as_up_to_date(problem: Problem, cfg: WgmmaForwardKernelConfig) -> ForwardResult:
    """Right is what the kernel gives that keeps every maximum up to date."""
    result, expected = (problem.run(one) for one in (cfg, up_to_date(cfg)))
    for name, tolerance in (("o", 4 * np.finfo(np.float16).eps), ("lse", 1e-4)):
        got, wanted = (np.asarray(getattr(x, name), np.float64) for x in (result, expected))
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    return result


def finite_rows(result: ForwardResult) -> np.ndarray:
    return np.array([np.isfinite(row.astype(np.float32)).all() for row in result.o[0]])


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("semantics", [PLAIN, CAUSAL], ids=str)
def test_rows_that_see_infinities_first(semantics: Semantics, blocks: int) -> None:
    """No key of the first blocks has any weight, or none at all."""
    problem = jumping(EARLY, semantics, 0, **({"causal": True} if semantics == CAUSAL else {}))
    keys = problem.k.shape[1]
    problem.k[:, max(0, keys - blocks * EARLY.B_c) :, :, 0] = -np.inf
    # In one row the infinities are positive.
    problem.q[:, -2, :, 0] *= -1
    finite = finite_rows(check_as_up_to_date(problem, EARLY))
    assert not finite[-2]
    assert np.delete(finite, -2).all()


@pytest.mark.parametrize("block", [0, 1, 4])
@pytest.mark.parametrize("semantics", [PLAIN, CAUSAL], ids=str)
def test_a_key_that_is_no_number(semantics: Semantics, block: int) -> None:
    """Makes those rows NaN that see it, and no others."""
    options = {"causal": True} if semantics == CAUSAL else {}
    problem = jumping(EARLY, semantics, 20, **options)
    problem.k[0, problem.k.shape[1] - block * EARLY.B_c - 30, 0, 3] = np.nan
    finite = finite_rows(check_as_up_to_date(problem, EARLY))
    assert not finite[-1]
    assert finite[0] == (semantics == CAUSAL and block == 0)


def test_a_row_that_is_no_number() -> None:
    """The others of its warp compute all later scores twice."""
    problem = jumping(EARLY, PLAIN, 20)
    problem.q[0, 20, 0, 3] = np.nan
    result = check_as_up_to_date(problem, EARLY)
    assert np.flatnonzero(~finite_rows(result)).tolist() == [20]
    assert executed(result, "mma.sync") > 0


# --- what it costs and what it spares ------------------------------------------------------------


@pytest.mark.parametrize("jump", [0, 20, OVERFLOWS])
def test_maxima_that_are_asked_for_are_exact(jump: float) -> None:
    problem = jumping(EARLY, PLAIN, jump)
    result = problem.run(EARLY, return_row_max=True)
    assert result.row_max is not None
    check_right(problem, result, EARLY)
    assert executed(result, "mma.sync") == 0


@pytest.mark.parametrize("cfg", [ALONE, EARLY, NARROW], ids=str)
def test_most_blocks_compute_no_maximum(cfg: WgmmaForwardKernelConfig) -> None:
    rng = np.random.default_rng(0)
    shapes = [(1, rows, 1, cfg.d_head) for rows in (cfg.B_r, 10 * cfg.B_c, 10 * cfg.B_c)]
    q, k, v = (rng.standard_normal(shape).astype(numpy_dtype(cfg.dtype)) for shape in shapes)
    q = (q.astype(np.float32) / math.sqrt(cfg.d_head)).astype(q.dtype)
    problem = Problem(PLAIN, q, k, v)
    result = problem.run(cfg)
    assert executed(result, "mma.sync") == 0
    looked = executed(problem.run(up_to_date(cfg)), "max.f32")
    # Two blocks of ten, and for the others the largest of four sums a row.
    assert executed(result, "max.f32") < 0.6 * looked


# --- lists of a mask function --------------------------------------------------------------------

# Every row sees every key; half of the rows see no key of the blocks that come first.
EVERY = Q + K >= 0
HALF = (NARROW.B_c * 4 > K) | apply("remainder", Q, 2).equals(0)


@pytest.mark.parametrize(
    ("mask", "causal", "jump"),
    full_after(2, [(EVERY, False, 1000), (EVERY, True, 60), (EVERY, False, 0), (HALF, False, 9)]),
    ids=["lost", "causal", "level", "late"],
)
def test_full_blocks_of_lists_compute_no_maximum(mask: Typed, causal: bool, jump: float) -> None:
    """Full blocks after the first three may raise any maximum, also that of rows without one."""
    cfg = NARROW
    made = BoundProgram(program_of(None, mask).program)
    problem = jumping(cfg, CAUSAL, jump, causal=causal)
    if jump == 0:
        problem = replace(problem, q=(0.2 * problem.q).astype(problem.q.dtype))
    result = problem.run(cfg, program=made, poisoned=True, observers=all_checks())
    assert result.emulation is not None
    assert not result.emulation.findings
    attention = Attention(problem.scale, causal=causal, program=made)
    references = references_of(attention, problem.q, problem.k, problem.v)
    found = compare(cfg, result.o, result.lse, references)
    assert not found.reasons, found.reasons
    # Rows without a maximum, or far above it, are computed again.
    again = mask is HALF or jump >= OVERFLOWS
    assert (executed(result, "mma.sync") > 0) is again
    if jump == 0:
        looked = executed(problem.run(up_to_date(cfg), program=made), "max.f32")
        assert executed(result, "max.f32") < looked


# --- proofs --------------------------------------------------------------------------------------

SHAPES: list[tuple[WgmmaForwardKernelConfig, dict[str, Any]]] = [
    (EARLY, {"seq": 64, "seq_k": 6 * EARLY.B_c}),
    (NARROW, {"seq": 150, "seq_k": 300, "heads": 2, "heads_k": 1, "causal": True}),
    (ORDERED, {"seq": 128, "seq_k": 10 * ORDERED.B_c}),
]


@pytest.mark.parametrize(
    ("cfg", "shape", "inputs"),
    [
        pytest.param(
            *(cfg, shape, inputs),
            id=f"{inputs}-{name}",
            # Each kind in one kernel.
            marks=[pytest.mark.full] * ((number - place) % len(SHAPES) != 0),
        )
        for number, inputs in enumerate(INPUT_KINDS)
        for place, (name, (cfg, shape)) in enumerate(
            zip(("plain", "causal", "ordered"), SHAPES, strict=True)
        )
    ],
)
def test_no_inputs_make_it_wrong(
    cfg: WgmmaForwardKernelConfig, shape: dict[str, Any], inputs: str
) -> None:
    verdict = prove(cfg, inputs=inputs, checks=True, row_max=False, sm_count=2, **shape)
    assert verdict.ok, str(verdict)
