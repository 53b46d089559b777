"""OperationReference and the rule for outputs by name: what attention gives as any operation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem, Semantics
from flashsmith.operations import FORWARD, OPERATIONS, Operation, TensorSpec
from flashsmith.runtime import run_operation
from flashsmith.verify import ExpectedOutputs, OperationReference, prove, reference_of
from flashsmith.verify.tolerance import compare_tensors

# What test_forward_semantics.py has, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
for _words in ("plain", "causal+uneven"):
    shared_kernels.want([CFG], Semantics.parse(_words))
PROBLEM = Problem.parse("b1 s64 h4 d64 fp16")


@pytest.fixture(scope="module")
def checked() -> tuple[ExpectedOutputs, dict[str, np.ndarray]]:
    """What is right for drawn q, k and v, and what a kernel makes of them."""
    reference = reference_of(FORWARD)
    inputs = OperationReference.draw(reference, PROBLEM, "random", 3)
    assert {name: array.shape for name, array in inputs.items()} == {
        "q": (1, 64, 4, 64), "k": (1, 64, 4, 64), "v": (1, 64, 4, 64),
    }  # fmt: skip
    outputs = run_operation(CFG, PROBLEM, inputs, wanted=("lse", "row_max")).outputs
    return reference.expected(PROBLEM, inputs, {}), outputs


def test_outputs_by_name_are_judged_by_the_rule_for_o(checked: tuple[Any, Any]) -> None:
    expected, outputs = checked
    found = compare_tensors(DType.FP16, outputs, expected)
    assert found.ok, found.reasons
    assert found.outputs == 64 * 4 * 64 + 2 * 4 * 64
    assert 0 < found.max_error <= found.bound
    assert (found.mismatches, found.first_mismatch) == (0, None)


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("o", (0, 5, 2, 7), 4.0, "o: largest error"),
        ("lse", (0, 3, 9), np.nan, "lse: NaN or inf differ in 1 elements"),
        ("row_max", (0, 1, 1), 9.0, "row_max: largest error"),
    ],
)
def test_the_output_that_is_wrong_is_named_and_located(
    checked: tuple[Any, Any], name: str, place: tuple[int, ...], value: float, said: str
) -> None:
    expected, outputs = checked
    wrong = outputs[name].copy()
    wrong[place] = value
    found = compare_tensors(DType.FP16, {**outputs, name: wrong}, expected)
    assert found.reasons[0].startswith(said)
    assert found.mismatches == 1
    where = f"{name}[{', '.join(map(str, place))}]: got {value:.6g}, expected "
    assert str(found.first_mismatch).startswith(where)


def test_whole_numbers_must_be_equal() -> None:
    right = np.arange(6).reshape(2, 3)
    expected = ExpectedOutputs({"count": right}, {"count": right})
    assert compare_tensors(DType.FP16, {"count": right.astype(np.int32)}, expected).ok
    off = right.astype(np.int32)
    off[1, 2] += 1
    found = compare_tensors(DType.FP16, {"count": off}, expected)
    assert (found.reasons, found.mismatches) == (("1 numbers differ",), 1)
    assert str(found.first_mismatch) == "count[1, 2]: got 6, expected 5"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [({}, "x: is missing; the reference expects (3,)"),
     ({"x": np.zeros(2, np.float32)}, "x: has shape (2,); the reference expects (3,)")],
)  # fmt: skip
def test_outputs_that_cannot_be_judged_are_refused(
    outputs: dict[str, np.ndarray], message: str
) -> None:
    expected = ExpectedOutputs({"x": np.zeros(3)}, {"x": np.zeros(3)})
    with pytest.raises(ArgumentError, match=re.escape(message)):
        compare_tensors(DType.FP16, outputs, expected)


def test_a_problem_is_proven_as_by_its_keywords() -> None:
    by_problem = prove(CFG, Problem.parse("b1 s70 h3 d64 fp16 causal"), seed=2)
    by_words = prove(CFG, seq=70, heads=3, causal=True, seed=2)
    assert by_problem == by_words
    assert by_problem.meaning == "causal"


def test_inputs_of_whole_numbers_are_not_made_up() -> None:
    OPERATIONS["counted"] = Operation(
        name="counted",
        tensors=(TensorSpec("x", ("d",), role="out"), TensorSpec("n", ("batch",), "int32")),
        numbers=lambda call: (),
        flop=lambda problem: 1,
    )
    try:
        problem = Problem.parse("s1 d8 fp16 counted")
        with pytest.raises(ArgumentError, match="n: the meaning of its numbers is unknown"):
            OperationReference.draw(reference_of(FORWARD), problem, "random", 0)
        with pytest.raises(ArgumentError, match="reference of the operation counted: ''"):
            reference_of(problem.computed)
    finally:
        del OPERATIONS["counted"]
