"""The config space as it was measured: rates by tile and by the knobs that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from flashsmith.benchmark.charts.heat_map import HeatMap
from flashsmith.benchmark.report.cells import describe
from flashsmith.benchmark.rows import BenchRow
from flashsmith.untrusted import whole_number

# Fewer make no map, and more rows or tiles no page.
LEAST_CONFIGS = 4
MOST_ROWS = 40
MOST_COLUMNS = 40
_DIGITS = re.compile(r"\d", re.ASCII)


def make_heat_maps(rows: Iterable[BenchRow]) -> list[tuple[HeatMap, str]]:
    """A map and its caption for each kind of problem: of several lengths that with most configs."""
    by_problem: dict[Any, dict[str, list[BenchRow]]] = {}
    for row in rows:
        if row.kind == "ours" and row.config and row.contender == row.config:
            found = by_problem.setdefault(_problem(row), {})
            found.setdefault(row.config, []).append(row)
    chosen: dict[Any, dict[str, list[BenchRow]]] = {}
    for configs in by_problem.values():
        kind = _kind(_any(configs))
        if len(configs) >= LEAST_CONFIGS and _rank(configs) > _rank(chosen.get(kind, {})):
            chosen[kind] = configs
    return [_map(configs) for configs in chosen.values()]


def _problem(row: BenchRow) -> tuple[Any, ...]:
    return (*_kind(row), row.batch, row.seq_q, row.seq_k)


def _kind(row: BenchRow) -> tuple[Any, ...]:
    heads = (row.heads_q, row.heads_k)
    return (row.family, row.gpu, row.d, row.dtype, row.semantics, heads)


def _any(configs: dict[str, list[BenchRow]]) -> BenchRow:
    return next(iter(configs.values()))[0]


def _rank(configs: dict[str, list[BenchRow]]) -> tuple[int, int]:
    timed = [rows for rows in configs.values() if _rate(rows) is not None]
    return (len(timed), _any(configs).seq_k) if timed else (0, 0)


def _rate(rows: Sequence[BenchRow]) -> float | None:
    """As measured last: a search times the good ones again, longer, from rung to rung."""
    timed = [row for row in rows if row.verdict == "pass" and row.tflops is not None]
    return max(timed, key=_rounds).tflops if timed else None


def _rounds(row: BenchRow) -> tuple[bool, int]:
    digits = "".join(_DIGITS.findall(row.protocol))
    return ("rung" not in row.protocol, whole_number(digits) or 0)


def _map(configs: dict[str, list[BenchRow]]) -> tuple[HeatMap, str]:
    parts = {config: _parts(config) for config in configs}
    common = set.intersection(*(set(words) for _, words in parts.values()))
    rates: dict[tuple[str, str], float] = {}
    failed = set()
    for config, rows in configs.items():
        tile, words = parts[config]
        place = ("+".join(word for word in words if word not in common) or "none", tile)
        rate = _rate(rows)
        if rate is not None:
            rates[place] = max(rate, rates.get(place, 0.0))
        elif any(row.verdict == "fail" for row in rows):
            failed.add(place)
    ranked = list(dict.fromkeys(row for row, _ in sorted(rates, key=lambda at: -rates[at])))
    shown = ranked[:MOST_ROWS]
    tiles = [column for row, column in sorted(rates, key=lambda at: -rates[at]) if row in shown]
    tiles += sorted(column for row, column in failed if row in shown)
    tiles = list(dict.fromkeys(tiles))
    columns = sorted(tiles[:MOST_COLUMNS], key=_numbers)
    any_row = _any(configs)
    sizes = f"length {any_row.seq_k}, batch {any_row.batch}"
    heat = HeatMap(
        heading=f"{describe(any_row)}, {any_row.family}\n{sizes}",
        rows=tuple(shown),
        columns=tuple(columns),
        rates={
            place: rate
            for place, rate in rates.items()
            if place[0] in shown and place[1] in columns
        },
        failed=frozenset(failed),
    )
    return heat, _caption(len(rates), common, len(ranked) - len(shown), len(tiles) - len(columns))


def _caption(timed: int, common: set[str], rows: int, tiles: int) -> str:
    text = f"TFLOP/s of {timed} kernels: tiles (B_r, B_c, warps) across, the other knobs down."
    if common:
        text += f" All have {'+'.join(sorted(common))}."
    if rows:
        text += f" {rows} slower rows are left out."
    if tiles:
        text += f" {tiles} slower tiles are left out."
    return text


def _parts(config: str) -> tuple[str, tuple[str, ...]]:
    """A short form's tile, without dtype and head dimension, and its words."""
    tile, _, words = config.rpartition(": ")
    sizes = [size.strip() for size in tile.strip("() ").split(",")]
    return ", ".join(sizes[2:]) or tile, tuple(words.split("+"))


def _numbers(tile: str) -> tuple[Any, ...]:
    digits = ("".join(_DIGITS.findall(part)) for part in tile.split(","))
    return (*(whole_number(part) or 0 for part in digits), tile)
