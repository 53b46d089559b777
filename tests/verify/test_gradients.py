"""compute_gradients against float64 autograd and against finite differences, which know nothing of
its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from grids.backward_grid import BackwardCase
from tiny_backward import tiny_cases

from flashsmith.families import DType
from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.backward_reference import BackwardInputs, draw_backward_inputs
from flashsmith.verify.engine import NumpyEngine, TorchEngine
from flashsmith.verify.gradient_tolerance import ExpectedGradients
from flashsmith.verify.gradients import Rows, _aligned_product, compute_gradients
from flashsmith.verify.reference import compute_references

# Kinds without NaN and inf, since autograd multiplies what no row sees by 0, and without gradients
# beside which float64 has no dlse.
FINITE = ("random", "large_scores", "constant", "one_hot", "far_scores")


def drawn_and_expected(case: BackwardCase) -> tuple[BackwardInputs, ExpectedGradients]:
    drawn = draw_backward_inputs(case.problem, case.inputs, case.seed, case.options())
    return drawn, gradients_of(drawn)


def gradients_of(drawn: BackwardInputs) -> ExpectedGradients:
    return compute_gradients(
        drawn.tensors, drawn.attention, drawn.sequences, drawn.exact_o, drawn.exact_lse
    )


def by_autograd(drawn: BackwardInputs) -> dict[str, np.ndarray]:
    """The gradients of sum(do o) + sum(dlse lse), o and lse as their definition reads."""
    import torch

    tensors, attention = drawn.tensors, drawn.attention
    leaves = {
        name: torch.from_numpy(np.nan_to_num(tensors[name].astype(np.float64))).requires_grad_()
        for name in ("q", "k", "v", "sinks")
        if name in tensors
    }
    group = tensors["q"].shape[-2] // tensors["k"].shape[-2]
    total = torch.zeros((), dtype=torch.float64)
    for rows in drawn.sequences:
        q, k, v = (
            part(leaves[name]).transpose(0, 1)
            for name, part in (("q", rows.of_queries), ("k", rows.of_keys), ("v", rows.of_keys))
        )
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = attention.scale * (q @ k.transpose(1, 2))
        if attention.softcap:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        seen = torch.from_numpy(_seen(attention, q.shape[1], k.shape[1]))
        scores = scores.masked_fill(~seen, -math.inf)[:, seen.any(1)]
        if "sinks" in leaves:
            sinks = leaves["sinks"][:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        if seen.any():
            do = torch.from_numpy(rows.of_queries(tensors["do"]).astype(np.float64)).transpose(0, 1)
            total = total + (do[:, seen.any(1)] * (torch.softmax(scores, -1) @ v)).sum()
        if "dlse" in tensors:
            dlse = torch.from_numpy(rows.of_statistics(tensors["dlse"]).astype(np.float64))
            if seen.any():
                total = total + (dlse[:, seen.any(1)] * torch.logsumexp(scores, -1)).sum()
            # The sink is the LSE of a row that sees no key.
            if "sinks" in leaves:
                total = total + (dlse[:, ~seen.any(1)] * leaves["sinks"][:, None]).sum()
    if not total.requires_grad:
        return {f"d{name}": np.zeros(leaf.shape) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {f"d{name}": grad.numpy() for name, grad in zip(leaves, found, strict=True)}


def _seen(attention: Attention, seq_q: int, seq_k: int) -> np.ndarray:
    """Which of seq_k keys each of seq_q rows sees, from the definition of causal and window."""
    behind = (np.arange(seq_k) - seq_k) - (np.arange(seq_q) - seq_q)[:, None]
    left, right = attention.window
    right = 0 if attention.causal else right
    seen = np.ones((seq_q, seq_k), bool)
    if left is not None:
        seen &= behind >= -left
    if right is not None:
        seen &= behind <= right
    return seen


def assert_agree(drawn: BackwardInputs, found: ExpectedGradients, case: BackwardCase) -> None:
    theirs = by_autograd(drawn)
    assert set(theirs) == set(found.exact), case
    for name, exact in found.exact.items():
        size = max(1.0, float(np.abs(theirs[name]).max(initial=0.0)))
        error = np.abs(exact - theirs[name]).max(initial=0.0)
        assert error <= 1e-11 * size, f"{case}: {name} is off by {error}"
        if name != "dsinks":
            assert not theirs[name][found.idle[name]].any(), f"{case}: {name} is not idle"


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2))])
def test_they_are_those_of_float64_autograd(seed: int) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    for case in tiny_cases(50, seed, more_keys=0):
        if case.inputs not in FINITE:
            case = replace(case, inputs="random")
        drawn, found = drawn_and_expected(case)
        assert_agree(drawn, found, case)


def test_blocks_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    monkeypatch.setattr("flashsmith.verify.engine.NumpyEngine.score_bytes", 20_000)
    for case in tiny_cases(12, 9, more_keys=0, inputs="random", lengths=(70, 37)):
        drawn, found = drawn_and_expected(case)
        assert_agree(drawn, found, case)


def test_both_engines_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, here on the CPU, as on a GPU."""
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    for case in tiny_cases(12, 5):
        drawn, ours = drawn_and_expected(case)
        with monkeypatch.context() as patch:
            patch.setattr(
                "flashsmith.verify.gradients.engine_for", lambda on_gpu: TorchEngine("cpu")
            )
            theirs = gradients_of(drawn)
        for name, exact in ours.exact.items():
            np.testing.assert_allclose(
                theirs.exact[name], exact, rtol=1e-9, atol=1e-9 * _size(exact), err_msg=str(case)
            )
            assert theirs.rounded[name].dtype == ours.rounded[name].dtype
            if name != "dsinks":
                np.testing.assert_array_equal(theirs.tainted[name], ours.tainted[name])


@pytest.mark.parametrize("kind", [NumpyEngine, lambda: TorchEngine("cpu")])
def test_products_are_cut_off_at_the_largest_ones_25th_bit(kind: Any) -> None:
    """One number at a time, in whole numbers of 2^-200."""
    if kind is not NumpyEngine:
        pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    rng = np.random.default_rng(5)
    sizes = 2.0 ** rng.integers(-12, 12, (4, 40))
    a = (rng.standard_normal((4, 40)) * sizes).astype(np.float16)
    b = (rng.standard_normal((3, 40)) * sizes[:3]).astype(np.float16)
    # Sums that cancel, that overflow, and that are nothing at all.
    b[0, 16:32], a[1, 16:32] = -b[0, :16], a[1, :16]
    a[2, 5], a[3] = np.inf, 0.0
    engine = kind()
    placed = (engine.cast(engine.to_device(x), "float32") for x in (a, b.T))
    with engine.exactly():
        found = engine.to_host(_aligned_product(engine, *placed))
    expected = np.array([[_summed(x, y) for y in b] for x in a], np.float32)
    np.testing.assert_array_equal(found, expected)
    assert (found[:2] != (a[:2].astype(np.float64) @ b.T).astype(np.float32)).any()


def _summed(a: np.ndarray, b: np.ndarray) -> float:
    products = [float(x) * float(y) for x, y in zip(a, b, strict=True)]
    if not all(map(math.isfinite, products)):
        return sum(products)
    total = Fraction(0)
    for first in range(0, len(products), 16):
        some = slice(first, first + 16)
        pairs = zip(a[some], b[some], strict=True)
        exponents = [math.frexp(x)[1] + math.frexp(y)[1] - 2 for x, y in pairs if x and y]
        exponents += [math.frexp(total)[1] - 1] if total else []
        bit = Fraction(2) ** (max(exponents, default=0) - 25)
        terms = [total, *map(Fraction, products[some])]
        total = sum((int(term / bit) * bit for term in terms), Fraction(0))
        step = Fraction(2) ** (math.frexp(total)[1] - 24)
        total = int(total / step) * step
    return float(total)


def _size(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=1.0))


@pytest.mark.parametrize("number", range(12))
def test_finite_differences_agree(number: int) -> None:
    """Central differences of sum(do o) + sum(dlse lse) along random directions."""
    cases = tiny_cases(12, 31, inputs="random", lengths=(17, 33), more_keys=0, scale=None)
    case = list(cases)[number]
    drawn, found = drawn_and_expected(case)
    rng = np.random.default_rng(number)
    for name in ("q", "k", "v", "sinks"):
        if name not in drawn.tensors:
            continue
        along = rng.standard_normal(drawn.tensors[name].shape)
        step = 1e-5
        ahead, behind = (_value(drawn, name, sign * step * along) for sign in (1, -1))
        expected = float((found.exact[f"d{name}"] * along).sum())
        assert (ahead - behind) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def _value(drawn: BackwardInputs, name: str, change: np.ndarray) -> float:
    tensors: dict[str, Any] = dict(drawn.tensors)
    # Rows of no sequence hold NaN, and are not looked at.
    tensors[name] = tensors[name].astype(np.float64) + change
    attention, total = drawn.attention, 0.0
    for rows in drawn.sequences:
        made = compute_references(
            rows.of_queries(tensors["q"])[None].astype(np.float64),
            rows.of_keys(tensors["k"])[None].astype(np.float64),
            rows.of_keys(tensors["v"])[None].astype(np.float64),
            attention.scale,
            causal=attention.causal,
            window=attention.window,
            softcap=attention.softcap,
            sinks=tensors.get("sinks"),
        )
        do = rows.of_queries(tensors["do"]).astype(np.float64)
        total += float(np.nansum(do * made.o[0]))
        if "dlse" in tensors:
            lse, dlse = made.lse[0], rows.of_statistics(tensors["dlse"])
            total += float((dlse * lse)[np.isfinite(lse)].sum())
    return total


def test_gradients_of_merged_parts_add_up() -> None:
    """o and lse of all keys, k and v in two parts: dq is the sum, dk and dv lie side by side."""
    (case,) = tiny_cases(1, 3, inputs="random", lengths=(17, 33), mask="none", batch="dense",
                         more_keys=0, spare=0, dlse=True, dtype=DType.FP16)  # fmt: skip
    drawn, whole = drawn_and_expected(case)
    parts = []
    for keys in (slice(0, 20), slice(20, 33)):
        some = {name: drawn.tensors[name][:, keys] for name in ("k", "v")}
        sequences = tuple(
            Rows(rows.batch, rows.q, slice(0, keys.stop - keys.start)) for rows in drawn.sequences
        )
        parts.append(gradients_of(replace(drawn, tensors={**drawn.tensors, **some},
                                          sequences=sequences)))  # fmt: skip
    np.testing.assert_allclose(
        whole.exact["dq"], sum(part.exact["dq"] for part in parts), atol=1e-12
    )
    for name in ("dk", "dv"):
        joined = np.concatenate([part.exact[name] for part in parts], axis=1)
        np.testing.assert_allclose(whole.exact[name], joined, atol=1e-12)


def test_they_are_linear_in_do_and_dlse() -> None:
    """Powers of two change no bit but the exponent's."""
    for case in tiny_cases(6, 4, inputs="random", dlse=True):
        drawn, found = drawn_and_expected(case)
        # Rows of no sequence hold the largest numbers there are.
        with np.errstate(over="ignore"):
            more = {
                name: drawn.tensors[name] * drawn.tensors[name].dtype.type(8)
                for name in ("do", "dlse")
            }
        scaled = gradients_of(replace(drawn, tensors={**drawn.tensors, **more}))
        for name, exact in found.exact.items():
            np.testing.assert_array_equal(scaled.exact[name], 8 * exact)


def test_o_and_lse_of_more_keys_are_merged() -> None:
    """The more keys of a drawn problem lower P by what they take, so that all P sum to less."""
    (case,) = tiny_cases(1, 3, inputs="random", lengths=(17, 33), mask="none", batch="dense",
                         more_keys=77, spare=0, sinks=False, softcap=0.0)  # fmt: skip
    drawn, found = drawn_and_expected(case)
    alone = compute_references(*(drawn.tensors[name] for name in "qkv"), drawn.attention.scale)
    assert (drawn.exact_lse > alone.lse + 0.5).all()
    ones = dict(drawn.tensors)
    ones["do"] = np.ones_like(ones["do"])
    shares = gradients_of(replace(drawn, tensors=ones)).exact["dv"][..., 0].sum()
    expected = np.exp(alone.lse - drawn.exact_lse).sum()
    assert shares == pytest.approx(expected, rel=1e-9)
    assert all(np.isfinite(array).all() for array in found.exact.values())


def test_what_a_row_without_keys_holds_is_nowhere() -> None:
    """NaN in do and q of rows above a causal mask's first, and an LSE of -inf."""
    (case,) = tiny_cases(1, 8, inputs="random", lengths=(40, 17), mask="causal", batch="dense",
                         more_keys=0, spare=0, sinks=True, dlse=True)  # fmt: skip
    drawn, found = drawn_and_expected(case)
    assert np.isnan(drawn.tensors["do"][:, :23].astype(np.float32)).all()
    worse = {**drawn.tensors, "q": drawn.tensors["q"].copy()}
    worse["q"][:, :23] = math.nan
    again = gradients_of(replace(drawn, tensors=worse))
    for name, exact in found.exact.items():
        assert np.isfinite(exact).all()
        np.testing.assert_array_equal(again.exact[name], exact)
        np.testing.assert_array_equal(again.rounded[name], found.rounded[name])
    assert not any(tainted.any() for tainted in again.tainted.values())
    assert found.idle["dq"][:, :23].all()
    assert not found.exact["dq"][:, :23].any()
    assert not found.idle["dk"].any()


def test_nan_stays_in_its_sequence_and_group() -> None:
    (case,) = tiny_cases(1, 8, inputs="neighbours", lengths=(17, 33), mask="none",
                         batch="full lengths", heads="gqa", more_keys=0, sinks=False,
                         cut=0)  # fmt: skip
    drawn, found = drawn_and_expected(case)
    for i, rows in enumerate(drawn.sequences):
        spoilt = i % 2
        for name, part, group in (
            ("dq", rows.of_queries, 2), ("dk", rows.of_keys, 1), ("dv", rows.of_keys, 1)
        ):  # fmt: skip
            exact, tainted = part(found.exact[name]), part(found.tainted[name])
            bad = slice(spoilt * group, (spoilt + 1) * group)
            good = slice((1 - spoilt) * group, (2 - spoilt) * group)
            assert np.isnan(exact[:, bad]).all()
            assert np.isfinite(exact[:, good]).all()
            assert not tainted[:, good].any()
