"""Results: everything read for one page, with the environment of each measurement."""

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

# The names of attention() on the page, and of attention_with_cache() with a free split; in files
# their rows are of 'ours' and 'ours_free'.
FLASHSMITH = "flashsmith"
FREE_SPLIT = "free split"
_NAMES = {OURS: FLASHSMITH, OURS_FREE: FREE_SPLIT}
BASELINES = ("fa2", "cudnn")
# What a search measures in its rounds: figures for the config space, not for comparisons.
_SEARCH_PROTOCOLS = ("rung", "final")
PASSED_OVER = "passed over"
ENVIRONMENT = tuple(field.name for field in fields(Environment))
ENVIRONMENT_NAMES = {"gpu": "GPU", "cuda": "CUDA", "torch": "PyTorch", "python": "Python"}


@dataclass(frozen=True)
class Source:
    """One file that was read: its kind, how many rows (steps, ceilings) it gave, and a sentence for
    each kind of rows that were left out."""

    path: Path
    what: str
    count: int
    left_out: tuple[str, ...] = ()


class Setting(NamedTuple):
    """Where and how figures were measured; only figures of one setting are comparable."""

    environment: tuple[tuple[str, Any], ...]
    protocol: str


@dataclass(frozen=True)
class Results:
    """All that the page shows."""

    rows: tuple[Measurement, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()
    rooflines: tuple[Roofline, ...] = ()
    sources: tuple[Source, ...] = ()

    @cached_property
    def compared(self) -> tuple[Measurement, ...]:
        """Rows of implementations beside each other; not those of a search."""
        return tuple(row for row in self.rows if not of_search(row))

    @cached_property
    def versions(self) -> dict[str, str]:
        """The revisions whose kernels are compared, the one measured last first, and the time of
        each one's last row. Rows that name no revision are of one, ''."""
        last: dict[str, str] = {}
        for row in self.compared:
            last[row.revision] = max(last.get(row.revision, ""), row.time)
        return dict(sorted(last.items(), key=lambda item: item[1], reverse=True))

    @cached_property
    def environments(self) -> tuple[dict[str, Any], ...]:
        """Every environment of the rows and of the ablations that were timed, once."""
        found = [setting_of(row).environment for row in self.rows]
        found += [_environment(one.environment) for one in self.ablations if one.has_times]
        return tuple(dict(environment) for environment in dict.fromkeys(found))

    @property
    def differing(self) -> tuple[str, ...]:
        """The parts of the environment that are not the same everywhere."""
        known = self.environments
        return tuple(name for name in ENVIRONMENT if len({facts[name] for facts in known}) > 1)


def is_flashsmith(row: Measurement) -> bool:
    """Whether a row is of a flashsmith kernel, not of a peer."""
    return row.kind != "peer"


def name_of(row: Measurement) -> str:
    """The name of a row's implementation on the page: attention() is 'flashsmith'."""
    name = row.implementation
    return _NAMES.get(name, name) if is_flashsmith(row) else name


def rate_of(row: Measurement | None) -> float | None:
    """A row's throughput in ``unit_of`` it; None where it has none."""
    if row is None or not row.is_memory_bound:
        return row.tflops if row else None
    return row.tb_per_s or None


def unit_of(row: Measurement) -> str:
    """TB/s where memory limits the problem, else TFLOP/s."""
    return "TB/s" if row.is_memory_bound else "TFLOP/s"


def digits_of(row: Measurement) -> int:
    """How many digits behind the point a rate is shown with."""
    return 2 if row.is_memory_bound else 0


def of_search(row: Measurement) -> bool:
    """Whether a search over configs made the row: timed the config, or dropped it before."""
    dropped = is_flashsmith(row) and row.ms is None and not row.protocol
    return dropped or row.protocol.startswith(_SEARCH_PROTOCOLS)


def setting_of(row: Measurement) -> Setting:
    """A row's setting."""
    return Setting(_environment({name: getattr(row, name) for name in ENVIRONMENT}), row.protocol)


def _environment(facts: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _fact(facts.get(name, ""))) for name in ENVIRONMENT)


def _fact(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else quoted(value)


def setting_facts(setting: Setting) -> dict[str, str]:
    """A setting's facts as the page shows them, '' for an unknown one; the most important come
    first."""
    known = dict(setting.environment)
    others = {
        name: f"{ENVIRONMENT_NAMES.get(name, name)} {value}" if value else ""
        for name, value in known.items()
    }
    plain = {name: str(known[name]) for name in ("gpu", "revision")}
    return plain | {"protocol": setting.protocol} | {**others, **plain}
