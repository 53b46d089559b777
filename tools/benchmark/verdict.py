#!/usr/bin/env python3
"""The tables of docs/results.md from the rows of several runs of `flashsmith bench`.

    for run in 0 1 2; do
        flashsmith bench --cells public --protocol one_by_one --rotation $run \\
            --peers fa2,cudnn --csv verdict-$run.csv
    done
    python tools/benchmark/verdict.py verdict-0.csv verdict-1.csv verdict-2.csv > verdict.md

A file is a run. Of each cell the run in the middle counts (of two the lower), by ours over cuDNN,
or over FA2 where there is no cuDNN. Where it is known how the best public kernel stands to cuDNN
(--best), r is ours over cuDNN divided by it: above 1 ours is ahead of every public kernel. Exit
status 1 when a cell of ours is wrong, or was not measured in every run.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashsmith.benchmark.contenders import OURS
from flashsmith.benchmark.report.cells import describe
from flashsmith.benchmark.rows import BenchRow, read_rows
from flashsmith.configs import Problem
from flashsmith.errors import ArgumentError, FlashsmithError

BEST = Path(__file__).parents[2] / "benchmarks" / "h200" / "best-public.csv"
FA2, CUDNN = "fa2", "cudnn"
# What r is held against: geometric mean, worst cell.
GRADES = (("aim", 1.10, 1.00), ("bar", 1.05, 1.00), ("must", 1.00, 0.95))

Run = Mapping[Problem, Mapping[str, BenchRow]]


@dataclass(frozen=True)
class Cell:
    """A problem's rows by contender in the run that counts; ``best``: the best public kernel over
    cuDNN, None where that is not known."""

    problem: Problem
    rows: Mapping[str, BenchRow]
    best: float | None

    def over(self, peer: str) -> float | None:
        """Ours over a peer, in TFLOP/s."""
        ours, other = (self.rows[n].tflops if n in self.rows else None for n in (OURS, peer))
        return ours / other if ours and other else None

    @property
    def over_best_peer(self) -> float | None:
        """Ours over the fastest peer that was measured."""
        shares = [self.over(name) for name, row in self.rows.items() if row.kind == "peer"]
        return min((share for share in shares if share), default=None)

    @property
    def r(self) -> float | None:
        """Ours over the best public kernel."""
        share = self.over(CUDNN)
        return share / self.best if share and self.best else None


def read_run(path: Path) -> Run:
    """A file's rows by problem and contender.

    Raises ArgumentError when the file is unusable, or has a contender of a problem twice.
    """
    run: dict[Problem, dict[str, BenchRow]] = {}
    for row in read_rows(path):
        found = run.setdefault(row.problem, {})
        if row.contender in found:
            raise ArgumentError(
                f"{path}: {row.contender} on '{row.problem}' stands there twice; a file is one run"
            )
        found[row.contender] = row
    return run


def read_best(path: Path) -> dict[Problem, float]:
    """The best public kernel over cuDNN, by problem."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            Problem.parse(row["problem"]): float(row["best_over_cudnn"])
            for row in csv.DictReader(file)
        }


def gaps(runs: Mapping[str, Run]) -> list[str]:
    """What is missing or wrong, a sentence each."""
    problems = dict.fromkeys(problem for run in runs.values() for problem in run)
    found = []
    for name, run in runs.items():
        for problem in problems:
            row = run.get(problem, {}).get(OURS)
            if row is None:
                found.append(f"{name}: ours on '{problem}' was not measured")
            elif row.verdict != "pass" or not row.tflops:
                found.append(f"{name}: ours on '{problem}': {row.verdict} {row.note}".rstrip())
    return found


def make_cells(runs: Sequence[Run], best: Mapping[Problem, float]) -> list[Cell]:
    """A cell for every problem that ours was timed on, in the order of the first run."""
    cells = []
    for problem in dict.fromkeys(problem for run in runs for problem in run):
        found = [Cell(problem, run[problem], best.get(problem)) for run in runs if problem in run]
        timed = [cell for cell in found if cell.rows.get(OURS) and cell.rows[OURS].tflops]
        if timed:
            cells.append(_in_the_middle(timed))
    return cells


def _in_the_middle(cells: Sequence[Cell]) -> Cell:
    def speed(cell: Cell) -> float:
        return cell.over(CUDNN) or cell.over(FA2) or cell.rows[OURS].tflops or 0.0

    middle = statistics.median_low([speed(cell) for cell in cells])
    return next(cell for cell in cells if speed(cell) == middle)


def report(cells: Sequence[Cell], runs: int) -> str:
    """The tables as Markdown: the cells with r, then the others, each with its summary."""
    ranked = [cell for cell in cells if cell.r]
    others = [cell for cell in cells if not cell.r]
    parts = [_environment(cells, runs)] if cells else ["no cell was measured"]
    if ranked:
        rates = [cell.r for cell in ranked if cell.r]
        parts += [_table(ranked, with_r=True), _summary("r", rates, ranked), _grade(rates)]
    if others:
        parts.append(_table(others, with_r=False))
    for name, peer in (("ours / FA2", FA2), ("ours / cuDNN", CUDNN)):
        shown = [cell for cell in cells if cell.over(peer)]
        if shown:
            parts.append(_summary(name, [cell.over(peer) or 0.0 for cell in shown], shown))
    return "\n\n".join(parts) + "\n"


def _environment(cells: Sequence[Cell], runs: int) -> str:
    row = cells[0].rows[OURS]
    return (
        f"{row.gpu}, driver {row.driver}, CUDA {row.cuda}, torch {row.torch}, flashsmith "
        f"{row.flashsmith} ({row.revision}); {row.protocol}, the median of {runs} run(s); "
        "TFLOP/s of 4 b h s_q s_k d, halved when causal."
    )


def _table(cells: Sequence[Cell], with_r: bool) -> str:
    last = ("best / cuDNN", "r") if with_r else ("ours / FA2", "ours / best peer")
    head = ("problem", "batch", "seq", "ours", "cuDNN", "FA2", "ours / cuDNN", *last, "config")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for cell in cells:
        row = cell.rows[OURS]
        shares = (cell.best, cell.r) if with_r else (cell.over(FA2), cell.over_best_peer)
        values = (
            describe(row), str(row.batch), str(row.seq_k),
            *(_rate(cell.rows.get(name)) for name in (OURS, CUDNN, FA2)),
            *map(_share, (cell.over(CUDNN), *shares)), row.config,
        )  # fmt: skip
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def _summary(name: str, shares: Sequence[float], cells: Sequence[Cell]) -> str:
    worst = min(range(len(shares)), key=lambda place: shares[place])
    mean = statistics.geometric_mean(shares)
    return (
        f"{name}: geometric mean {mean:.3f} over {len(shares)} cells, worst {shares[worst]:.3f} "
        f"({cells[worst].problem}), {sum(share < 1 for share in shares)} below 1, "
        f"{sum(share < 0.95 for share in shares)} below 0.95."
    )


def _grade(shares: Sequence[float]) -> str:
    mean, worst = statistics.geometric_mean(shares), min(shares)
    for name, least_mean, least in GRADES:
        if mean >= least_mean and worst >= least:
            return f"Reached: {name} (geometric mean {least_mean:.2f}, no cell below {least:.2f})."
    name, least_mean, least = GRADES[-1]
    return f"Missed: {name} (geometric mean {least_mean:.2f}, no cell below {least:.2f})."


def _rate(row: BenchRow | None) -> str:
    return f"{row.tflops:.0f}" if row is not None and row.tflops else "-"


def _share(share: float | None) -> str:
    return f"{share:.3f}" if share else "-"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("verdict.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="ROWS", help="CSV, JSON or Parquet")
    parser.add_argument("--best", type=Path, default=BEST, help=f"default: {BEST.name}")
    options = parser.parse_args(arguments)
    try:
        runs = {str(path): read_run(path) for path in options.runs}
        best = read_best(options.best)
    except (FlashsmithError, OSError, KeyError) as error:
        print(f"verdict.py: {error}", file=sys.stderr)
        return 2
    print(report(make_cells(list(runs.values()), best), len(runs)), end="")
    missing = gaps(runs)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
