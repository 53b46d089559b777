"""The kernels of the mma_sync_backward family in the emulator: right gradients, no finding, and the
same bits under every schedule of all that is not added up by atomics.

``-m full`` proves a covering array of all knobs with three semantics."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DqMode,
    FlashBackwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
    family_named,
    parse_kernel_name_into_config,
)
from flashsmith.families.covering_array import cover
from flashsmith.runtime import OperationResult, run_operation
from flashsmith.verify import Verdict, reference_of
from flashsmith.verify import prove as prove_problem
from ptxlab.checks import BankConflicts, all_checks

FAMILY = family_named("mma_sync_backward")


def config(text: str) -> FlashBackwardKernelConfig:
    found = parse_kernel_name_into_config(text)
    assert isinstance(found, FlashBackwardKernelConfig)
    return found


REPEATABLE = config("(FP16, 64, 64, 64, 4): backward")
FREE = config("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
# Beside these P and dS go through shared memory, and panels are narrow.
SHARING = config("(BF16, 96, 32, 64, 4): backward+columns_2+stages_2")
WIDE = config("(BF16, 256, 32, 32, 4): backward+columns_2+dq_atomics")
SMALL = config("(FP16, 32, 32, 32, 4): backward+columns_2+dq_atomics")
BOTH = [REPEATABLE, FREE]
EVERY = [*BOTH, SHARING, WIDE]
PLAIN, CAUSAL = Semantics(), Semantics("causal", uneven=True)
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)
# A kernel takes three seconds to compile and to translate: of the plain run each of these two is
# for semantics of its own.
shared_kernels.want([*BOTH, WIDE], PLAIN)
shared_kernels.want([*BOTH, SHARING, SMALL], CAUSAL)
shared_kernels.want(BOTH, WINDOW)


def prove(cfg: FlashBackwardKernelConfig, text: str, **how: Any) -> Verdict:
    """The verdict on a problem; ``how`` are the reference's options or prove()'s."""
    problem = Problem.parse(f"{text} {cfg.dtype.name.lower()} backward")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    passed = {
        name: how.pop(name) for name in ("inputs", "seed", "schedule_seed", "checks") if name in how
    }
    options = reference_of(problem.computed).options(problem, **how)
    return prove_problem(cfg, problem, options=options, **passed)


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("cfg", "schedule_seed"),
    [
        *((cfg, 3) for cfg in (*BOTH, WIDE)),
        full(SHARING, 3),
        *(full(cfg, None) for cfg in EVERY),
    ],
    ids=str,
)
def test_whole_tiles(cfg: FlashBackwardKernelConfig, schedule_seed: int | None) -> None:
    rows, keys = cfg.divisors
    text = f"b1 s{max(rows, 2 * cfg.B_r)}:{max(keys, 2 * cfg.B_c)} h2:1 d{cfg.d_head}"
    verdict = prove(cfg, text, checks=True, schedule_seed=schedule_seed)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("length", [63, full(64)])
def test_heads_one_after_the_other_and_the_last_ones_together(length: int) -> None:
    """260 CTAs, of which the last 256 go longest first. Whole tiles have a kernel of their own."""
    assert prove(SMALL, f"b1 s{length}:{length} h130 d32 causal", checks=True).ok


UNEVEN = {
    "longer keys": ("b1 s75:140 h2:1", {}),
    "rows without keys": ("b2 s140:70 h1", {"dlse": True, "sinks": True}),
    "one row": ("b1 s1:70 h2", {"dlse": True}),
    "one key": ("b1 s70:1 h2", {"sinks": True}),
    "merged statistics": ("b1 s100:75 h2", {"sinks": True, "dlse": True, "more_keys": 9}),
    "fp32 gradients": ("b1 s75:140 h2:1", {"grad_dtype": "float32"}),
}


@pytest.mark.parametrize(
    ("cfg", "case"),
    [
        *((cfg, case) for cfg in BOTH for case in UNEVEN),
        (SHARING, "rows without keys"),
        *(full(SHARING, case) for case in UNEVEN if case != "rows without keys"),
        *(full(WIDE, case) for case in UNEVEN),
    ],
    ids=str,
)
def test_causal_and_uneven(cfg: FlashBackwardKernelConfig, case: str) -> None:
    sizes, options = UNEVEN[case]
    verdict = prove(cfg, f"{sizes} d{cfg.d_head - 8} causal", checks=True, **options)
    assert verdict.ok, str(verdict)


HARD = ("nonfinite", "lost_keys", "neighbours")
MORE_HARD = ("large_do", "far_scores", "constant")


@pytest.mark.parametrize(
    ("cfg", "inputs"),
    [
        *((cfg, inputs) for cfg in BOTH for inputs in HARD),
        *((REPEATABLE, inputs) for inputs in MORE_HARD),
        *(full(FREE, inputs) for inputs in MORE_HARD),
    ],
    ids=str,
)
def test_hard_inputs(cfg: FlashBackwardKernelConfig, inputs: str) -> None:
    for text in ("b2 s100:75 h2:1 d40 causal", "b1 s70:150 h2 d64 causal"):
        verdict = prove(cfg, text, inputs=inputs, checks=True)
        assert verdict.ok, str(verdict)


PACKED = {"lens_q": (70, 0, 13, 20), "lens_k": (30, 12, 0, 140), "spare": 6}


LIMITS = [(13, 5), (None, 4), (20, None)]
KINDS = [("random", limits) for limits in LIMITS] + [("nonfinite", (13, 5)), ("neighbours", (9, 9))]


@pytest.mark.parametrize("cfg", BOTH, ids=str)
@pytest.mark.parametrize(("inputs", "limits"), KINDS)
def test_packed_windows_with_a_softcap(
    cfg: FlashBackwardKernelConfig, inputs: str, limits: tuple[int | None, int | None]
) -> None:
    """Rows of no sequence hold NaN, and have gradients of 0."""
    verdict = prove(
        cfg,
        "b4 s70:140 h2:1 d64 window softcap packed",
        inputs=inputs,
        checks=True,
        left=limits[0],
        right=limits[1],
        dlse=True,
        sinks=True,
        **PACKED,
    )
    assert verdict.ok, str(verdict)


def test_rows_behind_the_longest_length_have_gradients_of_0() -> None:
    text = "b2 s40:50 h2:1 d64 window softcap packed"
    for cfg in BOTH:
        verdict = prove(cfg, text, checks=True, left=9, right=9, lens_q=(70, 20), lens_k=(50, 90))
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("cfg", BOTH, ids=str)
def test_rows_without_keys_may_hold_anything(cfg: FlashBackwardKernelConfig) -> None:
    """Their q and do are NaN, and change no bit of any gradient."""
    problem = Problem.parse("b1 s140:100 h2:1 d64 causal fp16 backward")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    inputs = reference_of(problem.computed).draw(problem, "random", 0)
    spoiled = {name: array.copy() for name, array in inputs.items()}
    for name in ("q", "do"):
        spoiled[name][:, :40] = np.nan
    inputs["do"][:, :40] = 0
    expected, found = (
        run_operation(cfg, problem, tensors, emulate=True, poisoned=True).outputs
        for tensors in (inputs, spoiled)
    )
    assert not found["dq"][:, :40].any()
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(found[name]).all()
        np.testing.assert_array_equal(found[name], expected[name])


# --- what is asked for ---------------------------------------------------------------------------


@cache
def gradients(
    cfg: FlashBackwardKernelConfig, unwanted: tuple[str, ...] = (), seed: int | None = None
) -> OperationResult:
    problem = Problem.parse("b1 s100:140 h2:1 d64 causal fp16 backward")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    reference = reference_of(problem.computed)
    return run_operation(
        cfg,
        problem,
        reference.draw(problem, "random", 0),
        unwanted=unwanted,
        emulate=True,
        poisoned=True,
        observers=all_checks(),
        schedule_seed=seed,
    )


@pytest.mark.parametrize("cfg", BOTH, ids=str)
def test_nothing_else_is_computed(cfg: FlashBackwardKernelConfig) -> None:
    """What is asked for is what it is beside the others; the rest costs no products. Within two
    ulps: the emulator sums a chain of products as one, and chains end where a branch does."""
    every = gradients(cfg)
    assert every.emulation is not None
    products = every.emulation.instructions
    mma = next(name for name in products if name.startswith("mma.sync"))
    cost = {}
    for unwanted in (("dq",), ("dk", "dv"), ("dv",)):
        some = gradients(cfg, unwanted)
        assert some.emulation is not None
        assert not some.emulation.findings
        cost[unwanted] = some.emulation.instructions[mma] / products[mma]
        for name, found in some.outputs.items():
            np.testing.assert_allclose(found, every.outputs[name], rtol=2**-9, atol=2**-14)
    shares = {DqMode.TWO_KERNELS: (4 / 7, 3 / 7), DqMode.ATOMICS: (4 / 5, 3 / 5)}
    without_dq, dq_alone = shares[cfg.dq]
    assert abs(cost["dq",] - without_dq) < 0.04
    assert abs(cost["dk", "dv"] - dq_alone) < 0.04


@pytest.mark.parametrize("seed", [1, full(2)])
def test_only_atomics_depend_on_the_schedule(seed: int) -> None:
    for cfg in BOTH:
        first, other = gradients(cfg).outputs, gradients(cfg, seed=seed).outputs
        for name in ("dk", "dv", *(["dq"] if cfg is REPEATABLE else [])):
            np.testing.assert_array_equal(other[name], first[name])


def test_dsinks_without_sinks_are_refused() -> None:
    problem = Problem.parse("b1 s64 h1 d64 fp16 backward")
    shared_kernels.load([REPEATABLE], PLAIN)
    inputs = reference_of(problem.computed).draw(problem, "random", 0)
    with pytest.raises((ArgumentError, ValueError), match="dsinks"):
        run_operation(REPEATABLE, problem, inputs, wanted=["dsinks"], emulate=True)


@pytest.mark.parametrize("cfg", [*BOTH, WIDE, full(SHARING)], ids=str)
def test_no_access_to_shared_memory_meets_a_bank_conflict(cfg: FlashBackwardKernelConfig) -> None:
    observer, (rows, keys) = BankConflicts(), cfg.divisors
    problem = Problem.parse(f"b1 s{rows}:{keys} h1 d{cfg.d_head} {cfg.dtype.name.lower()} backward")
    shared_kernels.load([cfg], PLAIN)
    inputs = reference_of(problem.computed).draw(problem, "random", 0)
    run_operation(cfg, problem, inputs, emulate=True, observers=[observer])
    factors = observer.factors()  # of all launches
    assert {"cp.async", "ldmatrix", "ld.shared.8B", "st.shared.4B", "ld.shared.16B"} <= set(factors)
    assert set(factors.values()) == {1.0}


# --- every pair of knob values -------------------------------------------------------------------


def covered(cfg: FlashBackwardKernelConfig, semantics: Semantics) -> tuple[str, dict[str, Any]]:
    """A problem of a few tiles for a config, without its dtype."""
    heads = f"h2:1 d{cfg.d_head}"
    if semantics == PLAIN:
        rows, keys = cfg.divisors
        return f"b1 s{max(rows, 2 * cfg.B_r)}:{max(keys, 2 * cfg.B_c)} {heads}", {"dlse": True}
    if semantics == CAUSAL:
        return f"b1 s{cfg.B_r + 5}:{cfg.B_c + 40} {heads} causal", {"sinks": True}
    lens = {"lens_q": (cfg.B_r + 20, 7), "lens_k": (10, cfg.B_c + 9), "spare": 3}
    sizes = f"b2 s{cfg.B_r + 20}:{cfg.B_c + 9} {heads} window softcap packed"
    return sizes, lens | {"left": 13, "right": 5}


@pytest.mark.full
@pytest.mark.parametrize("semantics", [PLAIN, CAUSAL, WINDOW], ids=str)
def test_every_two_knob_values(semantics: Semantics) -> None:
    configs = cover(FAMILY, device_spec("A100"))
    shared_kernels.load(configs, semantics)
    for number, cfg in enumerate(configs):
        assert isinstance(cfg, FlashBackwardKernelConfig)
        text, options = covered(cfg, semantics)
        verdict = prove(cfg, text, checks=True, schedule_seed=number, **options)
        assert verdict.ok, str(verdict)


def test_a_change_of_dq_alone_leaves_dk_and_dv() -> None:
    free, repeatable = gradients(FREE).outputs, gradients(REPEATABLE).outputs
    assert replace(FREE, dq=DqMode.TWO_KERNELS, stages=1) == REPEATABLE
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(free[name], repeatable[name])
