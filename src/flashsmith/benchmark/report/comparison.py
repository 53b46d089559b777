"""Comparisons: the implementations that were measured on one problem, and which problems share a
chart."""

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
    """All rows of one problem that were measured with the same protocol in the same environment.

    `chosen` is attention(), which chooses its config itself; `free` is the same function with
    split='free'. `kernels` maps configs to the rows of their kernels, and `peers` maps names to the
    rows of peers. All these rows passed the check and have a time. `wrong` are the rows that failed
    the check or did not finish.
    """

    row: Measurement
    chosen: Measurement | None
    kernels: dict[str, Measurement]
    peers: dict[str, Measurement]
    wrong: tuple[Measurement, ...]
    free: Measurement | None = None

    @property
    def shown(self) -> bool:
        """Whether the point has a row with a time or a failure.

        It has none if its kernels were only checked, not timed.
        """
        return bool(self.flashsmith or self.peers or self.wrong)

    @property
    def best_kernel(self) -> Measurement | None:
        """The fastest of the kernels that were selected by their configs."""
        return min(self.kernels.values(), key=_ms, default=None)

    @property
    def flashsmith(self) -> Measurement | None:
        """The row that represents flashsmith: attention()'s row if it was measured, otherwise the
        fastest config's."""
        return self.chosen or self.best_kernel

    @property
    def best_peer(self) -> Measurement | None:
        """The fastest peer."""
        return min(self.peers.values(), key=_ms, default=None)

    def failure(self, peer: str | None = None) -> Measurement | None:
        """A failed row of the peer, or of flashsmith if `peer` is None; None if there is no such
        row."""
        own = peer is None
        names = (row for row in self.wrong if is_flashsmith(row) == own)
        return next((row for row in names if own or row.implementation == peer), None)

    def ratio(self, peer: str) -> float | None:
        """flashsmith's throughput divided by the peer's; None unless both were measured."""
        return _over(self.flashsmith, self.peers.get(peer))

    @property
    def ratio_to_best(self) -> float | None:
        """flashsmith's throughput divided by the fastest peer's; None unless both were measured."""
        return _over(self.flashsmith, self.best_peer)


def _ms(row: Measurement) -> float:
    return row.ms if row.ms is not None else math.inf


def _over(row: Measurement | None, peer: Measurement | None) -> float | None:
    return peer.ms / row.ms if row and peer and row.ms and peer.ms else None


@dataclass(frozen=True)
class ProblemGroup:
    """The points of one chart: problems that differ only in length and batch."""

    points: tuple[Point, ...]

    @property
    def first(self) -> Measurement:
        """The first row, which represents the properties that all points share."""
        return self.points[0].row


@dataclass(frozen=True)
class Summary:
    """The results of one operation on one GPU: the points for which flashsmith has a rate, all in
    one unit."""

    gpu: str
    operation: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """For example 'forward on NVIDIA H200'."""
        return f"{self.operation} on {gpu_words(self.gpu)}"

    @property
    def fastest(self) -> Measurement:
        """The row in which flashsmith has its highest rate."""
        rows = [row for point in self.points if (row := point.flashsmith)]
        return max(rows, key=lambda row: rate_of(row) or 0.0)

    @property
    def kinds(self) -> dict[tuple[int, str], list[Point]]:
        """The points by (head dimension, mask), in sorted order."""
        found: dict[tuple[int, str], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.row.d, split_semantics(point.row)[1]), []).append(point)
        return dict(sorted(found.items()))


def make_points(rows: Iterable[Measurement]) -> list[Point]:
    """Groups rows into points by problem, protocol and environment; the points are sorted in the
    same order as groups."""
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
    """One row for each name.

    If a name has several rows, the row with the median time is taken; if their number is even, the
    slower of the middle two.
    """
    repeats: dict[str, list[Measurement]] = {}
    for row in rows:
        repeats.setdefault(name(row), []).append(row)
    middles = {key: statistics.median_high(map(_ms, found)) for key, found in repeats.items()}
    return {
        key: next(row for row in found if row.ms == middles[key]) for key, found in repeats.items()
    }


def make_groups(points: Iterable[Point]) -> list[ProblemGroup]:
    """Groups the points that share a chart.

    These points differ in length; the batch is the same or shrinks as the length grows. Problems
    over a cache, which are limited by memory, share a chart for all sizes.

    A row continues a chart if it is longer than the last row and has more than half as many tokens.
    This allows the batch to be halved when the length grows.
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
    """Whether a row continues a group, which means that it is longer than the group's last row and
    has more than half as many tokens."""
    if row.is_memory_bound:
        return sizes(last) != sizes(row)
    tokens, before = row.batch * row.seq_k, last.batch * last.seq_k
    return row.seq_k > last.seq_k and row.batch <= last.batch and 2 * tokens > before


def _by_bytes(chain: Sequence[Point]) -> Sequence[Point]:
    """Sorts points over a cache by the size of the cache; other points keep their order."""
    if not chain[0].row.is_memory_bound:
        return chain
    return sorted(chain, key=lambda point: (point.row.batch * point.row.seq_k, point.row.batch))


def _chart_key(row: Measurement) -> tuple[Any, ...]:
    """The properties that all problems of a chart share.

    The ending ', in graphs' of the protocol is ignored, so that small and large caches share a
    chart.
    """
    setting, *others = _group_key(row)
    if row.is_memory_bound:
        setting = setting._replace(protocol=setting.protocol.removesuffix(f", {IN_GRAPHS}"))
    return (setting, *others)


def _group_key(row: Measurement) -> tuple[Any, ...]:
    """The properties that all problems of a group share; the length of queries is included if it
    differs from the length of keys."""
    seq_q = None if row.seq_q == row.seq_k else row.seq_q
    return (setting_of(row), row.d, row.dtype, row.semantics, row.heads_q, row.heads_k, seq_q)


def by_gpu(points: Iterable[Point]) -> dict[str, list[Point]]:
    """The points by GPU; the GPU with the most points is first."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.row.gpu, []).append(point)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def order(row: Measurement) -> tuple[Any, ...]:
    """The key by which rows are sorted: plain problems before masked ones, equal heads before
    grouped ones, d 128 first."""
    semantics = (row.semantics != "plain", len(row.semantics), row.semantics)
    return (
        row.d != 128, row.d, row.heads_q != row.heads_k, row.seq_q != row.seq_k, semantics,
        row.dtype != "fp16", row.dtype, row.heads_q, row.heads_k, str(setting_of(row)),
    )  # fmt: skip


def sizes(row: Measurement) -> tuple[int, int, int]:
    """The key by which the points of a group are sorted."""
    return (row.seq_k, row.seq_q, row.batch)


# --- words ---------------------------------------------------------------------------------------


def mask_of(row: Measurement) -> str:
    """A problem's semantics in words, such as 'full' or 'causal, packed'."""
    return "full" if row.semantics == "plain" else row.semantics.replace("+", ", ")


def split_semantics(row: Measurement) -> tuple[str, str]:
    """A row's operation and its mask, as words, such as ('backward, only dq', 'causal, packed').

    If the package of the operation is not installed, the first word of the row is taken as the
    operation's name.
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
    """The name of a GPU, or a phrase if it is unknown."""
    return gpu or "an unnamed GPU"


def facets(row: Measurement, without: str = "") -> dict[str, str]:
    """The values by which the filters of the page select problems."""
    found = {"d": str(row.d), "dtype": row.dtype, "mask": mask_of(row)}
    return {name: value for name, value in found.items() if name != without}


def describe(row: Measurement) -> str:
    """What the problems of a group have in common, in words: 'd 128, fp16, causal, 32:8 heads'."""
    heads = f"{row.heads_q}" + (f":{row.heads_k}" if row.heads_k != row.heads_q else "")
    parts = [f"d {row.d}", row.dtype, mask_of(row), f"{heads} heads"]
    return ", ".join(
        parts + ([pluralize(row.seq_q, "query", "queries")] if row.seq_q != row.seq_k else [])
    )


def problem_words(row: Measurement) -> str:
    """One problem in words, with batch x length at the end: 'd 128, fp16, causal, 16 heads, 16 x
    4096'."""
    return f"{describe(row)}, {row.batch} x {row.seq_k}"


def setting_words(settings: Iterable[Setting]) -> dict[Setting, str]:
    """Each setting in words, namely the first facts that distinguish it from the others; '' if
    there is only one setting."""
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
    """The titles of groups; each row represents one group.

    A title describes the problems. If there are several GPUs, it also names the GPU. If several
    groups have the same description, their titles also contain the batch and the facts in which
    their settings differ.
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
    """Sorts the names of peers: FlashAttention-2 and cuDNN come first, the others in the given
    order."""
    found = dict.fromkeys(names)
    return [name for name in BASELINES if name in found] + [
        name for name in found if name not in BASELINES
    ]


# --- overview ------------------------------------------------------------------------------------


def ratios(points: Iterable[Point], peer: str) -> list[float]:
    """flashsmith's throughput divided by the peer's, for each point that has both."""
    return [ratio for point in points if (ratio := point.ratio(peer))]


def last_measured(points: Iterable[Point]) -> list[Point]:
    """For each problem and GPU, the point that was measured last, over all versions and
    settings."""
    last: dict[Any, Point] = {}
    for point in points:
        key = (point.row.gpu, *_group_key(point.row)[1:], *sizes(point.row))
        if key not in last or point.row.time >= last[key].row.time:
            last[key] = point
    return list(last.values())


def summaries(points: Iterable[Point]) -> list[Summary]:
    """Groups the points for which flashsmith has a rate by GPU, operation and unit."""
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
    """The key by which operations are sorted: forward, backward, decode, others."""
    known = ("forward", "backward", "decode")
    name = operation.partition(",")[0]
    return known.index(name) if name in known else len(known)
