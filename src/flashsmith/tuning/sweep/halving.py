"""Successive halving: short measurements thin the field, longer ones compare what is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flashsmith.errors import ArgumentError


@dataclass(frozen=True)
class Rung:
    """One round: launches a kernel is timed with, and how near the best (as a share of its time)
    keeps a kernel in the race whatever its place."""

    runs: int
    margin: float


@dataclass(frozen=True)
class Halving:
    """The plan of a race.

    Every rung keeps 1/eta of the field, at least `finalists`, and whoever is within its margin.
    Then at most `finalists` kernels that are within the last rung's margin are timed interleaved,
    `final_runs` launches each.

    The margins are several times the spread of so few launches, so that noise cannot throw out the
    best: on an H200 a median of three repeats within 3%, one of ten within 1%.
    """

    rungs: tuple[Rung, ...] = (Rung(3, 0.10), Rung(10, 0.04))
    eta: int = 3
    finalists: int = 6
    final_runs: int = 30

    def __post_init__(self) -> None:
        if not self.rungs or self.eta < 2 or self.finalists < 1 or self.final_runs < 1:
            raise ArgumentError(
                f"halving={self}: give at least one rung, eta from 2, finalists and final_runs "
                "from 1"
            )

    def survivors(self, rung: int, times: Mapping[str, float], field: Collection[str]) -> list[str]:
        """Who goes on after `rung`, fastest first.

        `times` has milliseconds by name, of all who ran; `field` names those still in the race
        (one may have failed since). Equal times are ordered by name.
        """
        ranked = sorted((name for name in field if name in times), key=lambda n: (times[n], n))
        if not ranked:
            return []
        limit = times[ranked[0]] * (1 + self.rungs[rung].margin)
        kept = max(-(-len(ranked) // self.eta), self.finalists)
        return [name for place, name in enumerate(ranked) if place < kept or times[name] <= limit]

    def final_field(self, times: Mapping[str, float], field: Collection[str]) -> list[str]:
        """Who is timed against whom in the end, fastest first: all who could still be the best."""
        ranked = sorted((name for name in field if name in times), key=lambda n: (times[n], n))
        if not ranked:
            return []
        limit = times[ranked[0]] * (1 + self.rungs[-1].margin)
        return [name for name in ranked if times[name] <= limit][: self.finalists]


DEFAULT_HALVING = Halving()
