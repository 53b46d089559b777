"""Comparisons: the implementations of one problem, and the problems that share a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.report.results import (
    BASELINES,
    FLASHSMITH,
    FREE_SPLIT,
    Setting,
    is_flashsmith,
    name_of,
    rate_of,
    setting_facts,
    setting_of,
)
from flashsmith.benchmark.timing import IN_GRAPHS
from flashsmith.errors import ArgumentError
from flashsmith.operations import parse_kind, semantic_words
from flashsmith.pluralize import pluralize


@dataclass(frozen=True)
class Point:
    """One problem, measured under one protocol in one environment.

    `chosen` is the public call, which chooses its config, and `free` is that call with
    split='free'. `kernels` are flashsmith's kernels by config, and `peers` the peers by name. All
    of these passed their check and have a time. `wrong` contains the rows that failed or did not
    finish.
    """

    row: Measurement
    chosen: Measurement | None
    kernels: dict[str, Measurement]
    peers: dict[str, Measurement]
    wrong: tuple[Measurement, ...]
    free: Measurement | None = None

    @property
    def shown(self) -> bool:
        """Whether anything was timed or wrong; some kernels may only have been proven."""
        return bool(self.flashsmith or self.peers or self.wrong)

    @property
    def best_kernel(self) -> Measurement | None:
        """The fastest kernel that was selected by its config."""
        return min(self.kernels.values(), key=_ms, default=None)

    @property
    def flashsmith(self) -> Measurement | None:
        """The row that represents flashsmith: attention() if it was measured, otherwise the best
        config."""
        return self.chosen or self.best_kernel

    @property
    def best_peer(self) -> Measurement | None:
        """The fastest peer."""
        return min(self.peers.values(), key=_ms, default=None)

    def failure(self, peer: str | None = None) -> Measurement | None:
        """A failed row of the peer, or of flashsmith if `peer` is None."""
        own = peer is None
        names = (row for row in self.wrong if is_flashsmith(row) == own)
        return next((row for row in names if own or row.implementation == peer), None)

    def ratio(self, peer: str) -> float | None:
        """flashsmith's throughput over the peer's; None unless both were measured."""
        return _over(self.flashsmith, self.peers.get(peer))

    @property
    def ratio_to_best(self) -> float | None:
        """flashsmith's throughput over the fastest peer's throughput."""
        return _over(self.flashsmith, self.best_peer)


def _ms(row: Measurement) -> float:
    return row.ms if row.ms is not None else math.inf


def _over(row: Measurement | None, peer: Measurement | None) -> float | None:
    return peer.ms / row.ms if row and peer and row.ms and peer.ms else None


@dataclass(frozen=True)
class ProblemGroup:
    """Points of one chart, which differ only in length and batch."""

    points: tuple[Point, ...]

    @property
    def first(self) -> Measurement:
        """A row with the properties that all points share."""
        return self.points[0].row


@dataclass(frozen=True)
class Summary:
    """The results of one operation on one GPU: points with the same unit and a flashsmith rate."""

    gpu: str
    operation: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """For example 'forward on NVIDIA H200'."""
        return f"{self.operation} on {gpu_words(self.gpu)}"

    @property
    def fastest(self) -> Measurement:
        """The row with flashsmith's highest rate."""
        rows = [row for point in self.points if (row := point.flashsmith)]
        return max(rows, key=lambda row: rate_of(row) or 0.0)

    @property
    def kinds(self) -> dict[tuple[int, str], list[Point]]:
        """The points by head dimension and mask, sorted by these."""
        found: dict[tuple[int, str], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.row.d, split_semantics(point.row)[1]), []).append(point)
        return dict(sorted(found.items()))


def make_points(rows: Iterable[Measurement]) -> list[Point]:
    """A point for each problem, protocol and environment, sorted like the groups."""
    by_key: dict[Any, list[Measurement]] = {}
    for row in rows:
        by_key.setdefault((_group_key(row), sizes(row)), []).append(row)
    points = [_point(found) for found in by_key.values()]
    return sorted(points, key=lambda point: (order(point.row), *sizes(point.row)))


def _point(rows: Sequence[Measurement]) -> Point:
    timed = [row for row in rows if row.verdict == "pass" and row.ms]
    own = [row for row in timed if is_flashsmith(row)]
    public = _medians(own, name_of)
    return Point(
        row=rows[0],
        chosen=public.get(FLASHSMITH),
        free=public.get(FREE_SPLIT),
        kernels=_medians(
            [row for row in own if name_of(row) not in (FLASHSMITH, FREE_SPLIT)],
            lambda row: row.config or row.implementation,
        ),
        peers=_medians([row for row in timed if not is_flashsmith(row)], name_of),
        wrong=tuple(row for row in rows if row.verdict in ("fail", "error")),
    )


def _medians(
    rows: Sequence[Measurement], name: Callable[[Measurement], str]
) -> dict[str, Measurement]:
    """Rows by name. Of several repeats, this is the median row; of an even number, the slower of
    the middle two."""
    repeats: dict[str, list[Measurement]] = {}
    for row in rows:
        repeats.setdefault(name(row), []).append(row)
    middles = {key: statistics.median_high(map(_ms, found)) for key, found in repeats.items()}
    return {
        key: next(row for row in found if row.ms == middles[key]) for key, found in repeats.items()
    }


def make_groups(points: Iterable[Point]) -> list[ProblemGroup]:
    """Groups of points that share a chart: lengths with one batch, or with a batch that shrinks as
    lengths grow. For problems over a cache, where memory is the limit, all sizes share a chart.

    When a batch is halved at a longer length, more than half of the tokens remain.
    """
    chains: dict[Any, list[list[Point]]] = {}
    for point in sorted(points, key=lambda point: (point.row.seq_k, -point.row.batch)):
        found = chains.setdefault(_chart_key(point.row), [])
        open_ones = [chain for chain in found if _continues(chain[-1].row, point.row)]
        if open_ones:
            min(open_ones, key=lambda chain: chain[-1].row.batch).append(point)
        else:
            found.append([point])
    made = [ProblemGroup(tuple(_by_bytes(chain))) for found in chains.values() for chain in found]
    return sorted(made, key=lambda group: (order(group.first), -group.first.batch))


def _continues(last: Measurement, row: Measurement) -> bool:
    """Whether a row continues a chain of growing lengths, with more than half as many tokens as the
    last row."""
    if row.is_memory_bound:
        return sizes(last) != sizes(row)
    tokens, before = row.batch * row.seq_k, last.batch * last.seq_k
    return row.seq_k > last.seq_k and row.batch <= last.batch and 2 * tokens > before


def _by_bytes(chain: Sequence[Point]) -> Sequence[Point]:
    """Points over a cache, sorted by the cache's size; other points stay in order."""
    if not chain[0].row.is_memory_bound:
        return chain
    return sorted(chain, key=lambda point: (point.row.batch * point.row.seq_k, point.row.batch))


def _chart_key(row: Measurement) -> tuple[Any, ...]:
    """The properties that a chart's problems share. The suffix ', in graphs' of the protocol is
    ignored, so that small and large caches share a chart."""
    setting, *others = _group_key(row)
    if row.is_memory_bound:
        setting = setting._replace(protocol=setting.protocol.removesuffix(f", {IN_GRAPHS}"))
    return (setting, *others)


def _group_key(row: Measurement) -> tuple[Any, ...]:
    """The properties shared by a group's problems, including the query length if it differs from
    the key length."""
    seq_q = None if row.seq_q == row.seq_k else row.seq_q
    return (setting_of(row), row.d, row.dtype, row.semantics, row.heads_q, row.heads_k, seq_q)


def by_gpu(points: Iterable[Point]) -> dict[str, list[Point]]:
    """The points by GPU, the GPU with the most points first."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.row.gpu, []).append(point)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def order(row: Measurement) -> tuple[Any, ...]:
    """Sort key: plain problems before masked ones, equal heads before grouped ones, d 128 first."""
    semantics = (row.semantics != "plain", len(row.semantics), row.semantics)
    return (
        row.d != 128, row.d, row.heads_q != row.heads_k, row.seq_q != row.seq_k, semantics,
        row.dtype != "fp16", row.dtype, row.heads_q, row.heads_k, str(setting_of(row)),
    )  # fmt: skip


def sizes(row: Measurement) -> tuple[int, int, int]:
    """The sort key of points within a group."""
    return (row.seq_k, row.seq_q, row.batch)


# --- words ---------------------------------------------------------------------------------------


def mask_of(row: Measurement) -> str:
    """A problem's semantics in words: 'full', 'causal, packed'."""
    return "full" if row.semantics == "plain" else row.semantics.replace("+", ", ")


def split_semantics(row: Measurement) -> tuple[str, str]:
    """A row's operation and its mask, in words: ('backward, only dq', 'causal, packed').

    An operation of a package that is not installed is named by the row's first word.
    """
    words = row.semantics.split("+")
    try:
        kind = parse_kind(row.semantics)
    except ArgumentError:
        return words[0], ", ".join(words[1:]) or "full"
    about = [kind.operation, kind.gradients.replace("_", " ")]
    mask = semantic_words(kind.semantics, kind.window_keys) + [f"page{kind.page}"] * (kind.page > 0)
    return ", ".join(filter(None, about)), ", ".join(filter(None, mask)) or "full"


def gpu_words(gpu: str) -> str:
    """A GPU's name, or a phrase for an unknown GPU."""
    return gpu or "an unnamed GPU"


def facets(row: Measurement, without: str = "") -> dict[str, str]:
    """The values by which the page's filters select problems."""
    found = {"d": str(row.d), "dtype": row.dtype, "mask": mask_of(row)}
    return {name: value for name, value in found.items() if name != without}


def describe(row: Measurement) -> str:
    """The common properties of a group's problems, in words: 'd 128, fp16, causal, 32:8 heads'."""
    heads = f"{row.heads_q}" + (f":{row.heads_k}" if row.heads_k != row.heads_q else "")
    parts = [f"d {row.d}", row.dtype, mask_of(row), f"{heads} heads"]
    return ", ".join(
        parts + ([pluralize(row.seq_q, "query", "queries")] if row.seq_q != row.seq_k else [])
    )


def problem_words(row: Measurement) -> str:
    """One problem in words: 'd 128, fp16, causal, 16 heads, 16 x 4096', with batch x length at the
    end."""
    return f"{describe(row)}, {row.batch} x {row.seq_k}"


def setting_words(settings: Iterable[Setting]) -> dict[Setting, str]:
    """Each setting by the first facts that distinguish it from the others; '' if there is only
    one."""
    facts = {setting: setting_facts(setting) for setting in settings}
    told: dict[Setting, tuple[str, ...]] = dict.fromkeys(facts, ())
    for name in next(iter(facts.values()), {}):
        longer = {setting: (*told[setting], known[name]) for setting, known in facts.items()}
        if len(set(longer.values())) > len(set(told.values())):
            told = longer
    return {
        setting: ", ".join(filter(None, words)) or ("environment not named" if words else "")
        for setting, words in told.items()
    }


def titles(rows: Sequence[Measurement]) -> list[str]:
    """A title for the group of each row.

    A title describes the problems, and names the GPU if there are several. If groups share a
    description, the title also has the batch and the facts of the setting in which they differ.
    """
    several_gpus = len({row.gpu for row in rows}) > 1

    def about(row: Measurement) -> tuple[str, ...]:
        return (describe(row), *[gpu_words(row.gpu)] * several_gpus)

    alike: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        alike.setdefault(about(row), []).append(row)
    settings = {
        words: setting_words(dict.fromkeys(map(setting_of, found)))
        for words, found in alike.items()
    }
    made = []
    for row in rows:
        words = about(row)
        several = len({other.batch for other in alike[words]}) > 1
        parts = (*words, f"batch {row.batch}" if several else "", settings[words][setting_of(row)])
        made.append(", ".join(filter(None, parts)))
    return made


def peer_order(names: Iterable[str]) -> list[str]:
    """FlashAttention-2 and cuDNN first, then the other peers in their given order."""
    found = dict.fromkeys(names)
    return [name for name in BASELINES if name in found] + [
        name for name in found if name not in BASELINES
    ]


# --- overview ------------------------------------------------------------------------------------


def ratios(points: Iterable[Point], peer: str) -> list[float]:
    """flashsmith's throughput over the peer's, for the points that have both."""
    return [ratio for point in points if (ratio := point.ratio(peer))]


def last_measured(points: Iterable[Point]) -> list[Point]:
    """For each problem and GPU, the most recently measured point of all versions and settings."""
    last: dict[Any, Point] = {}
    for point in points:
        key = (point.row.gpu, *_group_key(point.row)[1:], *sizes(point.row))
        if key not in last or point.row.time >= last[key].row.time:
            last[key] = point
    return list(last.values())


def summaries(points: Iterable[Point]) -> list[Summary]:
    """The points with a flashsmith rate, by GPU, operation and unit."""
    found = []
    for gpu, on_gpu in by_gpu(point for point in points if point.flashsmith).items():
        parts: dict[tuple[str, bool], list[Point]] = {}
        for point in on_gpu:
            operation = split_semantics(point.row)[0]
            parts.setdefault((operation, point.row.is_memory_bound), []).append(point)
        for operation, bound in sorted(parts, key=lambda part: (_rank(part[0]), part)):
            found.append(Summary(gpu, operation, tuple(parts[operation, bound])))
    return found


def _rank(operation: str) -> int:
    """Sort key of operations: forward, then backward, then decode, then others."""
    known = ("forward", "backward", "decode")
    name = operation.partition(",")[0]
    return known.index(name) if name in known else len(known)
