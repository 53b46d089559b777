"""BackwardReference: options, drawn inputs, and proofs of a backward kernel."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backward_kernel import kernel_gradients

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem
from flashsmith.operations import BACKWARD
from flashsmith.runtime import OperationResult
from flashsmith.verify import backward_reference, reference_of
from flashsmith.verify.backward_reference import (
    BackwardReference,
    draw_backward_inputs,
    repeated_for_gradients,
    sequences_of,
)

# Any kernel: only what it is compiled for is asked of it.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
DENSE = Problem.parse("b2 s20:40 h4:2 d32 fp16 backward")
PACKED = Problem.parse("b3 s20:40 h4:2 d32 fp16 causal packed backward")
WINDOW = Problem.parse("b1 s40 h2 d32 fp16 window softcap backward")


@pytest.fixture
def reference() -> BackwardReference:
    found = reference_of(BACKWARD)
    assert isinstance(found, BackwardReference)
    return found


def draw(problem: Problem, kind: str = "random", **asked: Any) -> dict[str, np.ndarray]:
    options = BackwardReference().options(problem, **asked)
    return dict(draw_backward_inputs(problem, kind, 0, options).tensors)


def test_options_are_what_a_problem_leaves_open(reference: BackwardReference) -> None:
    assert reference.options(DENSE) == {}
    assert reference.options(WINDOW) == {"softcap": 30.0, "left": 20, "right": 0}
    diagonal = reference.options(WINDOW, window=(0, 0), softcap=5.0, sinks=True)
    assert diagonal == {"softcap": 5.0, "left": 0, "right": 0, "sinks": True}
    assert reference.options(WINDOW, right=3)["right"] == 3
    packed = reference.options(PACKED, seed=3, causal=True)
    assert set(packed) == {"lens_q", "lens_k"}
    assert max(packed["lens_q"]) == 20
    own = reference.options(PACKED, lens_q=(5, 30, 7), lens_k=(0, 9, 90), unneeded=("dq",))
    assert own == {"lens_q": (5, 30, 7), "lens_k": (0, 9, 90), "unneeded": ("dq",)}


@pytest.mark.parametrize(
    ("problem", "asked", "message"),
    [
        (DENSE, {"causal": True}, "causal=True: the mask of 'b2 s20:40 h4:2 d32 fp16 backward' is"),
        (DENSE, {"window": (3, 0)}, "window=(3, 0): 'b2 s20:40 h4:2 d32 fp16 backward' has none"),
        (DENSE, {"unneeded": ("o",)}, "unneeded='o': give some of dq, dk, dv, dsinks, but not all"),
        (DENSE, {"unneeded": ("dq", "dk", "dv")}, "unneeded='dq, dk, dv': give some of"),
    ],
)
def test_options_that_make_no_sense(problem: Problem, asked: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        BackwardReference().options(problem, **asked)


@pytest.mark.parametrize(
    ("sizes", "asked", "heads"),
    [
        ("b1 s48 h8:1 d40", {}, (24, 3)),
        ("b2 s511:1 h2:1 d32", {}, (128, 64)),
        ("b2 s511:1 h2:1 d32", {"unneeded": ("dk", "dv")}, (2, 1)),
        ("b2 s511:1 h2:1 d32", {"unneeded": ("dk",)}, (128, 64)),
        # 43 times 196,224 elements of dq would be more than 2^23.
        ("b2 s511:1 h6:1 d32", {}, (252, 42)),
        ("b1 s300000:1 h1 d32", {}, (1, 1)),
        ("b1 s1:100 h4:2 d32", {}, (128, 64)),
        ("b1 s128 h2 d32", {}, (2, 2)),
        ("b3 s40 h2 d32 packed", {"lens_q": (40, 40, 0), "lens_k": (0, 9, 7)}, (8, 8)),
        ("b1 s0:64 h2 d32", {}, (2, 2)),
        ("b1 s64:0 h2 d32", {}, (2, 2)),
    ],
)
def test_heads_are_repeated_until_there_is_enough_of_each_gradient(
    sizes: str, asked: Any, heads: tuple[int, int], reference: BackwardReference
) -> None:
    problem = Problem.parse(f"{sizes} fp16 backward")
    options = reference.options(problem, **asked)
    found = repeated_for_gradients(problem, options)
    assert (found.heads_q, found.heads_k) == heads
    assert replace(found, heads_q=problem.heads_q, heads_k=problem.heads_k) == problem


def test_the_meaning_is_said_in_words(reference: BackwardReference) -> None:
    assert reference.meaning(DENSE, {}) == "plain"
    options = reference.options(
        PACKED, lens_q=(5, 7), lens_k=(9, 3), sinks=True, dlse=True, scale=0.5, spare=4,
        more_keys=6, unneeded=("dv",), grad_dtype="float32", deterministic=True,
    )  # fmt: skip
    assert reference.meaning(PACKED, options) == (
        "causal, lens 5+7:9+3, scale 0.5, sinks, dlse, deterministic, 4 spare rows, 6 more keys, "
        "no dv, float32 gradients"
    )


@pytest.mark.parametrize("kind", BackwardReference.kinds)
@pytest.mark.parametrize("problem", [DENSE, PACKED])
def test_inputs_are_what_the_operation_takes(problem: Problem, kind: str) -> None:
    asked = {"lens_q": (5, 20, 0), "lens_k": (40, 3, 0)} if problem is PACKED else {}
    drawn = draw(problem, kind, sinks=True, dlse=True, spare=9 if asked else 0, **asked)
    packed = {"cu_seqlens_q", "cu_seqlens_k"} if problem is PACKED else set()
    assert set(drawn) == {"do", "q", "k", "v", "o", "lse", "dlse", "sinks"} | packed
    for tensor in BACKWARD.inputs:
        if tensor.name in drawn:
            array = drawn[tensor.name]
            assert str(array.dtype) == tensor.dtype_of(problem)
            assert len(array.shape) == len(tensor.dims_of(problem))
    if problem is PACKED:
        assert drawn["q"].shape[0] == 25 + 9
        assert drawn["k"].shape[0] == 43 + 9
        assert drawn["lse"].shape == (4, 34)


def test_drawn_o_and_lse_are_of_the_drawn_q_k_and_v() -> None:
    drawn = draw(DENSE)
    q, k, v = (drawn[name].astype(np.float64) for name in ("q", "k", "v"))
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(32)
    p = np.exp(scores - drawn["lse"][..., None])
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(np.einsum("bhqk,bkhd->bqhd", p, v), drawn["o"], atol=2e-3)


def test_rows_of_no_sequence_hold_the_worst() -> None:
    """Behind the last sequence, and in sequences that are longer than the longest that counts."""
    drawn = draw(PACKED, lens_q=(5, 26, 3), lens_k=(44, 3, 9), spare=2, dlse=True)
    sequences = sequences_of(PACKED, {"lens_q": (5, 26, 3), "lens_k": (44, 3, 9)})
    assert [rows.q for rows in sequences] == [slice(0, 5), slice(5, 25), slice(31, 34)]
    assert [rows.k for rows in sequences] == [slice(0, 40), slice(44, 47), slice(47, 56)]
    outside = [*range(25, 31), 34, 35]
    for name in ("do", "q", "o"):
        kinds = drawn[name][outside].astype(np.float32)[:, 0, 0]
        assert {str(value) for value in kinds} >= {"nan", "inf", "65504.0"}
    assert np.isnan(drawn["dlse"][:, outside]).all()
    keys = [*range(40, 44), 56, 57]
    assert not np.isfinite(drawn["k"][keys].astype(np.float32)).all()


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ArgumentError, match="inputs='huge': allowed are random, large_scores"):
        draw(DENSE, "huge")


# --- proofs --------------------------------------------------------------------------------------


def _modelled(case: Any, problem: Problem, mutant: str, asked: dict[str, Any]) -> dict[str, Any]:
    """run_operation with a model of a kernel in its place."""
    seen: dict[str, Any] = {}

    def run(cfg: Any, ran: Problem, tensors: Any, **how: Any) -> OperationResult:
        seen.update(how, tensors=tensors)
        assert ran == case.problem
        fp32 = how["options"].get("grad_dtype") == "float32"
        found = kernel_gradients(asked["drawn"], ran, fp32=fp32, mutant=mutant)
        kept = {name: it for name, it in found.items() if name not in how["unwanted"]}
        return OperationResult(kept, None, None)

    seen["run"] = run
    return seen


@pytest.mark.parametrize(
    ("problem", "asked"),
    [
        (DENSE, {"sinks": True, "dlse": True}),
        (PACKED, {"lens_q": (5, 20, 0), "lens_k": (40, 3, 0), "spare": 3, "unneeded": ("dq",)}),
        (WINDOW, {"grad_dtype": "float32", "more_keys": 9, "scale": 0.3}),
    ],
)
@pytest.mark.parametrize("mutant", ["", "scores scaled twice"])
def test_a_proof_runs_a_kernel_and_judges_it(
    reference: BackwardReference,
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    asked: dict[str, Any],
    mutant: str,
) -> None:
    options = reference.options(problem, **asked)
    case = reference.case(CFG, problem, kind="random", seed=4, options=options)
    assert case.problem.semantics.uneven
    assert case.problem.heads_q % problem.heads_q == 0
    drawn = draw_backward_inputs(
        replace(case.problem, semantics=problem.semantics), "random", 4, options
    )
    seen = _modelled(case, problem, mutant, {"drawn": drawn})
    monkeypatch.setattr(backward_reference, "run_operation", seen["run"])
    result = reference.run(CFG, case, lambda array: array, emulate=True)
    assert seen["poisoned"]
    assert seen["emulate"]
    assert set(seen["options"]) <= set(BACKWARD.options)
    assert seen["wanted"] == (("dsinks",) if "sinks" in asked else ())
    assert seen["unwanted"] == list(asked.get("unneeded", ()))
    found = reference.compare(CFG, case, result.outputs)
    assert found.ok == (not mutant), found.reasons
    if "unneeded" in asked:
        assert found.outputs == sum(case.inputs[name].size for name in ("k", "v"))


def test_a_case_is_drawn_once_for_a_set_of_configs(reference: BackwardReference) -> None:
    first, second = (
        reference.case(CFG, DENSE, kind="random", seed=1, options={}) for _ in range(2)
    )
    assert first.expected is second.expected
    assert not first.inputs["q"].flags.writeable


def test_what_is_expected_of_given_tensors(reference: BackwardReference) -> None:
    """As the benchmark has it, of whatever a caller drew; o and lse are computed in float64."""
    inputs = reference.draw(DENSE, "random", 0)
    found = reference.expected(DENSE, inputs, {})
    case = reference.case(CFG, replace(DENSE, heads_q=4, heads_k=2), kind="random", seed=0,
                          options={})  # fmt: skip
    assert case.problem.heads_q == 4, "no heads were added"
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(found.exact[name], case.expected.exact[name])
    inputs["o"] = inputs["o"] * np.float16(2)
    given = reference.expected(DENSE, inputs, {"more_keys": 1})
    assert np.abs(given.exact["dq"] - found.exact["dq"]).max() > 0.01
