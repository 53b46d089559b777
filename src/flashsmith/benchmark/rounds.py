"""Compares contenders in rounds: checks their outputs, then times them in independent rounds.

The clock of a GPU drifts by more than the difference between two kernels. The contenders are
therefore interleaved within a round, and ratios are taken between times of the same round. The
rounds are pooled into a median with a confidence interval.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flashsmith.benchmark.implementations import KernelImplementation
from flashsmith.benchmark.timing import Clock, Protocol, Samples, measure

CONFIDENCE = 0.95
# The maximum time that a later round is expected to take, relative to the longest round so far.
SLACK = 1.15
_T = TypeVar("_T")


@dataclass(frozen=True)
class Contender:
    """An implementation that is timed together with others.

    ``why_wrong`` runs the implementation and returns why its output is wrong; '' if the output is
    correct.
    """

    name: str
    launch: Callable[[], Any]
    why_wrong: Callable[[], str]

    @classmethod
    def of(cls, implementation: KernelImplementation) -> Contender:
        """A contender made from a kernel's implementation; the implementation's workload checks the
        output."""
        check = implementation.workload.check
        return cls(
            implementation.name,
            implementation.launch,
            lambda: "; ".join(check(implementation.output()).reasons),
        )


class AlternatingRounds:
    """Contenders that are checked once and then timed in rounds.

    Each round begins with a different contender.

    ``wrong`` maps the names of contenders that are wrong to the reason; they are not timed.
    ``right`` are the contenders that are correct.
    """

    def __init__(self, contenders: Sequence[Contender], clock: Clock | None = None) -> None:
        found = {one.name: one.why_wrong() for one in contenders}
        self.wrong = {name: why for name, why in found.items() if why}
        self.right = [one for one in contenders if one.name not in self.wrong]
        self.done = 0
        self._clock = clock

    def round(self, protocol: Protocol) -> dict[str, Samples]:
        """Runs another round. Returns the samples of each contender by name, in the order of the
        first launches.

        Raises any error that ``measure`` raises.
        """
        order = rotated(self.right, self.done)
        self.done += 1
        return measure(order, protocol, clock=self._clock)

    def times_ms(self, protocol: Protocol, rounds: int) -> Iterator[dict[str, float]]:
        """Runs this many rounds; yields each round's median milliseconds by name."""
        for _ in range(rounds):
            yield {name: samples.median_ms for name, samples in self.round(protocol).items()}


def ratios_to(base: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, PooledFigure]:
    """For each contender other than ``base``: its time divided by the time of ``base`` in the same
    round, pooled over the rounds."""
    others = dict.fromkeys(name for times in rounds for name in times if name != base)
    return {
        name: PooledFigure.of([times[name] / times[base] for times in rounds]) for name in others
    }


def rotated(items: Sequence[_T], first: int) -> list[_T]:
    """The items from index ``first`` on, followed by those before it; ``first`` is taken modulo the
    length."""
    place = first % max(1, len(items))
    return [*items[place:], *items[:place]]


def rounds_within(
    seconds: float, most: int | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Yields the numbers 0, 1, ... of rounds, at most ``most``, as long as the next round is likely
    to end in time.

    At least one round always runs. The duration of the first round says nothing about later rounds,
    because that round also builds kernels and makes the tensors. A later round is expected to take
    at most SLACK times as long as the longest one so far.
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
    """A figure from several rounds: the median, and an interval that contains the true median with
    at least 95% confidence.

    The interval is given by order statistics, which need six rounds. With fewer rounds, ``certain``
    is False, and ``low`` and ``high`` are the minimum and the maximum.
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
        """The median; if the ends of the interval differ, the interval follows in brackets."""
        median, low, high = (format(it, form or ".3f") for it in (self.median, self.low, self.high))
        return median if self.low == self.high else f"{median} ({low} to {high})"


def left_out(count: int) -> int | None:
    """Returns how many of ``count`` ordered values are below the interval for the median; equally
    many are above it. None if ``count`` is too small for an interval."""
    tail, outside = 0.0, None
    for place in range(count // 2):
        tail += math.comb(count, place) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside = place
    return outside
