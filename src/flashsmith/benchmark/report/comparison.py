"""What is compared with what: one problem's implementations, and problems that share a chart."""

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
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError
from flashsmith.operations import parse_kind, semantic_words


@dataclass(frozen=True)
class Point:
    """One problem, measured under one protocol in one environment.

    `chosen` is attention() with no config, `free` the same with a free split; `kernels` are
    flashsmith's by config, `peers` by name; all of them passed their check and have a time. `wrong`
    are the rows that did not.
    """

    row: Measurement
    chosen: Measurement | None
    kernels: dict[str, Measurement]
    peers: dict[str, Measurement]
    wrong: tuple[Measurement, ...]
    free: Measurement | None = None

    @property
    def shown(self) -> bool:
        """Whether anything was timed, or wrong; kernels may have been proven only."""
        return bool(self.flashsmith or self.peers or self.wrong)

    @property
    def best_kernel(self) -> Measurement | None:
        """The fastest config that was asked for by name."""
        return min(self.kernels.values(), key=_ms, default=None)

    @property
    def flashsmith(self) -> Measurement | None:
        """What counts as flashsmith's: attention() where it was measured, else the best config."""
        return self.chosen or self.best_kernel

    @property
    def best_peer(self) -> Measurement | None:
        """The fastest peer."""
        return min(self.peers.values(), key=_ms, default=None)

    def failure(self, peer: str | None = None) -> Measurement | None:
        """A wrong row of the peer's, or of flashsmith's own."""
        own = peer is None
        names = (row for row in self.wrong if is_flashsmith(row) == own)
        return next((row for row in names if own or row.implementation == peer), None)

    def ratio(self, peer: str) -> float | None:
        """flashsmith's throughput over the peer's; None unless both were measured."""
        return _over(self.flashsmith, self.peers.get(peer))

    @property
    def ratio_to_best(self) -> float | None:
        """flashsmith's throughput over that of the fastest peer."""
        return _over(self.flashsmith, self.best_peer)


def _ms(row: Measurement) -> float:
    return row.ms if row.ms is not None else math.inf


def _over(row: Measurement | None, peer: Measurement | None) -> float | None:
    return peer.ms / row.ms if row and peer and row.ms and peer.ms else None


@dataclass(frozen=True)
class ProblemGroup:
    """Points that differ in length (and batch) only: one chart."""

    points: tuple[Point, ...]

    @property
    def first(self) -> Measurement:
        """A row that says what all points share."""
        return self.points[0].row


@dataclass(frozen=True)
class Summary:
    """What one operation does on one GPU: points of one unit on which flashsmith has a figure."""

    gpu: str
    operation: str
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """For example 'forward on NVIDIA H200'."""
        return f"{self.operation} on {gpu_words(self.gpu)}"

    @property
    def fastest(self) -> Measurement:
        """flashsmith's highest rate."""
        rows = [row for point in self.points if (row := point.flashsmith)]
        return max(rows, key=lambda row: rate_of(row) or 0.0)

    @property
    def kinds(self) -> dict[tuple[int, str], list[Point]]:
        """The points by head dimension and mask, in that order."""
        found: dict[tuple[int, str], list[Point]] = {}
        for point in self.points:
            found.setdefault((point.row.d, split_semantics(point.row)[1]), []).append(point)
        return dict(sorted(found.items()))


def make_points(rows: Iterable[Measurement]) -> list[Point]:
    """A point for each problem, protocol and environment, in the order of the groups."""
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
    """By name: of several repeats the one in the middle (the slower of two)."""
    repeats: dict[str, list[Measurement]] = {}
    for row in rows:
        repeats.setdefault(name(row), []).append(row)
    middles = {key: statistics.median_high(map(_ms, found)) for key, found in repeats.items()}
    return {
        key: next(row for row in found if row.ms == middles[key]) for key, found in repeats.items()
    }


def make_groups(points: Iterable[Point]) -> list[ProblemGroup]:
    """Points by what they share; lengths of one batch, or of one that shrinks as lengths grow. Over
    caches, where memory is the limit, all sizes make one chart.

    A batch that is halved where lengths pass a limit leaves more than half of the tokens.
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
    """Whether a row goes on where a chain of growing lengths ends: about as many tokens or more."""
    if row.is_memory_bound:
        return sizes(last) != sizes(row)
    tokens, before = row.batch * row.seq_k, last.batch * last.seq_k
    return row.seq_k > last.seq_k and row.batch <= last.batch and 2 * tokens > before


def _by_bytes(chain: Sequence[Point]) -> Sequence[Point]:
    """Caches from small to large; other points as they are."""
    if not chain[0].row.is_memory_bound:
        return chain
    return sorted(chain, key=lambda point: (point.row.batch * point.row.seq_k, point.row.batch))


def _chart_key(row: Measurement) -> tuple[Any, ...]:
    """What the problems of a chart share: of one protocol small and large caches are measured by
    different means."""
    setting, *others = _group_key(row)
    if row.is_memory_bound:
        setting = setting._replace(protocol=setting.protocol.removesuffix(f", {IN_GRAPHS}"))
    return (setting, *others)


def _group_key(row: Measurement) -> tuple[Any, ...]:
    """What a chart's problems share; a query length apart from the keys' is shared too."""
    seq_q = None if row.seq_q == row.seq_k else row.seq_q
    return (setting_of(row), row.d, row.dtype, row.semantics, row.heads_q, row.heads_k, seq_q)


def by_gpu(points: Iterable[Point]) -> dict[str, list[Point]]:
    """The points of each GPU, that of most points first."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.row.gpu, []).append(point)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def order(row: Measurement) -> tuple[Any, ...]:
    """Sorts plain problems before masked ones, equal heads before grouped ones, d 128 first."""
    semantics = (row.semantics != "plain", len(row.semantics), row.semantics)
    return (
        row.d != 128, row.d, row.heads_q != row.heads_k, row.seq_q != row.seq_k, semantics,
        row.dtype != "fp16", row.dtype, row.heads_q, row.heads_k, str(setting_of(row)),
    )  # fmt: skip


def sizes(row: Measurement) -> tuple[int, int, int]:
    """What points of one group are sorted by."""
    return (row.seq_k, row.seq_q, row.batch)


# --- words ---------------------------------------------------------------------------------------


def mask_of(row: Measurement) -> str:
    """A problem's semantics in words: 'full', 'causal, packed'."""
    return "full" if row.semantics == "plain" else row.semantics.replace("+", ", ")


def split_semantics(row: Measurement) -> tuple[str, str]:
    """What a row computes, in words, and under which mask: ('backward, only dq', 'causal, packed').

    The operation of a package that is not installed is named by the row's first word.
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
    """A GPU's name, or that there is none."""
    return gpu or "a GPU that is not named"


def facets(row: Measurement, without: str = "") -> dict[str, str]:
    """What the page's filters choose problems by."""
    found = {"d": str(row.d), "dtype": row.dtype, "mask": mask_of(row)}
    return {name: value for name, value in found.items() if name != without}


def describe(row: Measurement) -> str:
    """What a group is about: 'd 128, fp16, causal, 32:8 heads'."""
    heads = f"{row.heads_q}" + (f":{row.heads_k}" if row.heads_k != row.heads_q else "")
    parts = [f"d {row.d}", row.dtype, mask_of(row), f"{heads} heads"]
    return ", ".join(
        parts + ([counted(row.seq_q, "query", "queries")] if row.seq_q != row.seq_k else [])
    )


def problem_words(row: Measurement) -> str:
    """One problem: 'd 128, fp16, causal, 16 heads, 16 x 4096', batch x length at the end."""
    return f"{describe(row)}, {row.batch} x {row.seq_k}"


def setting_words(settings: Iterable[Setting]) -> dict[Setting, str]:
    """Each setting by the first facts that tell all of them apart; '' where there is only one."""
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
    """A title for the group of each row: what it is about, the GPU where there are several, and
    where several are about the same, the batch and the facts of the setting that tell them
    apart."""
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
    """FlashAttention-2 and cuDNN first, then as they come."""
    found = dict.fromkeys(names)
    return [name for name in BASELINES if name in found] + [
        name for name in found if name not in BASELINES
    ]


# --- overview ------------------------------------------------------------------------------------


def ratios(points: Iterable[Point], peer: str) -> list[float]:
    """flashsmith's throughput over the peer's, of the points that have both."""
    return [ratio for point in points if (ratio := point.ratio(peer))]


def last_measured(points: Iterable[Point]) -> list[Point]:
    """Of points of one problem on one GPU, in several versions or settings, the one that was
    measured last."""
    last: dict[Any, Point] = {}
    for point in points:
        key = (point.row.gpu, *_group_key(point.row)[1:], *sizes(point.row))
        if key not in last or point.row.time >= last[key].row.time:
            last[key] = point
    return list(last.values())


def summaries(points: Iterable[Point]) -> list[Summary]:
    """Of each GPU and operation what flashsmith has a figure on: one headline, and one unit."""
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
    """Forward passes first, then backward ones, then over caches, then others."""
    known = ("forward", "backward", "decode")
    name = operation.partition(",")[0]
    return known.index(name) if name in known else len(known)
