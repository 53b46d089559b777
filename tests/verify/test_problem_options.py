"""What a problem's semantics leave open gets values, and proofs then compute these semantics."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.semantics import MASKS
from flashsmith.verify import Attention
from flashsmith.verify.forward_reference import semantics_of
from flashsmith.verify.problem_options import problem_options

FLAGS = [" ".join(words) for words in product(("", "softcap"), ("", "packed", "uneven"))]


def attention_of(call: dict[str, Any]) -> Attention:
    names = ("causal", "window", "softcap", "lens_q", "lens_k")
    return Attention(1.0, **{name: call[name] for name in names if name in call})


@pytest.mark.parametrize(("mask", "flags"), list(product(MASKS, FLAGS)))
def test_the_call_has_the_problems_meaning(mask: str, flags: str) -> None:
    problem = Problem.parse(f"b3 s100:90 h6:2 d40 fp16 {mask} {flags}")
    call = problem_options(problem, sinks=True, seed=5)
    meant, said = semantics_of(attention_of(call)), problem.semantics
    assert (meant.mask, meant.softcap, meant.packed) == (said.mask, said.softcap, said.packed)
    assert call["sinks"] is True
    assert call["window"] == ((45, 0) if mask == "window" else (None, None))
    assert call["softcap"] == (30.0 if said.softcap else 0.0)
    assert ("lens_q" in call) == ("lens_k" in call) == said.packed


def test_packed_sequences_are_of_unequal_lengths() -> None:
    problem = Problem.parse("b5 s300:90 d64 fp16 packed")
    calls = [problem_options(problem, seed=seed) for seed in (0, 0, 1)]
    assert calls[0] == calls[1] != calls[2]
    for call in calls:
        for lens, longest in ((call["lens_q"], 300), (call["lens_k"], 90)):
            assert len(lens) == 5
            assert max(lens) == longest
            assert min(lens) > 0
            assert len(set(lens)) > 2
    assert problem_options(Problem.parse("b2 s7:0 d64 fp16 packed"))["lens_k"] == (0, 0)


@pytest.mark.parametrize("window", [(40, 9), (None, 3), (20, None), (0, 0)])
def test_values_may_be_given(window: tuple[int | None, int | None]) -> None:
    problem = Problem.parse("s300 d64 fp16 window softcap")
    call = problem_options(problem, window=window, softcap=2.5)
    assert (call["window"], call["softcap"]) == (window, 2.5)


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        ("causal", {"window": (3, 0)}, "window=(3, 0): 'b1 s300 h1 d64 fp16 causal' has none"),
        ("window", {"window": (None, 0)}, "window=(None, 0): is the mask 'causal' and no window"),
        ("window", {"window": (None, None)}, "window=(None, None): is the mask 'none'"),
        ("window", {"window": (-1, 0)}, "window=(-1, 0): -1 is not a limit"),
        ("", {"softcap": 30.0}, "softcap=30.0: 'b1 s300 h1 d64 fp16' has none; add the word"),
        ("softcap", {"softcap": 0.0}, "softcap=0.0: caps nothing; give a number above 0"),
        ("softcap", {"softcap": -1.0}, "softcap=-1.0: give a finite number above 0"),
        ("softcap", {"softcap": float("nan")}, "softcap=nan: give a finite number above 0"),
        ("b0 packed", {}, "problem='b0 s300 h1 d64 fp16 packed uneven': packed, give at least one"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    words: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        problem_options(Problem.parse(f"s300 d64 fp16 {words}"), **values)
