"""Cells and groups: one problem's contenders beside each other, and problems that share a chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.report.results import setting_of
from flashsmith.benchmark.rows import BenchRow

YARDSTICKS = ("fa2", "cudnn")
OURS = "ours"


@dataclass(frozen=True)
class Cell:
    """One problem, measured under one protocol in one environment.

    `chosen` is attention() with no config; `kernels` are ours by config, `peers` by name; all of
    them passed their check and have a time. `wrong` are rows of ours and of peers that did not.
    """

    row: BenchRow
    chosen: BenchRow | None
    kernels: dict[str, BenchRow]
    peers: dict[str, BenchRow]
    wrong: tuple[BenchRow, ...]

    @property
    def best_kernel(self) -> BenchRow | None:
        """The fastest config that was asked for by name."""
        return min(self.kernels.values(), key=_ms, default=None)

    @property
    def ours(self) -> BenchRow | None:
        """What counts as ours: attention() where it was measured, else the fastest config."""
        return self.chosen or self.best_kernel

    @property
    def best_peer(self) -> BenchRow | None:
        """The fastest peer."""
        return min(self.peers.values(), key=_ms, default=None)

    def ratio(self, peer: str) -> float | None:
        """Our throughput over the peer's; None unless both were measured."""
        return _over(self.ours, self.peers.get(peer))

    @property
    def ratio_to_best(self) -> float | None:
        """Our throughput over that of the fastest peer."""
        return _over(self.ours, self.best_peer)


def _ms(row: BenchRow) -> float:
    return row.ms if row.ms is not None else float("inf")


def _over(ours: BenchRow | None, peer: BenchRow | None) -> float | None:
    if ours is None or peer is None or not ours.ms or not peer.ms:
        return None
    return peer.ms / ours.ms


@dataclass(frozen=True)
class Group:
    """Cells that differ in length (and batch) only: one chart."""

    cells: tuple[Cell, ...]

    @property
    def first(self) -> BenchRow:
        """A row that says what all cells share."""
        return self.cells[0].row


def make_cells(rows: Iterable[BenchRow]) -> list[Cell]:
    """A cell for each problem, protocol and environment, in the order of the groups."""
    by_key: dict[Any, list[BenchRow]] = {}
    for row in rows:
        by_key.setdefault((_group_key(row), _sizes(row)), []).append(row)
    cells = [_cell(found) for found in by_key.values()]
    return sorted(cells, key=lambda cell: (_order(cell.row), *_sizes(cell.row)))


def _cell(rows: Sequence[BenchRow]) -> Cell:
    timed = [row for row in rows if row.verdict == "pass" and row.ms]
    named = [row for row in timed if row.kind == "ours" and row.contender != OURS]
    return Cell(
        row=rows[0],
        chosen=_median([row for row in timed if row.kind == "ours" and row.contender == OURS]),
        kernels=_medians(named, lambda row: row.config or row.contender),
        peers=_medians([row for row in timed if row.kind == "peer"], lambda row: row.contender),
        wrong=tuple(row for row in rows if row.verdict in ("fail", "error")),
    )


def _medians(rows: Sequence[BenchRow], name: Any) -> dict[str, BenchRow]:
    found: dict[str, BenchRow] = {}
    for key in dict.fromkeys(map(name, rows)):
        median = _median([row for row in rows if name(row) == key])
        if median is not None:
            found[key] = median
    return found


def _median(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Of a contender's repeats the one in the middle (the slower of two)."""
    if not rows:
        return None
    middle = statistics.median_high([_ms(row) for row in rows])
    return next(row for row in rows if row.ms == middle)


def make_groups(cells: Iterable[Cell]) -> list[Group]:
    """Cells by what they share; lengths of one batch, or of one that shrinks as lengths grow.

    A batch that is halved where lengths pass a limit leaves more than half of the tokens.
    """
    chains: dict[Any, list[list[Cell]]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.row.seq_k, -cell.row.batch)):
        found = chains.setdefault(_group_key(cell.row), [])
        open_ones = [chain for chain in found if _continues(chain[-1].row, cell.row)]
        if open_ones:
            min(open_ones, key=lambda chain: chain[-1].row.batch).append(cell)
        else:
            found.append([cell])
    made = [Group(tuple(chain)) for found in chains.values() for chain in found]
    return sorted(made, key=lambda group: (_order(group.first), -group.first.batch))


def _continues(last: BenchRow, row: BenchRow) -> bool:
    """Whether a row goes on where a chain of growing lengths ends: about as many tokens or more."""
    longer = row.seq_k > last.seq_k
    tokens, before = row.batch * row.seq_k, last.batch * last.seq_k
    return longer and row.batch <= last.batch and 2 * tokens > before


def _group_key(row: BenchRow) -> tuple[Any, ...]:
    """What a chart's problems share; a query length apart from the keys' is shared too."""
    seq_q = None if row.seq_q == row.seq_k else row.seq_q
    heads = (row.heads_q, row.heads_k)
    return (setting_of(row), row.d, row.dtype, row.semantics, heads, seq_q)


def _order(row: BenchRow) -> tuple[Any, ...]:
    """Plain problems before masked, equal heads before grouped, d 128 first."""
    semantics = (row.semantics != "plain", len(row.semantics), row.semantics)
    return (
        row.d != 128, row.d, row.heads_q != row.heads_k, row.seq_q != row.seq_k, semantics,
        row.dtype != "fp16", row.dtype, row.heads_q, row.heads_k, str(setting_of(row)),
    )  # fmt: skip


def _sizes(row: BenchRow) -> tuple[int, int, int]:
    return (row.seq_k, row.seq_q, row.batch)


def describe(row: BenchRow) -> str:
    """What a group is about: 'd 128, fp16, causal, heads 32:8'."""
    heads = f"{row.heads_q}" + (f":{row.heads_k}" if row.heads_k != row.heads_q else "")
    mask = "full" if row.semantics == "plain" else row.semantics.replace("+", ", ")
    parts = [f"d {row.d}", row.dtype, mask, f"{heads} heads"]
    return ", ".join(parts + ([f"{row.seq_q} queries"] if row.seq_q != row.seq_k else []))


def where(row: BenchRow) -> str:
    """One problem in words, with its length and batch."""
    return f"{describe(row)}, length {row.seq_k}, batch {row.batch}"


def peer_order(names: Iterable[str]) -> list[str]:
    """FlashAttention-2 and cuDNN first, then as they come."""
    found = list(dict.fromkeys(names))
    return [name for name in YARDSTICKS if name in found] + [
        name for name in found if name not in YARDSTICKS
    ]
