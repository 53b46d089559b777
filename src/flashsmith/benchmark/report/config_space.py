"""The measured config space: for each problem the best configs, the distribution of rates, and the
rates by tile and by the knobs in which the configs differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.report.comparison import order, sizes
from flashsmith.benchmark.report.results import digits_of, is_flashsmith, rate_of
from flashsmith.benchmark.report.svg_charts import robust_range
from flashsmith.safe_json import whole_number

# The report has no section on the config space of a problem with fewer configs than this.
LEAST_CONFIGS = 4
# At most this many rows and columns per heat map, and heat maps per page.
MOST_ROWS = 40
MOST_COLUMNS = 40
MOST_MAPS = 100
# These constants limit how many configs are listed: at least _LEAST_LISTED per problem, and about
# _LISTED per page.
_LEAST_LISTED, _LISTED = 3, 600
_LEVELS = 10
_BARS = "▁▂▃▄▅▆▇█"
_DIGITS = re.compile(r"\d", re.ASCII)


@dataclass(frozen=True)
class SearchedSpace:
    """The configs of one family that were measured on one problem, each with its last measurement.

    ranked: the configs that have a rate, fastest first.
    wrong: the configs that gave wrong results or failed.
    dropped: how many configs the search dropped.
    """

    ranked: tuple[Measurement, ...]
    wrong: tuple[Measurement, ...]
    dropped: int

    @property
    def row(self) -> Measurement:
        """Any row of the problem, which identifies it."""
        return self.ranked[0]


def make_searched(rows: Iterable[Measurement]) -> list[SearchedSpace]:
    """The problems on which several configs were measured, sorted by `order`."""
    by_problem: dict[Any, dict[str, list[Measurement]]] = {}
    for row in rows:
        if is_flashsmith(row) and row.config and row.implementation == row.config:
            key = (*_kind(row), row.batch, row.seq_q, row.seq_k)
            by_problem.setdefault(key, {}).setdefault(row.config, []).append(row)
    found = []
    for configs in by_problem.values():
        last = [max(rows, key=_rounds) for rows in configs.values()]
        ranked = sorted((row for row in last if _rate(row)), key=_rate, reverse=True)
        if ranked and len(configs) >= LEAST_CONFIGS:
            wrong = [row for row in last if row.verdict in ("fail", "error")]
            found.append(
                SearchedSpace(tuple(ranked), tuple(wrong), len(last) - len(ranked + wrong))
            )
    return sorted(found, key=lambda one: (order(one.row), sizes(one.row)))


def _kind(row: Measurement) -> tuple[Any, ...]:
    return (row.family, row.gpu, row.d, row.dtype, row.semantics, row.heads_q, row.heads_k)


def _rate(row: Measurement) -> float:
    return rate_of(row) or 0.0 if row.verdict == "pass" else 0.0


def _rounds(row: Measurement) -> tuple[bool, bool, int]:
    """The key by which the measurements of a config are sorted. A search times good configs again,
    and for longer, in later rungs and in the finals."""
    digits = "".join(_DIGITS.findall(row.protocol))
    return (_rate(row) > 0, "rung" not in row.protocol, whole_number(digits) or 0)


def distribution(one: SearchedSpace) -> tuple[str, str]:
    """The distribution of rates: how many configs are in each step of 5% of the best rate, as small
    bars and in words."""
    counts = Counter(min(9, max(0, int((_rate(row) / _rate(one.row) - 0.5) * 20)))
                     for row in one.ranked)  # fmt: skip
    most = max(counts.values())
    bars = "".join(_BARS[-(-7 * counts[step] // most)] for step in range(10))
    shares = [f"{50 + 5 * step}% to {55 + 5 * step}%: {counts[step]}" for step in range(1, 10)]
    return bars, "; ".join([f"below 55%: {counts[0]}", *shares])


def listed_configs(searched: Sequence[SearchedSpace]) -> int:
    """How many of the best configs of each problem a page lists."""
    return max(_LEAST_LISTED, _LISTED // max(1, len(searched)))


# --- heat maps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """The best rates of a problem, by tile (columns) and knobs (rows).

    Each cell has a string and a CSS class: 'h0' to 'h9' for its rate, 'bad' for a wrong kernel. The
    colours range from `low` to `high`; the number of cells outside this range is `beyond`.
    """

    searched: SearchedSpace
    common: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    low: float
    high: float
    beyond: int
    rows_left_out: int
    columns_left_out: int


def widest(searched: Sequence[SearchedSpace]) -> list[SearchedSpace]:
    """For each kind of problem, the problem on which the most configs were measured; among equals,
    the longest problem."""
    chosen: dict[Any, SearchedSpace] = {}
    for one in searched:
        best = chosen.setdefault(_kind(one.row), one)
        if (len(one.ranked), one.row.seq_k) > (len(best.ranked), best.row.seq_k):
            chosen[_kind(one.row)] = one
    return list(chosen.values())


def make_heat_map(one: SearchedSpace) -> HeatMap:
    """Makes the heat map of a problem: the best rates by tile, and by the knobs in which its
    configs differ. Rows and columns are sorted by their best rate."""
    parts = {row.config: _parts(row.config) for row in (*one.ranked, *one.wrong)}
    common = set.intersection(*(set(words) for _, words in parts.values()))
    best: dict[tuple[str, str], Measurement] = {}
    for row in one.ranked:
        tile, words = parts[row.config]
        best.setdefault((_knobs(words, common), tile), row)
    # The configs are sorted by rate, so the first one of a row or column is its best.
    rows = list(dict.fromkeys(knobs for knobs, _ in best))
    shown = rows[:MOST_ROWS]
    wrong = {(_knobs(parts[row.config][1], common), parts[row.config][0]) for row in one.wrong}
    tiles = [tile for knobs, tile in best if knobs in shown]
    tiles = list(dict.fromkeys([*tiles, *sorted(tile for knobs, tile in wrong if knobs in shown)]))
    columns = tiles[:MOST_COLUMNS]
    rates = {
        place: _rate(row)
        for place, row in best.items()
        if place[0] in shown and place[1] in columns
    }
    low, high = robust_range(list(rates.values()))
    cells = [
        (knobs, [_heat(best.get((knobs, tile)), (knobs, tile) in wrong, low, high, one.row)
                 for tile in columns])
        for knobs in shown
    ]  # fmt: skip
    return HeatMap(
        one, sorted(common), columns, cells, low, high,
        beyond=sum(not low <= rate <= high for rate in rates.values()),
        rows_left_out=len(rows) - len(shown),
        columns_left_out=len(tiles) - len(columns),
    )  # fmt: skip


def _heat(
    row: Measurement | None, wrong: bool, low: float, high: float, best: Measurement
) -> tuple[str, str]:
    if row is None:
        return ("wrong", "bad") if wrong else ("", "")
    rate = _rate(row)
    share = (rate - low) / (high - low) if high > low else 0.5
    level = min(_LEVELS - 1, max(0, int(share * _LEVELS)))
    mark = "▾" if rate < low else "▴" if rate > high else ""
    return f"{rate:,.{digits_of(row)}f}{mark}", f"h{level}" + (" best" if row is best else "")


def _parts(config: str) -> tuple[str, tuple[str, ...]]:
    """The parts of a short form: its tile, without dtype and head dimension, and its words."""
    tile, _, words = config.rpartition(": ")
    sizes = [size.strip() for size in tile.strip("() ").split(",")]
    return ", ".join(sizes[2:]) or tile, tuple(words.split("+"))


def _knobs(words: Sequence[str], common: set[str]) -> str:
    return "+".join(word for word in words if word not in common) or "none"
