"""Contenders in turns: what is wrong has no time, rounds begin with another, and are pooled."""

from __future__ import annotations

from typing import Any

import pytest
from stand_ins import PretendedClock

from flashsmith.benchmark.rounds import (
    AlternatingRounds,
    Contender,
    PooledFigure,
    left_out,
    ratios_to,
    rotated,
    rounds_within,
)
from flashsmith.benchmark.timing import Protocol

ONCE = Protocol(num_warmups=0, runs=1, warmup_ms=0, measure_ms=0, num_estimates=1)


def contender(clock: PretendedClock, name: str, ms: float, why: str = "") -> Contender:
    def why_wrong() -> str:
        clock.log.append(f"prove {name}")
        return why

    return Contender(name, lambda: clock.work(name, ms), why_wrong)


def test_what_is_wrong_is_proven_and_never_timed() -> None:
    clock = PretendedClock()
    turns = AlternatingRounds(
        [contender(clock, "a", 1.0), contender(clock, "b", 0.5, "NaN")], clock
    )
    assert turns.wrong == {"b": "NaN"}
    samples = turns.round(ONCE)
    assert {name: it.median_ms for name, it in samples.items()} == {"a": pytest.approx(1.0)}
    assert clock.log[:2] == ["prove a", "prove b"]
    assert "b" not in clock.log


def test_all_wrong_is_no_round() -> None:
    clock = PretendedClock()
    assert AlternatingRounds([contender(clock, "a", 1.0, "NaN")], clock).round(ONCE) == {}


def test_each_round_begins_with_another() -> None:
    clock = PretendedClock()
    turns = AlternatingRounds([contender(clock, name, 1.0) for name in "abc"], clock)
    assert [next(iter(turns.round(ONCE))) for _ in range(4)] == ["a", "b", "c", "a"]
    assert rotated([], 3) == []
    assert rotated("abc", 4) == ["b", "c", "a"]


def test_ratios_are_taken_within_a_round() -> None:
    clock = PretendedClock()
    turns = AlternatingRounds([contender(clock, "a", 2.0), contender(clock, "b", 1.0)], clock)
    rounds = list(turns.times_ms(ONCE, 3))
    assert [list(times) for times in rounds] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert rounds[0] == {"a": pytest.approx(2.0), "b": pytest.approx(1.0)}
    drifting = [{"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 2.0}, {"a": 8.0, "b": 2.0}]
    assert ratios_to("a", drifting) == {"b": PooledFigure(0.5, 0.25, 0.5, False)}
    assert ratios_to("a", []) == {}


def test_rounds_end_before_the_time_is_over() -> None:
    spent = [0.0]

    def run(seconds: float, most: int | None = None) -> list[int]:
        spent[0] = 0.0
        done = []
        for number in rounds_within(seconds, most, lambda: spent[0]):
            done.append(number)
            spent[0] += 30.0 if number == 0 else 10.0  # the first builds
        return done

    assert run(0) == [0]
    # No later round has been seen yet: the second is tried, the third would need 11.5 s more.
    assert run(51.4) == [0, 1]
    assert run(51.6) == [0, 1, 2]
    assert run(1e9, most=4) == [0, 1, 2, 3]
    assert run(1e9, most=0) == []


@pytest.mark.parametrize(
    ("count", "interval", "certain"),
    [(1, (0, 0), False), (5, (0, 4), False), (6, (0, 5), True), (9, (1, 7), True),
     (20, (5, 14), True)],
)  # fmt: skip
def test_intervals_hold_the_median_with_the_confidence(
    count: int, interval: Any, certain: bool
) -> None:
    pooled = PooledFigure.of(range(count)[::-1])
    assert ((pooled.low, pooled.high), pooled.certain) == (interval, certain)
    assert (left_out(count) is not None) == certain


def test_a_pooled_figure_in_words() -> None:
    assert str(PooledFigure.of([1.0, 1.25])) == "1.125 (1.000 to 1.250)"
    assert f"{PooledFigure.of([1.0, 1.0]):.4f}" == "1.0000"
