"""Results: everything that was read for a page, with the environment of each measurement."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import OURS, OURS_FREE
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.ncu import ProfileRow
from flashsmith.benchmark.progression import Ablation
from flashsmith.benchmark.roofline import Roofline
from flashsmith.printable import quoted

# The names that the page gives to attention(), and to attention_with_cache() with split='free'. In
# files they are called 'ours' and 'ours_free'.
FLASHSMITH = "flashsmith"
FREE_SPLIT = "free split"
_NAMES = {OURS: FLASHSMITH, OURS_FREE: FREE_SPLIT}
BASELINES = ("fa2", "cudnn")
# The protocols of a search. Figures from a search are shown in the config space, not in
# comparisons.
_SEARCH_PROTOCOLS = ("rung", "final")
PASSED_OVER = "passed over"
ENVIRONMENT = tuple(field.name for field in fields(Environment))
ENVIRONMENT_NAMES = {"gpu": "GPU", "cuda": "CUDA", "torch": "PyTorch", "python": "Python"}


@dataclass(frozen=True)
class Source:
    """A file that was read.

    what: the kind of file.
    count: how many rows (steps, ceilings) the file has.
    left_out: one sentence for each value or part of the file that was left out.
    """

    path: Path
    what: str
    count: int
    left_out: tuple[str, ...] = ()


class Setting(NamedTuple):
    """The environment and the protocol of a measurement.

    Figures can be compared only if these are the same.
    """

    environment: tuple[tuple[str, Any], ...]
    protocol: str


@dataclass(frozen=True)
class Results:
    """All results that the page shows."""

    rows: tuple[Measurement, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()
    rooflines: tuple[Roofline, ...] = ()
    sources: tuple[Source, ...] = ()

    @cached_property
    def compared(self) -> tuple[Measurement, ...]:
        """The rows that compare implementations, without the rows of a search."""
        return tuple(row for row in self.rows if not of_search(row))

    @cached_property
    def versions(self) -> dict[str, str]:
        """The revisions that were compared, each with the time of its last row, the most recent
        first. Rows without a revision have the revision ''."""
        last: dict[str, str] = {}
        for row in self.compared:
            last[row.revision] = max(last.get(row.revision, ""), row.time)
        return dict(sorted(last.items(), key=lambda item: item[1], reverse=True))

    @cached_property
    def environments(self) -> tuple[dict[str, Any], ...]:
        """The distinct environments of the rows and of the timed ablations."""
        found = [setting_of(row).environment for row in self.rows]
        found += [_environment(one.environment) for one in self.ablations if one.has_times]
        return tuple(dict(environment) for environment in dict.fromkeys(found))

    @property
    def differing(self) -> tuple[str, ...]:
        """The fields of the environment whose values differ."""
        known = self.environments
        return tuple(name for name in ENVIRONMENT if len({facts[name] for facts in known}) > 1)


def is_flashsmith(row: Measurement) -> bool:
    """Whether the row is flashsmith's, not a peer's."""
    return row.kind != "peer"


def name_of(row: Measurement) -> str:
    """The name of the row's implementation on the page; attention() is 'flashsmith'."""
    name = row.implementation
    return _NAMES.get(name, name) if is_flashsmith(row) else name


def rate_of(row: Measurement | None) -> float | None:
    """The throughput of a row in the unit that ``unit_of`` returns; None if there is no row or the
    row has no throughput."""
    if row is None or not row.is_memory_bound:
        return row.tflops if row else None
    return row.tb_per_s or None


def unit_of(row: Measurement) -> str:
    """The unit of a row's rate: TB/s if memory limits its problem, otherwise TFLOP/s."""
    return "TB/s" if row.is_memory_bound else "TFLOP/s"


def digits_of(row: Measurement) -> int:
    """The number of decimals that a rate is shown with."""
    return 2 if row.is_memory_bound else 0


def of_search(row: Measurement) -> bool:
    """Whether the row comes from a search over configs; the search timed or dropped the config."""
    dropped = is_flashsmith(row) and row.ms is None and not row.protocol
    return dropped or row.protocol.startswith(_SEARCH_PROTOCOLS)


def setting_of(row: Measurement) -> Setting:
    """The setting of a row."""
    return Setting(_environment({name: getattr(row, name) for name in ENVIRONMENT}), row.protocol)


def _environment(facts: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _fact(facts.get(name, ""))) for name in ENVIRONMENT)


def _fact(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else quoted(value)


def setting_facts(setting: Setting) -> dict[str, str]:
    """The facts of a setting in the form that the page shows, the most important first; '' for
    unknown facts."""
    known = dict(setting.environment)
    others = {
        name: f"{ENVIRONMENT_NAMES.get(name, name)} {value}" if value else ""
        for name, value in known.items()
    }
    plain = {name: str(known[name]) for name in ("gpu", "revision")}
    return plain | {"protocol": setting.protocol} | {**others, **plain}
