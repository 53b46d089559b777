"""Sums of the gradients of scores, proven in the emulator with all checks on."""

from __future__ import annotations

import numpy as np
import pytest
from plain_run import full_except
from program_calls import bound
from score_sums_calls import run_drawn_sums, wrong_sums

from flashsmith.operations.score_sums import AXES
from flashsmith.semantics.program import SCORE, H, program_of
from flashsmith.semantics.typed import read

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        *(("dense", axis) for axis in AXES),
        ("packed causal", "rows"),
        *(pytest.param("packed causal", axis, marks=FULL) for axis in AXES[1:]),
        *(pytest.param(name, axis, marks=FULL) for name in ("window", "softcap") for axis in AXES),
    ],
)
def test_every_axis_and_kind_of_call(name: str, axis: str) -> None:
    assert wrong_sums(name, "alibi_in_documents", axis) == ""


@pytest.mark.full
@pytest.mark.parametrize("axis", ["rows", "distances"])
@pytest.mark.parametrize("program", ["capped", "everything"])
def test_other_programs(program: str, axis: str) -> None:
    assert wrong_sums("dense", program, axis) == ""


@pytest.mark.parametrize("sizes", [(1, 4), (2, 1), (1, 1)])
def test_elements_summed_over_sequences_and_heads(sizes: tuple[int, int]) -> None:
    assert wrong_sums("dense", "alibi_in_documents", "elements", (*sizes, 150, 201)) == ""


@pytest.mark.full
def test_scores_of_minus_infinity() -> None:
    """Where P is 0, the slope may be infinite."""
    assert wrong_sums("dense", "minus_infinity", "keys", sinks=False) == ""


@pytest.mark.parametrize("axis", full_except(AXES, "keys"))
def test_bits_are_the_same_in_every_schedule(axis: str) -> None:
    first, *others = (
        run_drawn_sums("packed causal", "alibi_in_documents", axis, schedule_seed=seed)
        for seed in (None, 1, 2)
    )
    for other in others:
        np.testing.assert_array_equal(other.outputs["sums"], first.outputs["sums"])


def test_a_slope_of_its_own_makes_another_program() -> None:
    score = SCORE + read("slopes", "float32", H)
    plain = bound(score, None, slopes=None).program
    assert program_of(score, None).program is plain
    other = program_of(score, None, score).program
    assert other != plain
    assert other.own_slope is not None
    assert plain.own_slope is None
