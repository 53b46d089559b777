"""The operation backward: its tensors, numbers, FLOP and bytes, and its word in problems' texts."""

from __future__ import annotations

from typing import Any

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations import BACKWARD, FORWARD, Call, operation

DENSE = Problem.parse("b2 s64:128 h8:2 d64 fp16 backward")
PACKED = Problem.parse("b2 s64:128 h8:2 d64 bf16 causal packed backward")
UNLIMITED = 2**30


def test_its_word_stands_in_texts() -> None:
    assert (str(DENSE), DENSE.computed) == ("b2 s64:128 h8:2 d64 fp16 backward", BACKWARD)
    assert PACKED.kind == "backward+causal+packed+uneven"
    assert Problem.parse(str(PACKED)) == PACKED
    assert operation("backward") is BACKWARD


@pytest.mark.parametrize("problem", [DENSE, PACKED])
def test_gradients_have_the_shapes_of_what_they_are_of(problem: Problem) -> None:
    shapes = {t.name: BACKWARD.shape(t, problem) for t in BACKWARD.tensors}
    assert shapes["q"] == shapes["do"] == shapes["o"] == shapes["dq"]
    assert shapes["k"] == shapes["v"] == shapes["dk"] == shapes["dv"]
    assert shapes["sinks"] == shapes["dsinks"] == (8,)
    assert shapes["lse"] == shapes["dlse"]
    packed = problem.semantics.packed
    assert shapes["lse"] == ((8, 128) if packed else (2, 8, 64))
    assert shapes["dk"] == ((256, 2, 64) if packed else (2, 128, 2, 64))
    # do, q, o and dq; k, v, dk and dv; lse; the offsets of packed sequences.
    assert BACKWARD.bytes(problem) == 2 * 4 * (65536 + 32768) + 4 * 1024 + packed * 24


def test_gradients_are_of_the_inputs_dtype_or_fp32() -> None:
    (dq,) = (t for t in BACKWARD.tensors if t.name == "dq")
    assert dq.dtype_of(DENSE) == "float16"
    assert dq.dtype_of(PACKED, {"grad_dtype": None}) == "bfloat16"
    assert dq.dtype_of(PACKED, {"grad_dtype": "float32"}) == "float32"


@pytest.mark.parametrize("words", ["", "causal", "window", "causal packed"])
def test_flop_are_those_of_five_products(words: str) -> None:
    problem = Problem.parse(f"b2 s4096 h8:2 d64 fp16 {words}")
    backward = Problem.parse(f"{problem} backward")
    assert 2 * backward.attn_flop() == 5 * FORWARD.flop(problem)
    assert Problem.parse("b3 s512:64 h4 d32 fp16 backward").attn_flop() == 10 * 12 * 512 * 64 * 32


def _call(problem: Problem, strides: dict[str, tuple[int, ...]], **options: Any) -> Call:
    sizes = {"total_q": 100, "total_k": 230} if problem.semantics.packed else {}
    return Call(problem, strides, sizes, {**BACKWARD.options, **options})


def test_numbers_of_a_dense_call() -> None:
    strided = dict.fromkeys(("q", "k", "v", "o", "dq", "dk", "dv"), (4096, 64, 8, 1))
    strides = {**strided, "do": (0, 0, 64, 1), "lse": (512, 64, 1), "dlse": (7, 0, 1)}
    assert BACKWARD.numbers(_call(DENSE, strides)) == (
        *(2, 64, 128, 8, 2, 64, 64, 0, 0),
        *(0, 0, 64, *(4096, 64, 8) * 7, 512, 64, 7, 0),
        *(0.125, 0.0, UNLIMITED, UNLIMITED, 0),
    )


def test_numbers_of_a_packed_call_that_lacks_some_tensors() -> None:
    strides = dict.fromkeys(("do", "q", "k", "v", "o", "dv"), (512, 64, 1))
    call = _call(PACKED, strides | {"lse": (100, 1)}, scale=2.0, softcap=3.0, grad_dtype="float32")
    assert BACKWARD.numbers(call) == (
        *(2, 64, 128, 8, 2, 64, 64, 100, 230),
        *(*(0, 512, 64) * 5, *(0, 0, 0) * 2, 0, 512, 64, 0, 100, 0, 0),
        *(2.0, 3.0, UNLIMITED, 0, 1),
    )


def test_a_window_needs_its_limits() -> None:
    strides = dict.fromkeys(("lse",), (1,))
    window = Problem.parse("s64 d64 fp16 window backward")
    numbers = BACKWARD.numbers(_call(window, strides, left=5))
    assert numbers[-3:] == (5, UNLIMITED, 0)
    with pytest.raises(ArgumentError, match="left=None, right=None: give the limits of a window"):
        BACKWARD.numbers(_call(window, strides))
    with pytest.raises(ArgumentError, match="grad_dtype='float16': give 'float32', or None"):
        BACKWARD.numbers(_call(DENSE, strides, grad_dtype="float16"))
