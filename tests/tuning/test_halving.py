"""Successive halving: what it keeps, and that noise does not throw out the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.errors import ArgumentError
from flashsmith.tuning.race import Halving, Rung

PLAN = Halving((Rung(1, 0.0, 0.10), Rung(3, 0.0, 0.04)), eta=3, finalists=2)


def by_name(*times: float) -> dict[str, float]:
    return {f"k{number}": time for number, time in enumerate(times)}


def test_a_third_goes_on() -> None:
    times = by_name(*(1 + n / 2 for n in range(9)))
    assert PLAN.survivors(times, 0.1) == ["k0", "k1", "k2"]


def test_as_many_as_the_final_takes_go_on() -> None:
    assert PLAN.survivors(by_name(1.0, 5.0, 6.0), 0.1) == ["k0", "k1"]


def test_of_few_the_first_rung_goes_before_the_final() -> None:
    few = PLAN.of_few()
    assert (few.rungs, few.finalists) == (PLAN.rungs[:1], PLAN.finalists)
    assert few.final_of(by_name(1.0, 1.09, 1.11)) == ["k0", "k1"]


def test_all_near_the_best_go_on() -> None:
    times = by_name(1.0, 1.05, 1.1, 1.1001, 9.0, 9.0)
    assert PLAN.survivors(times, 0.1) == ["k0", "k1", "k2"]


def test_the_final_takes_those_that_may_still_win() -> None:
    assert PLAN.final_of(by_name(1.03, 1.0, 1.02, 1.5)) == ["k1", "k2"]
    assert PLAN.final_of(by_name(1.5, 1.0)) == ["k1"]


def test_equal_times_are_ordered_by_name() -> None:
    assert PLAN.final_of({"b": 1.0, "c": 1.0, "a": 1.0}) == ["a", "b"]


def test_without_times_none_go_on() -> None:
    assert PLAN.survivors({}, 0.1) == PLAN.final_of({}) == []


@given(st.lists(st.floats(0.5, 50.0), min_size=1, max_size=60), st.randoms())
def test_noise_within_half_the_margin_never_throws_out_the_best(truth, draw) -> None:
    best = min(range(len(truth)), key=truth.__getitem__)
    for rung in PLAN.rungs:
        noise = rung.margin / 2.1
        times = by_name(*(time * (1 + draw.uniform(-noise, noise)) for time in truth))
        assert f"k{best}" in PLAN.survivors(times, rung.margin)


@given(st.lists(st.floats(0.5, 50.0), max_size=60))
def test_survivors_are_a_beginning_of_the_ranking(times) -> None:
    kept = PLAN.survivors(by_name(*times), 0.1)
    ranked = sorted(by_name(*times), key=lambda name: (by_name(*times)[name], name))
    assert kept == ranked[: len(kept)]


@pytest.mark.parametrize(
    "change", [{"rungs": ()}, {"eta": 1}, {"finalists": 0}, {"final_least": 0}]
)
def test_rules_that_make_no_race(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=r"^halving="):
        Halving(**change)  # type: ignore[arg-type]
