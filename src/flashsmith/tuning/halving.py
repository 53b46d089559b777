"""Successive halving: short measurements thin the field, longer ones compare what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashsmith.errors import ArgumentError

#: What is timed steadily comes after so long of the same work: the power of a busy GPU settles its
#: clock, milliseconds.
STEADY_WARMUP_MS = 100.0


@dataclass(frozen=True)
class Rung:
    """One round: a kernel is launched at least `least` times, and for `ms` milliseconds in all.

    Short kernels are launched more often, since what disturbs them does not shrink with them.
    margin: how near the best, as a share of its time, keeps a kernel in the race whatever its
    place. steady: whether the GPU is warmed up first. Without, whoever comes after a pause is timed
    at a clock up to a quarter higher.
    """

    least: int
    ms: float
    margin: float
    steady: bool = False


@dataclass(frozen=True)
class Halving:
    """The plan of a race.

    Every rung keeps 1/eta of the field, at least `finalists`, and whoever is within its margin.
    Then at most `finalists` kernels that are within the last rung's margin take turns for
    `final_ms` each, at least `final_least` launches. A long problem is only tried with what is
    within `entry_margin` of the best on a shorter one like it, or among the first 1/eta there.
    `leaders`: of how many the neighbours are tried.

    The margins are several times the spread of so few launches, so that noise cannot throw out the
    best.
    """

    rungs: tuple[Rung, ...] = (Rung(1, 5.0, 0.15), Rung(3, 40.0, 0.06, True))
    eta: int = 3
    finalists: int = 6
    final_least: int = 10
    final_ms: float = 200.0
    entry_margin: float = 0.15
    leaders: int = 3

    def __post_init__(self) -> None:
        if not self.rungs or self.eta < 2 or self.finalists < 1 or self.final_least < 1:
            raise ArgumentError(
                f"halving={self}: give at least one rung, eta from 2, finalists and final_least "
                "from 1"
            )

    def survivors(self, times: Mapping[str, float], margin: float) -> list[str]:
        """Who goes on, fastest first, of those with `times` (milliseconds by name).

        Equal times are ordered by name.
        """
        ranked = _ranked(times)
        kept = max(-(-len(ranked) // self.eta), self.finalists)
        near = _near_the_best(times, ranked, margin)
        return [name for place, name in enumerate(ranked) if place < kept or name in near]

    def final_field(self, times: Mapping[str, float]) -> list[str]:
        """Who takes turns in the end, fastest first: all who could still be the best."""
        ranked = _ranked(times)
        near = _near_the_best(times, ranked, self.rungs[-1].margin)
        return [name for name in ranked if name in near][: self.finalists]


def _ranked(times: Mapping[str, float]) -> list[str]:
    return sorted(times, key=lambda name: (times[name], name))


def _near_the_best(times: Mapping[str, float], ranked: list[str], margin: float) -> set[str]:
    limit = times[ranked[0]] * (1 + margin) if ranked else 0.0
    return {name for name in ranked if times[name] <= limit}


DEFAULT_HALVING = Halving()
