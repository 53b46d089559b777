"""Contenders in turns: those whose output is right, in rounds that are measurements of their own.

A GPU's clock drifts by more than two kernels differ. So contenders take turns within a round,
ratios are taken of one round's times, and the rounds are pooled: their median, and the interval
around it.
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
# Of the longest round so far: a later one may take longer.
SLACK = 1.15
_T = TypeVar("_T")


@dataclass(frozen=True)
class Contender:
    """What takes turns with others. ``why_wrong`` computes its output, and says why that is wrong:
    '' where it is right."""

    name: str
    launch: Callable[[], Any]
    why_wrong: Callable[[], str]

    @classmethod
    def of(cls, implementation: KernelImplementation) -> Contender:
        """A kernel on its workload, which judges it."""
        judge = implementation.workload.judge
        return cls(
            implementation.name,
            implementation.launch,
            lambda: "; ".join(judge(implementation.output()).reasons),
        )


class Turns:
    """Contenders, each proven once, then timed round by round, another one first each time.

    ``wrong``: why those are wrong that are, by name; they have no times. ``right``: the others.
    """

    def __init__(self, contenders: Sequence[Contender], clock: Clock | None = None) -> None:
        found = {one.name: one.why_wrong() for one in contenders}
        self.wrong = {name: why for name, why in found.items() if why}
        self.right = [one for one in contenders if one.name not in self.wrong]
        self.done = 0
        self._clock = clock

    def round(self, protocol: Protocol) -> dict[str, Samples]:
        """One more round: the samples by name, in the order in which it began.

        Raises what ``measure`` does.
        """
        order = rotated(self.right, self.done)
        self.done += 1
        return measure(order, protocol, clock=self._clock)


def rotated(items: Sequence[_T], first: int) -> list[_T]:
    """The items from number ``first`` on, counted around, and then those before it."""
    place = first % max(1, len(items))
    return [*items[place:], *items[:place]]


def rounds_within(
    seconds: float, most: int | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Numbers of rounds, from 0, as long as another is likely to end in time, and ``most`` at most.

    The first round is always there, and tells nothing of the others: it builds, compiles and makes
    the tensors. A later one may take SLACK times the longest.
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
class Pooled:
    """A figure over rounds: their median, and the interval that holds the true median with at least
    95%, by order statistics. ``certain``: there is one; of fewer than six rounds the least and the
    most stand there."""

    median: float
    low: float
    high: float
    certain: bool

    @classmethod
    def of(cls, figures: Sequence[float]) -> Pooled:
        """Pools at least one figure."""
        ordered = sorted(figures)
        place = left_out(len(ordered))
        low, high = ordered[place or 0], ordered[-1 - (place or 0)]
        return cls(statistics.median(ordered), low, high, place is not None)

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        """The median, and the interval in brackets unless it is one value."""
        median, low, high = (format(it, form or ".3f") for it in (self.median, self.low, self.high))
        return median if self.low == self.high else f"{median} ({low} to {high})"


def left_out(count: int) -> int | None:
    """How many of so many ordered values lie outside the median's interval on either side; None
    where all of them are too few for one."""
    tail, outside = 0.0, None
    for place in range(count // 2):
        tail += math.comb(count, place) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside = place
    return outside
