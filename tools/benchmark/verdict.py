#!/usr/bin/env python3
"""Compares our kernels with others, from interleaved rounds of `flashsmith bench`.

    for round in 0 1 2 3 4 5; do
        flashsmith bench --cells public --protocol interleaved --rotation $round \\
            --peers fa2,cudnn,flash_attn_4 --csv verdict-$round.csv
    done
    python tools/benchmark/verdict.py verdict-*.csv > verdict.md

Each file is one round, in which the implementations for a problem (a cell) were launched
alternately, and so at the same clock. --pack FILE.csv.gz also writes all rounds to one file, with a
column for their names; this file can be given instead of the rounds. Rounds of several revisions
are pooled only with --same-code. Give it if their kernels have the same machine code.

Ratios are taken within a round, and pooled over the rounds of a cell. The tables show their median,
and the interval that contains the true median with a confidence of at least 95%. The interval is
given by order statistics, which need six rounds. With fewer rounds, the minimum and the maximum are
shown, and nothing is claimed.

pip cannot install FlashAttention 3. So its speed is taken from its ratio to cuDNN on another day
(--best). The same is done for FlashAttention 4 if it is in no round. Gradients (--cells backward)
are always compared with the best kernel of all by such a ratio, which is the geometric mean over
the two dtypes of a cell. These ratios are only accurate to 3%.

A cell is 'ahead' if the interval is above 1 for the peers in the rounds, and above 1.03 for the
ratio. It is 'behind' if one of them is below 1 (or 0.97 for the ratio), and 'level' otherwise. Rows
that were not interleaved are shown, but nothing is claimed for them.

The exit status is 1 if one of our kernels or a peer is wrong. It is also 1 if a cell of ours was
not measured in every round, because its fastest peer may be missing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashsmith.benchmark.bench_table import flop_formula
from flashsmith.benchmark.implementations import OURS
from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import read_rows, row_of
from flashsmith.benchmark.report.comparison import describe
from flashsmith.benchmark.rounds import PooledFigure, left_out
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.families import Problem
from flashsmith.operations import BACKWARD

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "h200"
BEST = (_FOLDER / "best-public.csv", _FOLDER / "best-public-backward.csv")
FA2, CUDNN, FA3, FA4 = "fa2", "cudnn", "flash_attn_3", "flash_attn_4"
NAMES = {OURS: "ours", CUDNN: "cuDNN", FA2: "FA2", FA3: "FA3", FA4: "FA4"}
IN_TURNS = "interleaved"
# How far a ratio from another day may be off. For single cells it differed by up to 4% between two
# days.
RATIO_TOLERANCE = 0.03
# Rounds are pooled only if these fields are equal.
SETTING = ("gpu", "driver", "cuda", "torch", "flashsmith", "revision", "config", "protocol")

Round = Mapping[Problem, Mapping[str, Measurement]]
# In a packed file, the column with the name of the row's round.
_ROUND = "round"
PACKED = ".csv.gz"


@dataclass(frozen=True)
class OtherDay:
    """Speeds relative to cuDNN on another day: of FlashAttention 3, and of the best kernel of
    all."""

    fa3: float
    best: float


@dataclass(frozen=True)
class Cell:
    """The rows of a problem: for each round in which our kernel was timed, the rows by
    implementation."""

    problem: Problem
    rounds: tuple[Mapping[str, Measurement], ...]
    other_day: OtherDay | None

    @property
    def row(self) -> Measurement:
        """Our row of the first round."""
        return self.rounds[0][OURS]

    @property
    def in_turns(self) -> bool:
        """Whether the implementations were launched alternately."""
        return self.row.protocol.split(",")[0] == IN_TURNS

    def rate(self, name: str) -> float | None:
        """The TFLOP/s of an implementation: the median over the rounds."""
        rates = [rate for rows in self.rounds if (rate := _rate(rows, name))]
        return statistics.median(rates) if rates else None

    def over(self, name: str) -> PooledFigure | None:
        """Our throughput divided by a peer's, pooled over the rounds."""
        return _pooled(_share(rows, _rate(rows, name)) for rows in self.rounds)

    @property
    def over_peers(self) -> PooledFigure | None:
        """In each round, our throughput divided by the fastest peer's; pooled."""
        return _pooled(_share(rows, _fastest(rows)) for rows in self.rounds)

    @property
    def over_other_day(self) -> PooledFigure | None:
        """Our throughput divided by that of the best kernel that is not in the rounds; its rate is
        that of cuDNN times the ratio of the other day."""
        return _pooled(_share(rows, self._by_ratio(rows)) for rows in self.rounds)

    def best_shares(self) -> list[float | None]:
        """For each round, our throughput divided by that of the best public kernel, in the round or
        by the ratio."""
        shares = []
        for rows in self.rounds:
            others = [rate for rate in (_fastest(rows), self._by_ratio(rows)) if rate]
            shares.append(_share(rows, max(others, default=None)))
        return shares

    @property
    def over_best(self) -> PooledFigure | None:
        """Our throughput divided by that of the best public kernel, pooled over the rounds."""
        return _pooled(self.best_shares())

    @property
    def verdict(self) -> str:
        """'ahead', 'level' or 'behind' by both intervals; '-' if nothing can be claimed."""
        peers, ratio = self.over_peers, self.over_other_day
        if not self.in_turns or peers is None or not peers.certain:
            return "-"
        if peers.high < 1 or (ratio and ratio.high < 1 - RATIO_TOLERANCE):
            return "behind"
        if peers.low > 1 and (ratio is None or ratio.low > 1 + RATIO_TOLERANCE):
            return "ahead"
        return "level"

    def _by_ratio(self, rows: Mapping[str, Measurement]) -> float | None:
        cudnn = _rate(rows, CUDNN)
        if self.other_day is None or cudnn is None:
            return None
        if _rate(rows, FA4) is None or self.problem.operation == BACKWARD.name:
            return cudnn * self.other_day.best
        return None if _rate(rows, FA3) else cudnn * self.other_day.fa3


def _rate(rows: Mapping[str, Measurement], name: str) -> float | None:
    row = rows.get(name)
    return row.tflops if row is not None and row.verdict == "pass" and row.tflops else None


def _fastest(rows: Mapping[str, Measurement]) -> float | None:
    rates = [_rate(rows, name) for name, row in rows.items() if row.kind == "peer"]
    return max((rate for rate in rates if rate), default=None)


def _share(rows: Mapping[str, Measurement], other: float | None) -> float | None:
    ours = _rate(rows, OURS)
    return ours / other if ours and other else None


def _pooled(shares: Iterable[float | None]) -> PooledFigure | None:
    known = [share for share in shares if share]
    return PooledFigure.of(known) if known else None


# --- reading -------------------------------------------------------------------------------------


def read_round(path: Path) -> Round:
    """The rows of a file, by problem and implementation.

    Raises ArgumentError if the file cannot be used, or has two rows for one implementation and
    problem.
    """
    return _as_round(read_rows(path), str(path))


def read_packed(path: Path) -> dict[str, Round]:
    """The rounds in a file that pack() wrote, by name. Raises the errors of read_round()."""
    by_round: dict[str, list[Measurement]] = {}
    records = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    for number, record in enumerate(records, 1):
        row = row_of(record, f"{path}, row {number}")
        by_round.setdefault(record[_ROUND], []).append(row)
    return {name: _as_round(rows, f"{path}, {name}") for name, rows in by_round.items()}


def pack(paths: Sequence[Path], to: Path) -> None:
    """Writes the rounds in CSV files to one compressed file; the names of the rounds are those of
    the files."""
    lines: list[dict[str, str]] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            lines += [{_ROUND: path.stem, **row} for row in csv.DictReader(file)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)))
    writer.writeheader()
    writer.writerows(lines)
    to.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _as_round(measured: Iterable[Measurement], path: str) -> Round:
    found: dict[Problem, dict[str, Measurement]] = {}
    for row in measured:
        rows = found.setdefault(row.problem, {})
        if row.implementation in rows:
            raise ArgumentError(
                f"{path}: {row.implementation} on '{row.problem}' is listed twice; a file is one "
                "round"
            )
        rows[row.implementation] = row
    return found


def read_best(paths: Sequence[Path]) -> dict[Problem, OtherDay]:
    """By problem, the speed of the best public kernels relative to cuDNN."""
    found = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                fa3 = float(row["fa3"]) / float(row["cudnn"])
                found[Problem.parse(row["problem"])] = OtherDay(fa3, float(row["best_over_cudnn"]))
    return found


def gaps(rounds: Mapping[str, Round]) -> list[str]:
    """What is missing or wrong in the rounds, as sentences."""
    problems = dict.fromkeys(problem for found in rounds.values() for problem in found)
    sentences = []
    for name, found in rounds.items():
        for problem in problems:
            row = found.get(problem, {}).get(OURS)
            if row is None:
                sentences.append(f"{name}: ours on '{problem}' was not measured")
            elif row.verdict != "pass" or not row.tflops:
                sentences.append(f"{name}: ours on '{problem}': {row.verdict} {row.note}".rstrip())
            sentences += [
                f"{name}: {peer.implementation} on '{problem}': {peer.verdict} {peer.note}".rstrip()
                for peer in found.get(problem, {}).values()
                if peer.kind == "peer" and peer.is_failure
            ]
    return sentences


def make_cells(
    rounds: Sequence[Round], best: Mapping[Problem, OtherDay], *, same_code: bool = False
) -> list[Cell]:
    """A cell for each problem on which our kernel was timed, in the order of the first round.

    ``same_code``: whether rounds may be of several revisions, whose kernels have the same machine
    code.

    Raises ArgumentError if the rounds of a cell have different GPUs, versions, configs or
    protocols.
    """
    cells = []
    for problem in dict.fromkeys(problem for found in rounds for problem in found):
        timed = [rows for found in rounds if _rate(rows := found.get(problem, {}), OURS)]
        if timed:
            _check_setting(problem, [rows[OURS] for rows in timed], same_code)
            cells.append(Cell(problem, tuple(timed), best.get(problem)))
    return cells


def _check_setting(problem: Problem, rows: Sequence[Measurement], same_code: bool) -> None:
    for name in SETTING:
        if same_code and name == "revision":
            continue
        values = sorted({getattr(row, name) for row in rows})
        if len(values) > 1:
            raise ArgumentError(
                f"'{problem}': rounds of {name} {' and '.join(values)} are not pooled; give only "
                "those of one"
            )


# --- the tables ----------------------------------------------------------------------------------


def report(cells: Sequence[Cell], rounds: int) -> str:
    """The tables as Markdown: first the cells whose best public kernel is known, then the
    others."""
    if not cells:
        return "no cell was measured\n"
    known = [cell for cell in cells if cell.other_day]
    others = [cell for cell in cells if not cell.other_day]
    parts = [_environment(cells, rounds)]
    for group in (known, others):
        if group:
            parts += [_table(group), _summary("best", group)]
    over: list[tuple[str, Callable[[Cell], PooledFigure | None]]] = [
        (NAMES[name], lambda cell, name=name: cell.over(name)) for name in (CUDNN, FA2, FA4)
    ]
    over.append(("best, by another day's ratio", lambda cell: cell.over_other_day))
    for name, share_of in over:
        shares = [(cell, share) for cell in cells if (share := share_of(cell))]
        if shares:
            least, share = min(shares, key=lambda pair: pair[1].median)
            mean = statistics.geometric_mean(share.median for _, share in shares)
            parts.append(
                f"ours / {name}: geometric mean {mean:.3f} over {len(shares)} cells, least "
                f"{share} ({least.problem})."
            )
    return "\n\n".join(parts) + "\n"


def _environment(cells: Sequence[Cell], rounds: int) -> str:
    row = cells[0].row
    revisions = " and ".join(dict.fromkeys(it[OURS].revision for it in cells[0].rounds))
    text = (
        f"{row.gpu}, driver {row.driver}, CUDA {row.cuda}, torch {row.torch}, flashsmith "
        f"{row.flashsmith} ({revisions}); {row.protocol}, {rounds} round(s): the median, and in "
        f"brackets its 95% interval; TFLOP/s of {flop_formula([cell.row for cell in cells])}, "
        "halved when causal."
    )
    if not all(cell.in_turns for cell in cells):
        text += " Contenders were not interleaved: nothing is claimed."
    elif left_out(min(len(cell.rounds) for cell in cells)) is None:
        text += " Fewer than six rounds have no such interval: least and most, and no claim."
    return text


def _table(cells: Sequence[Cell]) -> str:
    names = [n for n in (OURS, CUDNN, FA2, FA3, FA4) if any(cell.rate(n) for cell in cells)]
    head = ["problem", "batch", "seq", *(NAMES[name] for name in names), "ours / fastest peer"]
    by_ratio = any(cell.over_other_day for cell in cells)
    if by_ratio:
        head.append("ours / best, by another day's ratio")
    head += ["rounds", "verdict", "config"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for cell in cells:
        values = [describe(cell.row), str(cell.row.batch), str(cell.row.seq_k)]
        values += [_shown(cell.rate(name), ".0f") for name in names]
        values.append(_shown(cell.over_peers))
        if by_ratio:
            values.append(_shown(cell.over_other_day, ""))
        values += [str(len(cell.rounds)), cell.verdict, cell.row.config]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def _shown(value: float | PooledFigure | None, form: str = "") -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, PooledFigure) else format(value, form)


def _summary(name: str, cells: Sequence[Cell]) -> str:
    shown = [(cell, share) for cell in cells if (share := cell.over_best)]
    if not shown:
        return f"ours / {name}: no peer was measured."
    # The mean over all these cells is taken in each round, so that the means have an interval too.
    count = max(len(cell.rounds) for cell, _ in shown)
    by_round = [
        [share for share in shares if share]
        for shares in zip(*(_padded(cell, count) for cell, _ in shown), strict=True)
    ]
    means = [statistics.geometric_mean(s) for s in by_round if len(s) == len(shown)]
    mean = (
        str(PooledFigure.of(means))
        if means
        else f"{statistics.geometric_mean(share.median for _, share in shown):.3f}"
    )
    least, share = min(shown, key=lambda pair: pair[1].median)
    verdicts = [cell.verdict for cell, _ in shown]
    claim = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ahead", "level", "behind"))
    if "-" in verdicts:
        claim = "nothing claimed"
    return (
        f"ours / {name}: geometric mean {mean} over {len(shown)} cells, least {share} "
        f"({least.problem}); {claim}."
    )


def _padded(cell: Cell, count: int) -> list[float | None]:
    # A cell does not know which round is missing, so only complete cells can be compared by round.
    shares = cell.best_shares()
    return shares if len(shares) == count else [None] * count


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("verdict.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rounds", nargs="+", type=Path, metavar="ROWS", help="CSV, JSON or Parquet")
    names = " and ".join(path.name for path in BEST)
    parser.add_argument("--best", type=Path, nargs="+", default=BEST, help=f"default: {names}")
    parser.add_argument("--pack", type=Path, metavar=f"FILE{PACKED}", help="pack the CSV files")
    parser.add_argument("--same-code", action="store_true", help="pool several revisions")
    options = parser.parse_args(arguments)
    if options.pack and not all(path.suffix == ".csv" for path in options.rounds):
        parser.error("--pack: give the rounds as CSV files")
    try:
        rounds: dict[str, Round] = {}
        for path in options.rounds:
            if path.name.endswith(PACKED):
                rounds |= read_packed(path)
            else:
                rounds[str(path)] = read_round(path)
        best = read_best(options.best)
        cells = make_cells(list(rounds.values()), best, same_code=options.same_code)
    except (FlashsmithError, OSError, KeyError) as error:
        print(f"verdict.py: {error}", file=sys.stderr)
        return 2
    if options.pack:
        pack(options.rounds, options.pack)
    print(report(cells, len(rounds)), end="")
    missing = gaps(rounds)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
