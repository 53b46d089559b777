"""The rule for gradients: kernels that round honestly are right, and every mistake is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from backward_kernel import MUTANTS, kernel_gradients, matters
from grids.backward_grid import BackwardCase
from tiny_backward import tiny_cases

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem
from flashsmith.verify import gradients
from flashsmith.verify.backward_reference import (
    BackwardInputs,
    draw_backward_inputs,
    repeated_for_gradients,
)
from flashsmith.verify.gradient_tolerance import ExpectedGradients, compare_gradients
from flashsmith.verify.gradients import compute_gradients
from flashsmith.verify.tolerance import Comparison

# Of so many problems where a mistake matters, how many it must be seen on: fewer where it does
# little more than round once more.
PROBLEMS = 24
SUBTLE = {
    "dq summed in 16 bits": 1, "dS of the rounded P": 1,
    "P rounded towards 0": 2, "dS rounded towards 0": 3,
    "the group's sum in 16 bits": 4, "lse off by 1e-3": 6, "do of rows without keys": 4,
}  # fmt: skip
MOST = 8


def judged(
    case: BackwardCase, mutant: str = "", seed: int = 0, as_proven: bool = False
) -> Comparison:
    drawn, expected = drawn_and_expected(case, as_proven)
    outputs = kernel_gradients(
        drawn, problem_of(case, as_proven), fp32=case.fp32_gradients, seed=seed, mutant=mutant
    )
    return compare_gradients(case.dtype, outputs, expected)


def problem_of(case: BackwardCase, as_proven: bool = False) -> Problem:
    """The problem with more heads, since with few outputs the largest error is mostly chance: as
    many as proofs have, or enough for 512 elements of dq."""
    p, lens = case.problem, case.options().get("lens_q")
    if as_proven:
        return repeated_for_gradients(p, case.options())
    rows = p.batch * p.seq_q if lens is None else sum(lens)
    repeats = -(-512 // max(1, rows * p.heads_q * p.d))
    return replace(p, heads_q=p.heads_q * repeats, heads_k=p.heads_k * repeats)


@lru_cache(maxsize=256)
def drawn_and_expected(
    case: BackwardCase, as_proven: bool = False
) -> tuple[BackwardInputs, ExpectedGradients]:
    problem = problem_of(case, as_proven)
    drawn = draw_backward_inputs(problem, case.inputs, case.seed, case.options())
    expected = compute_gradients(
        drawn.tensors, drawn.attention, drawn.sequences, drawn.exact_o, drawn.exact_lse,
        unrounded=case.fp32_gradients,
    )  # fmt: skip
    return drawn, expected


def assert_honest_kernels_are_right(count: int, seed: int, as_proven: bool = False) -> None:
    for number, case in enumerate(tiny_cases(count, seed)):
        found = judged(case, seed=number, as_proven=as_proven)
        assert found.ok, f"{case}: {found.reasons}, {found.first_mismatch}"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_honest_kernels_are_right(seed: int) -> None:
    assert_honest_kernels_are_right(150, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 108))
def test_honest_kernels_are_right_on_thousands(seed: int) -> None:
    """Of fewer elements, one of 8,000 problems has the largest of them rounded far by a kernel and
    not by the reference."""
    assert_honest_kernels_are_right(1000, seed, as_proven=True)


@lru_cache(maxsize=1)
def _pool() -> list[BackwardCase]:
    return list(tiny_cases(400, 3, inputs="random", unneeded=()))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mistake_is_seen(mutant: str) -> None:
    seen = number = 0
    for case in _pool():
        if matters(mutant, drawn_and_expected(case)[0], problem_of(case)):
            seen += not judged(case, mutant, seed=number).ok
            number += 1
        if number == PROBLEMS or seen == SUBTLE.get(mutant, MOST):
            break
    assert seen >= SUBTLE.get(mutant, MOST), f"seen on {seen} of {number}"


# --- parts of the rule ---------------------------------------------------------------------------


def one(**fixed: object) -> BackwardCase:
    what = {
        "dtype": DType.FP16, "inputs": "random", "unneeded": (), "lengths": (40, 48), "d": 24,
        "batch": "dense", "heads": "gqa", "mask": "none", "softcap": 0.0, "more_keys": 0,
        "spare": 0, "cut": 0, "sinks": True, "fp32_gradients": False, "scale": None,
    }  # fmt: skip
    (case,) = tiny_cases(1, 1, **{**what, **fixed})
    return case


def _wrong(case: BackwardCase, name: str, place: tuple[int, ...], value: float) -> Comparison:
    _, expected = drawn_and_expected(case)
    outputs = {key: array.copy() for key, array in expected.rounded.items()}
    outputs[name][place] = value
    return compare_gradients(case.dtype, outputs, expected)


def test_a_wrong_element_is_named_and_located() -> None:
    case = one()
    _, expected = drawn_and_expected(case)
    place = (1, 3, 0, 7)
    exact = float(expected.exact["dk"][place])
    fine = compare_gradients(case.dtype, expected.rounded, expected)
    found = _wrong(case, "dk", place, exact + 0.5)
    assert fine.ok
    assert (found.mismatches, fine.mismatches) == (1, 0)
    assert str(found.first_mismatch).startswith("dk[1, 3, 0, 7]: got ")
    assert found.reasons[0].startswith("dk: largest error 0.5 is above ")
    assert found.outputs == sum(array.size for array in expected.exact.values())


@pytest.mark.parametrize("of_dlse", [0.0, 91.0], ids=["small", "mostly of dlse"])
@pytest.mark.parametrize(("share", "ok"), [(0.9, True), (1.1, False)])
def test_dsinks_have_bounds_of_their_own(share: float, ok: bool, of_dlse: float) -> None:
    case = one()
    _, expected = drawn_and_expected(case)
    expected.exact["dsinks"][2] += of_dlse
    expected.rounded["dsinks"][2] += of_dlse
    exact = float(expected.exact["dsinks"][2])
    bound = 2**-11 * expected.sinks_size[2] + 1e-5 * max(1.0, abs(exact))
    outputs = {key: array.copy() for key, array in expected.rounded.items()}
    outputs["dsinks"][2] = exact + share * bound
    found = compare_gradients(case.dtype, outputs, expected)
    assert found.ok == ok
    if not ok:
        assert found.reasons[0].startswith("dsinks: error ")
        assert "in head 2" in found.reasons[0]


def test_one_visible_key_needs_no_relative_rule() -> None:
    """dq and dk are 0 there but for rounding, and the norm's absolute part is what is left."""
    case = one(mask="diagonal", lengths=(48, 48), dlse=False, sinks=False)
    found = judged(case)
    _, expected = drawn_and_expected(case)
    assert np.abs(expected.exact["dq"]).max() < 1e-12
    assert found.ok
    assert not _wrong(case, "dq", (0, 0, 0, 0), 1e-3).ok


@pytest.mark.parametrize(
    "fixed",
    [
        {"lengths": (239, 1), "d": 256, "heads": "mqa"},
        {"lengths": (239, 1), "d": 128, "softcap": 30.0, "inputs": "large_do"},
        {"lengths": (3, 64), "d": 256, "heads": "mha", "mask": "causal", "inputs": "large_scores"},
    ],
)
def test_what_tensor_cores_cut_off_is_honest(
    fixed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where dP and D cancel it is all that is left, and of large scores it moves P to the next
    number of 16 bits. With sums that round, correct kernels were 1.1 to 2.8 times off the bound."""
    case = one(scale=0.3, dlse=False, sinks=False, fp32_gradients=True, **fixed)
    drawn, expected = drawn_and_expected(case)

    def summed(products: int) -> ExpectedGradients:
        monkeypatch.setattr(gradients, "TENSOR_CORE_PRODUCTS", products)
        found = compute_gradients(
            drawn.tensors, drawn.attention, drawn.sequences, drawn.exact_o, drawn.exact_lse,
            unrounded=True,
        )  # fmt: skip
        return replace(found, recompute=None)

    kernel = summed(16).rounded
    assert compare_gradients(case.dtype, kernel, expected).ok
    assert not compare_gradients(case.dtype, kernel, summed(case.d)).ok


def test_what_tensor_cores_cut_off_each_product_is_honest() -> None:
    """The one problem of 6,264 that the H200 had wrong, where a P of 1 - 9.0e-4 became two steps of
    fp16 less than 1 and sums alone are off by 6.6e-4, one step. Its dv was 1.41391 there."""
    case = BackwardCase(
        DType.FP16, 256, (3, 513), "causal", 0.0, "dense", "mqa", fp32_gradients=True,
        deterministic=True, unneeded=("dq",), inputs="large_scores", family="wgmma_backward",
    )  # fmt: skip
    drawn, expected = drawn_and_expected(case)
    sums_alone = replace(expected, recompute=None)
    kernel = expected.further.rounded
    assert kernel["dv"][1, 0, 0, 9] == pytest.approx(1.41391, abs=5e-6)
    assert expected.rounded["dv"][1, 0, 0, 9] == pytest.approx(1.41537, abs=5e-6)
    (reason,) = compare_gradients(case.dtype, kernel, sums_alone).reasons
    assert reason == "dv: largest error 0.00288 is above 0.00288"
    assert compare_gradients(case.dtype, kernel, expected).ok

    # What is wrong stays so: a thousandth of dv, or one key of a row that has 1.1% of its weight.
    less = kernel | {"dv": kernel["dv"] - np.float32(1e-3) * kernel["dv"]}
    assert "relative L2 error 0.00115 is" in str(compare_gradients(case.dtype, less, expected))
    row, key, head = 1, 47, 0
    q, k = (drawn.tensors[name].astype(np.float64) for name in "qk")
    weight = np.exp(q[1, row, head] @ k[1, key, 0] / 16 - drawn.exact_lse[1, head, row])
    assert 0.011 < weight < 0.012
    dropped = kernel["dv"].copy()
    dropped[1, key, 0] -= weight * drawn.tensors["do"][1, row, head]
    assert not compare_gradients(case.dtype, kernel | {"dv": dropped}, expected).ok


def test_a_thousandth_too_little_is_wrong() -> None:
    case = one(sinks=False, fp32_gradients=True, lengths=(130, 150))
    _, expected = drawn_and_expected(case)
    for name in ("dq", "dk", "dv"):
        kernel = dict(expected.further.rounded)
        assert compare_gradients(case.dtype, kernel, expected).ok
        kernel[name] = kernel[name] - np.float32(1e-3) * kernel[name]
        assert not compare_gradients(case.dtype, kernel, expected).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-7])
def test_what_nothing_contributes_to_is_0(value: float) -> None:
    """Rows without keys, keys without rows, and rows of no sequence."""
    above = one(mask="causal", lengths=(48, 40), sinks=False)
    packed = one(batch="random lengths", spare=9, sinks=False)
    _, expected = drawn_and_expected(packed)
    last = expected.exact["dk"].shape[0] - 1
    for case, name, place in (
        (above, "dq", (0, 2, 0, 0)),
        (packed, "dq", (expected.exact["dq"].shape[0] - 1, 0, 0)),
        (packed, "dk", (last, 0, 0)),
        (packed, "dv", (last, 1, 5)),
    ):
        found = _wrong(case, name, place, value)
        said = "nothing contributes to" if math.isfinite(value) else "NaN or inf"
        assert any(said in reason for reason in found.reasons), (name, found.reasons)


def test_nan_may_not_leave_its_head() -> None:
    case = one(inputs="neighbours", sinks=False)
    _, expected = drawn_and_expected(case)
    clean = np.argwhere(np.isfinite(expected.exact["dv"]))
    spoilt = np.argwhere(np.isnan(expected.exact["dv"]))
    assert len(clean)
    assert len(spoilt)
    assert not _wrong(case, "dv", tuple(clean[0]), math.nan).ok
    assert not _wrong(case, "dv", tuple(spoilt[0]), 0.0).ok


def test_a_sum_that_fp16_cannot_hold_may_be_inf() -> None:
    case = one(inputs="large_do", sinks=False, dlse=False, scale=0.6, d=40)
    _, expected = drawn_and_expected(case)
    lost = ~np.isfinite(expected.rounded["dk"].astype(np.float64))
    assert lost.any()
    assert all(np.isfinite(array).all() for array in expected.exact.values())
    assert judged(case).ok
    (calm,) = (place for place in np.argwhere(~lost & ~expected.tainted["dk"])[:1])
    assert not _wrong(case, "dk", tuple(calm), math.inf).ok


def test_a_gradient_that_is_missing_or_of_another_shape_is_an_error() -> None:
    _, expected = drawn_and_expected(one())
    outputs = dict(expected.rounded)
    with pytest.raises(ArgumentError, match=r"dk: has shape \(2, 48, 24\); the reference expects"):
        compare_gradients(DType.FP16, {**outputs, "dk": outputs["dk"][:, :, 0]}, expected)
    del outputs["dq"]
    with pytest.raises(ArgumentError, match="dq: is missing"):
        compare_gradients(DType.FP16, outputs, expected)
    assert compare_gradients(DType.FP16, outputs, expected.only(["dk", "dv", "dsinks"])).ok


def test_bf16_is_not_held_to_fp16s_bound() -> None:
    """The same relative error of 2e-3."""
    for dtype, ok in ((DType.FP16, False), (DType.BF16, True)):
        case = one(dtype=dtype, sinks=False, fp32_gradients=True)
        _, expected = drawn_and_expected(case)
        outputs = {name: 1.002 * array for name, array in expected.exact.items()}
        found = compare_gradients(case.dtype, outputs, expected)
        assert any("relative L2" in reason for reason in found.reasons) != ok


def test_infinite_lse_and_none_at_all() -> None:
    """Scores of -inf alone: an LSE of -inf, which reads as +inf."""
    case = one(inputs="lost_keys", lengths=(3, 3), sinks=False, dlse=False)
    found = [judged(replace(case, scale=scale)) for scale in (None, 0.3, 0.7, 1.1)]
    assert all(one.ok for one in found)
