"""Entry: what was measured for one cell of the table, best config first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashsmith.chooser.winners.key import WinnerKey, is_name
from flashsmith.families import Problem
from flashsmith.printable import quoted

# Of a time in milliseconds and of TFLOP/s: wider than anything that was ever measured, and narrow
# enough for every product and ratio of them.
SMALLEST, LARGEST = 1e-12, 1e12
# Several times what any config's name has.
MOST_CHARACTERS = 1000
MOST_CHARACTERS_OF_A_TIME = 100


def time_of(environment: Mapping[str, Any]) -> str:
    """When an environment's figures were measured; '' when it does not say so in a short text."""
    time = environment.get("time")
    return time if is_name(time, MOST_CHARACTERS_OF_A_TIME) else ""


@dataclass(frozen=True)
class Ranked:
    """One config's measured time.

    family: which kernels the config belongs to; config: its short form; ms: the median time;
    tflops: the problem's attn_flop() over it; environment: where and when it was measured, with
    'time' in ISO 8601.

    Raises:
        ValueError: a field has another type, a name is not printable or has more than
            MOST_CHARACTERS, or a figure is not from SMALLEST to LARGEST.
    """

    family: str
    config: str
    ms: float
    tflops: float
    environment: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("family", "config"):
            if not is_name(getattr(self, name), MOST_CHARACTERS):
                raise ValueError(f"{name} is {quoted(getattr(self, name), 80)}, not a name")
        for name in ("ms", "tflops"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {quoted(value, 80)}, not a number")
            # Not NaN either, which compares to nothing.
            if not SMALLEST <= value <= LARGEST:
                raise ValueError(
                    f"{name} is {quoted(value, 80)}; it is finite and above 0, from {SMALLEST:g} "
                    f"to {LARGEST:g}"
                )
        if not isinstance(self.environment, Mapping):
            raise ValueError(f"environment is {quoted(self.environment, 80)}, not a mapping")

    @property
    def time(self) -> str:
        """When it was measured, ISO 8601; '' when that is not known."""
        return time_of(self.environment)


@dataclass(frozen=True)
class Entry:
    """One measured problem and its configs, fastest first, at least one.

    A key is a bucket of many problems. Times are of one of them, so it stands here as it is.
    """

    key: WinnerKey
    problem: Problem
    ranked: tuple[Ranked, ...]

    def __post_init__(self) -> None:
        if not self.ranked:
            raise ValueError("ranked is empty; an entry has at least one config")

    @property
    def best(self) -> Ranked:
        """The fastest config."""
        return self.ranked[0]

    @property
    def time(self) -> str:
        """When the newest of its figures was measured."""
        return max(one.time for one in self.ranked)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """seq_q, seq_k and batch x heads as measured."""
        return self.problem.seq_q, self.problem.seq_k, self.problem.batch * self.problem.heads_q

    @property
    def families(self) -> frozenset[str]:
        """Which kernels were measured."""
        return frozenset(one.family for one in self.ranked)

    def beside(self, older: Entry | None) -> Entry:
        """This entry with the figures of another of its place, for the families it lacks itself.

        Whoever measures one family anew says nothing about the other.
        """
        if older is None or older.families <= self.families:
            return self
        others = [one for one in older.ranked if one.family not in self.families]
        return replace(self, ranked=tuple(by_time([*self.ranked, *others])))

    @property
    def place(self) -> tuple[WinnerKey, tuple[int, int, int]]:
        """What a table has only one entry of: a key's bucket may hold 1536 and 2048."""
        return self.key, self.sizes


def by_time(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Fastest first, each config once with its best time."""
    found: dict[tuple[str, str], Ranked] = {}
    for one in sorted(ranked, key=lambda r: r.ms):
        found.setdefault((one.family, one.config), one)
    return list(found.values())
