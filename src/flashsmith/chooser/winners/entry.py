"""Entry: the measured configs of one problem, fastest first."""

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

# The range of times in milliseconds and of TFLOP/s: wider than any measurement, and narrow enough
# that all their products and ratios are finite.
SMALLEST, LARGEST = 1e-12, 1e12
# Number of configs of a ranking that are kept, of any shape.
KEPT = 8
# Limit of configs per entry in a file; the tuner keeps the best of every shape, a few dozen.
MOST_RANKED = 1000
# Limit of characters of a name, several times the longest config's.
MOST_CHARACTERS = 1000
MOST_CHARACTERS_OF_A_TIME = 100


def time_of(environment: Mapping[str, Any]) -> str:
    """When an environment's figures were measured; '' if the 'time' is missing or not a short
    text."""
    time = environment.get("time")
    return time if is_name(time, MOST_CHARACTERS_OF_A_TIME) else ""


@dataclass(frozen=True)
class RankedConfig:
    """One config's measured time.

    family: the config's family. config: its short form. ms: the median time. tflops: the problem's
    attn_flop() over that time. environment: where and when it was measured, with 'time' in ISO
    8601.

    Raises:
        ValueError: a field has another type, a name is not printable or has more than
            MOST_CHARACTERS, or a figure is outside SMALLEST to LARGEST.
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
            # NaN is rejected too, since every comparison with it is false.
            if not SMALLEST <= value <= LARGEST:
                raise ValueError(
                    f"{name} is {quoted(value, 80)}; it must be finite and from {SMALLEST:g} "
                    f"to {LARGEST:g}"
                )
        if not isinstance(self.environment, Mapping):
            raise ValueError(f"environment is {quoted(self.environment, 80)}, not a mapping")

    @property
    def time(self) -> str:
        """When the config was measured, ISO 8601; '' if unknown."""
        return time_of(self.environment)


@dataclass(frozen=True)
class Entry:
    """One measured problem and its configs, at least one, fastest first.

    A key stands for a bucket of many problems. The times are for only one of these problems,
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
        """When the entry's newest figure was measured."""
        return max(one.time for one in self.ranked)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The measured sizes, by sizes_of(): rows of queries, keys and batch x heads."""
        return sizes_of(self.problem)

    @property
    def families(self) -> frozenset[str]:
        """The families that were measured."""
        return frozenset(one.family for one in self.ranked)

    def beside(self, older: Entry | None) -> Entry:
        """This entry plus the figures of ``older``, an entry with the same place, for the families
        that this entry lacks.

        So measuring one family again does not affect the figures of other families.
        """
        if older is None or older.families <= self.families:
            return self
        others = [one for one in older.ranked if one.family not in self.families]
        return replace(self, ranked=tuple(by_time([*self.ranked, *others])))

    @property
    def place(self) -> tuple[WinnerKey, tuple[int, int, int]]:
        """The identity of an entry in a table. The key alone is not enough, since one bucket may
        hold entries of lengths 1536 and 2048."""
        return self.key, self.sizes


def by_time(ranked: Sequence[RankedConfig]) -> list[RankedConfig]:
    """The configs, fastest first; each is listed once, with its best time."""
    found: dict[tuple[str, str], RankedConfig] = {}
    for one in sorted(ranked, key=lambda r: r.ms):
        found.setdefault((one.family, one.config), one)
    return list(found.values())


def worth_keeping(ranked: Sequence[RankedConfig]) -> list[RankedConfig]:
    """The best KEPT configs of a ranking (fastest first) and the best of every tile shape, both of
    deterministic kernels and of others.

    A shape that loses here may win where there are more or fewer CTAs per SM. A lookup for another
    size compares the shapes again and must find them, as must a lookup for deterministic kernels.
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
    """Family, rows of a tile, threads, and determinism. Rows means rows of queries, or of queries
    and keys if CTAs do not own queries. A config that no longer parses has a unique shape."""
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
    """The entry as it is stored in a file. The entry's environments are added to ``environments``
    and stored by name, since many figures share an environment."""
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
    """A name for an environment, derived from its content."""
    text = json.dumps(environment, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def entry_from_json(record: Any, environments: Mapping[str, Any]) -> Entry:
    """The entry stored as ``record``; raises ValueError with the reason if it is unusable."""
    key = WinnerKey(**_members("it", record, _KEY))
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
    """The members of a record with these names; raises ValueError if one is missing."""
    if not isinstance(record, dict):
        raise ValueError(f"{what} is {quoted(record, 80)}, not a mapping")
    lacking = [name for name in names if name not in record]
    if lacking:
        raise ValueError(f"{what} lacks {', '.join(map(repr, lacking))}")
    return {name: record[name] for name in names}


_KEY = tuple(field.name for field in fields(WinnerKey))
_FIGURES = ("family", "config", "ms", "tflops")
