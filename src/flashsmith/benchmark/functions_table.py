"""Prints the table of `flashsmith run --score ... --mask ...`: one row per check."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.run_functions import FunctionCheck, FunctionReport
from flashsmith.benchmark.table import Cell, make_columns, print_table, print_text
from flashsmith.pluralize import pluralize


def print_function_report(console: Console, report: FunctionReport) -> None:
    """Prints the problem, the kernels, the table, what is wrong, and how many checks passed."""
    print_text(console, f"problem: {report.problem}, random inputs, seed {report.seed}", indent=9)
    print_text(console, f"arch:    sm_{report.device.arch} ({report.device.name}), the emulator")
    kernels = list(dict.fromkeys(row.kernel for row in report.rows if row.kernel))
    for number, kernel in enumerate(kernels, 1):
        print_text(console, f"kernel {number}: {kernel}", indent=10)
    columns = make_columns("check~ | kernel> | verdict | error> | bound> | against~")
    print_table(console, columns, [_cells(row, kernels) for row in report.rows])
    for row in report.rows:
        for problem in row.problems:
            print_text(console, f"{row.name}: {problem}", style="red")
    for cfg, reason in report.skipped.items():
        print_text(console, f"skipped: {cfg} {reason}", indent=9)
    passed = sum(row.ok for row in report.rows)
    console.print(f"{passed} of {pluralize(len(report.rows), 'check')} passed", markup=False)


def _cells(row: FunctionCheck, kernels: list[str]) -> tuple[Cell, ...]:
    return (
        row.name,
        str(kernels.index(row.kernel) + 1) if row.kernel else "",
        Text("pass", "green") if row.ok else Text("FAIL", "bold red"),
        _small(row.error),
        _small(row.bound),
        row.note,
    )


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
