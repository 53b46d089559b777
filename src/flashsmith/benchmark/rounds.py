"""Interleaved comparison of contenders: after a check of their outputs, contenders are timed in
independent rounds.

A GPU's clock drifts by more than the difference between two kernels. Contenders are therefore
interleaved within a round, and ratios use times of the same round. The rounds are then pooled into
a median and a confidence interval.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flashsmith.benchmark.implementations import KernelImplementation
from flashsmith.benchmark.timing import Clock, Protocol, Samples, measure

CONFIDENCE = 0.95
# A later round may take up to this factor times the longest round so far.
SLACK = 1.15
_T = TypeVar("_T")


@dataclass(frozen=True)
class Contender:
    """An implementation that is timed against others. ``why_wrong`` computes the output and returns
    why the output is wrong, '' if it is correct."""

    name: str
    launch: Callable[[], Any]
    why_wrong: Callable[[], str]

    @classmethod
    def of(cls, implementation: KernelImplementation) -> Contender:
        """A kernel as a contender; its workload checks the output."""
        check = implementation.workload.check
        return cls(
            implementation.name,
            implementation.launch,
            lambda: "; ".join(check(implementation.output()).reasons),
        )


class AlternatingRounds:
    """Contenders that are checked once and then timed in rounds, each round starting with the next
    contender.

    ``wrong`` maps the names of incorrect contenders, which are not timed, to the reason. ``right``
    lists the correct ones.
    """

    def __init__(self, contenders: Sequence[Contender], clock: Clock | None = None) -> None:
        found = {one.name: one.why_wrong() for one in contenders}
        self.wrong = {name: why for name, why in found.items() if why}
        self.right = [one for one in contenders if one.name not in self.wrong]
        self.done = 0
        self._clock = clock

    def round(self, protocol: Protocol) -> dict[str, Samples]:
        """Runs one more round and returns its samples by name, in the order of first launch.

        Raises any error that ``measure`` raises.
        """
        order = rotated(self.right, self.done)
        self.done += 1
        return measure(order, protocol, clock=self._clock)


def rotated(items: Sequence[_T], first: int) -> list[_T]:
    """The items from index ``first`` on, then the items before it; ``first`` wraps around."""
    place = first % max(1, len(items))
    return [*items[place:], *items[:place]]


def rounds_within(
    seconds: float, most: int | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Yields round numbers from 0 while another round is likely to end in time, up to ``most``
    rounds.

    The first round always runs. The first round's duration is not used as an estimate, because this
    round builds, compiles and makes the tensors. A later round is expected to take at most SLACK
    times the longest so far.
    """
    begin, longest, number = now(), 0.0, 0
    while most is None or number < most:
        started = now()
        if number and started - begin + SLACK * longest > seconds:
            return
        yield number
        if number:
            longest = max(longest, now() - started)
        number += 1


@dataclass(frozen=True)
class PooledFigure:
    """A figure pooled over rounds: the median, and an interval that holds the true median with at
    least 95% confidence.

    The interval comes from order statistics and needs six rounds. With fewer, ``certain`` is False,
    and ``low`` and ``high`` are the minimum and the maximum.
    """

    median: float
    low: float
    high: float
    certain: bool

    @classmethod
    def of(cls, figures: Sequence[float]) -> PooledFigure:
        """Pools one or more figures."""
        ordered = sorted(figures)
        place = left_out(len(ordered))
        low, high = ordered[place or 0], ordered[-1 - (place or 0)]
        return cls(statistics.median(ordered), low, high, place is not None)

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        """The median, followed by the interval in brackets unless both ends are equal."""
        median, low, high = (format(it, form or ".3f") for it in (self.median, self.low, self.high))
        return median if self.low == self.high else f"{median} ({low} to {high})"


def left_out(count: int) -> int | None:
    """The number of values below the median's interval among ``count`` ordered values, equal to the
    number above it; None if ``count`` is too small for an interval."""
    tail, outside = 0.0, None
    for place in range(count // 2):
        tail += math.comb(count, place) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside = place
    return outside
