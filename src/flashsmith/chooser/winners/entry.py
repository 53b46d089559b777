"""Entry: the configs that were measured on one problem, fastest first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flashsmith.chooser.winners.key import (
    MOST_CHARACTERS_OF_A_NAME,
    WinnerKey,
    is_name,
    parse_class,
    sizes_of,
)
from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.families.gpu_names import gpu_name
from flashsmith.printable import quoted

# Times (in milliseconds) and TFLOP/s must be in this range. No measurement is outside it, and all
# products and ratios of numbers in it are finite.
SMALLEST, LARGEST = 1e-12, 1e12
# The number of the fastest configs of a ranking that are kept whatever their tile shapes.
KEPT = 8
# An entry in a file may have at most this many configs; the tuner keeps a few dozen, the best of
# every shape.
MOST_RANKED = 1000
# Names may have at most this many characters, several times as many as the longest config.
MOST_CHARACTERS = 1000
MOST_CHARACTERS_OF_A_TIME = 100


def time_of(environment: Mapping[str, Any]) -> str:
    """The time at which figures with this environment were measured; '' if 'time' is missing or is
    not a short string."""
    time = environment.get("time")
    return time if is_name(time, MOST_CHARACTERS_OF_A_TIME) else ""


@dataclass(frozen=True)
class RankedConfig:
    """The measured time of one config.

    family: the config's family.
    config: its short form.
    ms: the median time.
    tflops: attn_flop() of the problem divided by that time.
    environment: where and when it was measured; 'time' is in ISO 8601 format.

    Raises:
        ValueError: a field has the wrong type, a name is not printable or too long, or a figure is
            not between SMALLEST and LARGEST.
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
            # NaN is rejected too, since all comparisons with it are false.
            if not SMALLEST <= value <= LARGEST:
                raise ValueError(
                    f"{name} is {quoted(value, 80)}; it must be finite and from {SMALLEST:g} "
                    f"to {LARGEST:g}"
                )
        if not isinstance(self.environment, Mapping):
            raise ValueError(f"environment is {quoted(self.environment, 80)}, not a mapping")

    @property
    def time(self) -> str:
        """When the config was measured, in ISO 8601 format; '' if unknown."""
        return time_of(self.environment)


@dataclass(frozen=True)
class Entry:
    """A problem that was measured, with one or more configs, fastest first.

    The key stands for a bucket of many problems. The times were measured on only one of them,
    ``problem``.
    """

    key: WinnerKey
    problem: Problem
    ranked: tuple[RankedConfig, ...]

    def __post_init__(self) -> None:
        if not self.ranked:
            raise ValueError("ranked is empty; an entry has at least one config")

    @property
    def best(self) -> RankedConfig:
        """The fastest config."""
        return self.ranked[0]

    @property
    def time(self) -> str:
        """When the newest figure of the entry was measured."""
        return max(one.time for one in self.ranked)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the measured problem, as sizes_of() gives them: rows of queries, keys, batch
        x heads."""
        return sizes_of(self.problem)

    @property
    def families(self) -> frozenset[str]:
        """The families of its configs."""
        return frozenset(one.family for one in self.ranked)

    def beside(self, older: Entry | None) -> Entry:
        """This entry, plus the figures of ``older`` for families that this entry lacks.

        ``older`` must be None or an entry with the same place().

        So measuring one family again does not remove the figures of other families.
        """
        if older is None or older.families <= self.families:
            return self
        others = [one for one in older.ranked if one.family not in self.families]
        return replace(self, ranked=tuple(by_time([*self.ranked, *others])))

    @property
    def place(self) -> tuple[WinnerKey, tuple[int, int, int]]:
        """The place of the entry in a table, which identifies it: its key and its measured sizes.

        The key alone does not identify an entry: one bucket may have separate entries for the
        lengths 1536 and 2048.
        """
        return self.key, self.sizes


def by_time(ranked: Sequence[RankedConfig]) -> list[RankedConfig]:
    """Sorts configs, fastest first. Each config is listed once, with its best time."""
    found: dict[tuple[str, str], RankedConfig] = {}
    for one in sorted(ranked, key=lambda r: r.ms):
        found.setdefault((one.family, one.config), one)
    return list(found.values())


def worth_keeping(ranked: Sequence[RankedConfig]) -> list[RankedConfig]:
    """The configs of a ranking (fastest first) to keep: the best KEPT and the best of every tile
    shape. Deterministic kernels and the others are ranked separately.

    A shape that is slow on this problem may be the fastest with more or fewer CTAs per SM. A
    look-up for another size compares the shapes again, so the table must have them. It must have
    deterministic kernels too.
    """
    kept = list(ranked[:KEPT])
    shapes = {_shape(one) for one in kept}
    for one in ranked[KEPT:]:
        shape = _shape(one)
        if shape not in shapes:
            shapes.add(shape)
            kept.append(one)
    return kept


def _shape(one: RankedConfig) -> tuple[object, ...]:
    """The properties that distinguish tile shapes: family, rows, threads, and whether it is
    deterministic.

    Rows are rows of queries or, if CTAs do not own queries, rows of queries and of keys. A config
    that can no longer be parsed counts as a separate shape.
    """
    try:
        config = parse_kernel_name_into_config(one.config)
    except FlashsmithError:
        return (one.family, one.config)
    rows = getattr(config, "B_r", None), getattr(config, "B_c", None)
    has_loop_over_keys = config.family.loop_tiles(config) is not None
    return (
        one.family,
        rows[0] if has_loop_over_keys else rows,
        config.n_threads,
        config.family.is_deterministic(config),
    )


# --- JSON ----------------------------------------------------------------------------------------


def entry_to_json(entry: Entry, environments: dict[str, Any]) -> dict[str, Any]:
    """The entry, in the form stored in files.

    Its environments are added to ``environments`` and stored by name, because many figures have the
    same environment.
    """
    ranked = []
    for one in entry.ranked:
        name = _short_digest(one.environment)
        environments[name] = dict(one.environment)
        ranked.append(
            {
                "family": one.family,
                "config": one.config,
                "ms": float(f"{one.ms:.6g}"),
                "tflops": float(f"{one.tflops:.6g}"),
                "environment": name,
            }
        )
    return {**entry.key.to_json(), "problem": str(entry.problem), "ranked": ranked}


def _short_digest(environment: Mapping[str, Any]) -> str:
    """A name for an environment, computed from its content."""
    text = json.dumps(environment, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def entry_from_json(record: Any, environments: Mapping[str, Any]) -> Entry:
    """Reads an entry that was stored as ``record``.

    Raises ValueError with the reason if it cannot be used.
    """
    key = WinnerKey(**_members("it", record, _KEY), d_v=record.get("d_v", 0))
    key = replace(key, gpu=gpu_name(key.gpu), dtype=key.element.name.lower())
    parse_class(key.semantics)
    problem, listed = _members("it", record, ("problem", "ranked")).values()
    if not is_name(problem, MOST_CHARACTERS_OF_A_NAME):
        raise ValueError(f"problem is {quoted(problem, 80)}, not a problem's text")
    if not isinstance(listed, list):
        raise ValueError(f"ranked is {quoted(listed, 80)}, not a list")
    if len(listed) > MOST_RANKED:
        raise ValueError(f"ranked has {len(listed):,} configs; at most {MOST_RANKED:,} are allowed")
    ranked = [_ranked(rank, one, environments) for rank, one in enumerate(listed, 1)]
    return Entry(key, Problem.parse(problem), tuple(ranked))


def _ranked(rank: int, record: Any, environments: Mapping[str, Any]) -> RankedConfig:
    figures = _members(f"rank {rank}", record, _FIGURES)
    name = _members(f"rank {rank}", record, ("environment",))["environment"]
    if not isinstance(name, str) or name not in environments:
        raise ValueError(f"rank {rank}: there is no environment {quoted(name, 80)}")
    try:
        return RankedConfig(**figures, environment=environments[name])
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from error


def _members(what: str, record: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a record that have these names. Raises ValueError if one is missing."""
    if not isinstance(record, dict):
        raise ValueError(f"{what} is {quoted(record, 80)}, not a mapping")
    lacking = [name for name in names if name not in record]
    if lacking:
        raise ValueError(f"{what} lacks {', '.join(map(repr, lacking))}")
    return {name: record[name] for name in names}


# Records of kernels with one width have no d_v.
_KEY = tuple(field.name for field in fields(WinnerKey) if field.name != "d_v")
_FIGURES = ("family", "config", "ms", "tflops")
