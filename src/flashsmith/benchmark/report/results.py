"""Results: everything that was read for one page, and what of it belongs together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith.benchmark.ncu import ProfileRow
from flashsmith.benchmark.progression import Ablation as Ladder
from flashsmith.benchmark.roofline import Roofline
from flashsmith.benchmark.rows import BenchRow
from flashsmith.benchmark.timing import Environment
from flashsmith.printable import quoted

# What a search measures in its rounds: figures for the map of the space, not for comparisons.
_SEARCH_PROTOCOLS = ("rung", "final")
PASSED_OVER = "passed over"
ENVIRONMENT = tuple(field.name for field in fields(Environment))


@dataclass(frozen=True)
class Source:
    """One file that was read: what it is, how many rows (steps, ceilings) it gave, and what of them
    was left out, a sentence each."""

    path: Path
    what: str
    count: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """All that the page shows."""

    rows: tuple[BenchRow, ...] = ()
    ladders: tuple[Ladder, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()
    rooflines: tuple[Roofline, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def compared(self) -> tuple[BenchRow, ...]:
        """Rows of contenders beside each other; not those of a search."""
        return tuple(row for row in self.rows if not of_search(row))

    @property
    def versions(self) -> dict[str, str]:
        """The revisions whose kernels are compared, the one measured last first, and the time of
        each one's last row. Rows that name no revision are of one, ''."""
        last: dict[str, str] = {}
        for row in self.compared:
            last[row.revision] = max(last.get(row.revision, ""), row.time)
        return dict(sorted(last.items(), key=lambda item: item[1], reverse=True))

    @property
    def environments(self) -> tuple[tuple[tuple[str, Any], ...], ...]:
        """Every environment of the rows and of the ladders that were timed, once."""
        found = [environment_of(row) for row in self.rows]
        found += [_environment(ladder.environment) for ladder in self.ladders if ladder.has_times]
        return tuple(dict.fromkeys(found))

    @property
    def differing(self) -> tuple[str, ...]:
        """The parts of the environment that are not the same everywhere."""
        known = [dict(environment) for environment in self.environments]
        return tuple(
            name for name in ENVIRONMENT if len({environment[name] for environment in known}) > 1
        )


def of_search(row: BenchRow) -> bool:
    """Whether a search over configs made the row: timed the config, or dropped it before."""
    dropped = row.kind == "ours" and row.ms is None and not row.protocol
    return dropped or row.protocol.startswith(_SEARCH_PROTOCOLS)


class Setting(NamedTuple):
    """Where and how figures were measured: only those of one setting compare."""

    environment: tuple[tuple[str, Any], ...]
    protocol: str


def setting_of(row: BenchRow) -> Setting:
    """A row's setting."""
    return Setting(environment_of(row), row.protocol)


def environment_of(row: BenchRow) -> tuple[tuple[str, Any], ...]:
    """A row's environment, as a key."""
    return _environment({name: getattr(row, name) for name in ENVIRONMENT})


def _environment(facts: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _fact(facts.get(name, ""))) for name in ENVIRONMENT)


def _fact(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else quoted(value)


def failed(rows: Iterable[BenchRow]) -> list[BenchRow]:
    """Rows whose output was wrong, or that did not come to their end."""
    return [row for row in rows if row.verdict in ("fail", "error")]


def absent_peers(rows: Iterable[BenchRow]) -> dict[tuple[str, str], int]:
    """(peer, why it took no part) and on how many problems."""
    gaps: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.kind == "peer" and row.verdict == "absent":
            key = (row.contender, row.note or "no reason given")
            gaps[key] = gaps.get(key, 0) + 1
    return gaps
