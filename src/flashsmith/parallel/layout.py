"""Divides sequences among ranks, and determines the rectangles of scores that a rank computes.

For P ranks, a sequence is cut into 2P chunks, whose lengths differ by at most one. Rank r has the
chunks r and 2P - 1 - r, so that all ranks have the same work under a causal mask. Everything here
is computed from lengths, without tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

Span = tuple[int, int]  # Begin and end


class RowRun(NamedTuple):
    """Consecutive positions of a sequence that are also consecutive rows of a tensor."""

    position: int
    row: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How sequences of the given lengths are divided among a number of ranks.

    A rank's tensor has the rank's parts of all sequences, one after another.
    """

    lengths: tuple[int, ...]
    ranks: int

    def chunk(self, length: int, index: int) -> Span:
        """Where the chunk ``index`` (of 2P) begins and ends in a sequence of this length."""
        count = 2 * self.ranks
        return index * length // count, (index + 1) * length // count

    def chunks_of(self, rank: int) -> Span:
        return rank, 2 * self.ranks - 1 - rank

    @cached_property
    def _runs(self) -> tuple[tuple[tuple[RowRun, ...], ...], ...]:
        return tuple(tuple(self._runs_of(rank)) for rank in range(self.ranks))

    def _runs_of(self, rank: int) -> Iterable[tuple[RowRun, ...]]:
        row = 0
        for length in self.lengths:
            spans = joined(self.chunk(length, chunk) for chunk in self.chunks_of(rank))
            runs = []
            for begin, end in spans:
                runs.append(RowRun(begin, row, end - begin))
                row += end - begin
            yield tuple(runs)

    def runs(self, rank: int) -> tuple[tuple[RowRun, ...], ...]:
        """For each sequence, the nonempty parts that a rank has."""
        return self._runs[rank]

    def whole(self) -> tuple[tuple[RowRun, ...], ...]:
        """For each sequence, its parts in order, as rows of a tensor that has all sequences."""
        return tuple(
            (RowRun(0, begin, length),) if length else ()
            for begin, length in zip(self.starts, self.lengths, strict=False)
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each sequence in a tensor that has all sequences, followed by the number
        of rows."""
        return tuple(accumulate(self.lengths, initial=0))

    def rows(self, rank: int) -> int:
        """The number of rows that a rank has."""
        return sum(run.length for runs in self.runs(rank) for run in runs)

    @cached_property
    def most_rows(self) -> int:
        return max(self.rows(rank) for rank in range(self.ranks))

    def spans(self, rank: int) -> list[Span]:
        """The rows that a rank has, as spans of the tensor that has all sequences."""
        return [
            (start + run.position, start + run.position + run.length)
            for start, runs in zip(self.starts, self.runs(rank), strict=False)
            for run in runs
        ]

    def places(self) -> list[tuple[int, Span]]:
        """Describes a tensor that has all sequences, part by part in order: for each part, the rank
        that has it, and the span of that rank's rows."""
        found = []
        for rank in range(self.ranks):
            rows = [run for runs in self.runs(rank) for run in runs]
            for (begin, _), run in zip(self.spans(rank), rows, strict=True):
                found.append((begin, rank, (run.row, run.row + run.length)))
        return [(rank, rows) for _, rank, rows in sorted(found)]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The nonempty spans, of which adjacent ones are merged."""
    found: list[Span] = []
    for begin, end in spans:
        if begin == end:
            continue
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


class Limits(NamedTuple):
    """A window, in the form that attention() takes: how many keys a query sees before and after its
    own position."""

    left: int | None = None
    right: int | None = None


class ScoreBlock(NamedTuple):
    """A rectangle of scores: rows of the query tensor, rows of the key tensor, and the window for
    attention().

    attention() aligns masks to the bottom right of the rectangle. The window is adjusted for this,
    so that rows are masked by their positions in the sequence.
    """

    q: Span
    k: Span
    limits: Limits


def pieces(
    q_runs: Sequence[RowRun],
    k_runs: Sequence[RowRun],
    ahead: int,
    mask: Limits,
    chunk: int = 1,
) -> list[ScoreBlock]:
    """Covers the scores of some queries, with the keys that they see, by as few rectangles as
    possible.

    Queries and keys are parts of one sequence.

    ahead: the number of keys minus the number of queries of the whole sequence, so that query i is
        at key i + ahead.
    chunk: keys before a window are left out only in multiples of this number, counted from the
        first key of the sequence.
    """
    found = [piece for q in q_runs for k in k_runs if (piece := _piece(q, k, ahead, mask, chunk))]
    return _in_fewer(found)


def _piece(q: RowRun, k: RowRun, ahead: int, mask: Limits, chunk: int) -> ScoreBlock | None:
    rows, keys = q.length, k.length
    first = q.position + ahead  # The position of the first query among the keys
    if mask.right is not None:
        # Keys after the last one that the last query sees are left out.
        keys = min(keys, first + rows + mask.right - k.position)
    if keys <= 0:
        return None
    if mask.left is not None:
        # Keys before the first one that the first query sees are left out, and queries after the
        # last one that sees the last key.
        rows = min(rows, k.position + keys + mask.left - first)
        if rows <= 0:
            return None
        unseen = max(0, (first - mask.left) // chunk * chunk - k.position)
        keys -= unseen
        k = RowRun(k.position + unseen, k.row + unseen, keys)
        if keys <= 0:
            return None
    # attention() places the last query at the position of the last key. Without a correction, the
    # positions of the queries would be too small by this number.
    shift = (first + rows) - (k.position + keys)
    left = None if mask.left is None or mask.left - shift >= keys - 1 else mask.left - shift
    right = None if mask.right is None or mask.right + shift >= rows - 1 else mask.right + shift
    return ScoreBlock((q.row, q.row + rows), (k.row, k.row + keys), Limits(left, right))


FULL = Limits()
CAUSAL = Limits(None, 0)


def _in_fewer(found: list[ScoreBlock]) -> list[ScoreBlock]:
    """Merges adjacent rectangles if attention() can compute them as one."""
    kinds = [piece.limits for piece in found]
    if kinds == [CAUSAL, FULL, CAUSAL]:
        early, both, late = found
        if (
            early.q[1] == both.q[0]
            and early.k == both.k
            and both.q == late.q
            and both.k[1] == late.k[0]
            and _length(late.q) == _length(late.k)
        ):
            return [ScoreBlock((early.q[0], late.q[1]), (early.k[0], late.k[1]), CAUSAL)]
    merged: list[ScoreBlock] = []
    for piece in found:
        last = merged[-1] if merged else None
        both_full = last is not None and last.limits == piece.limits == FULL
        if last and both_full and last.q == piece.q and last.k[1] == piece.k[0]:
            merged[-1] = ScoreBlock(last.q, (last.k[0], piece.k[1]), FULL)
        else:
            merged.append(piece)
    if len(merged) == 2:
        one, two = merged
        if one.limits == two.limits == FULL and one.k == two.k and one.q[1] == two.q[0]:
            return [ScoreBlock((one.q[0], two.q[1]), one.k, FULL)]
    return merged


def _length(span: Span) -> int:
    return span[1] - span[0]


def batches(found: Iterable[Sequence[ScoreBlock]]) -> list[list[ScoreBlock]]:
    """Divides the rectangles of several packed sequences among attention() calls.

    In one call, all rectangles have the same window, and each sequence has at most one.
    """
    calls: dict[tuple[Limits, int], list[ScoreBlock]] = defaultdict(list)
    for of_sequence in found:
        counts: dict[Limits, int] = defaultdict(int)
        for piece in of_sequence:
            calls[piece.limits, counts[piece.limits]].append(piece)
            counts[piece.limits] += 1
    return list(calls.values())
