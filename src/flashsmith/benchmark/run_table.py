"""The run's table: one row a kernel, with its verdict, what it costs and what it did."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.conflicts import CONFLICT_KINDS
from flashsmith.benchmark.run import KernelRow, Report, Size
from flashsmith.benchmark.run_times import TIMED
from flashsmith.benchmark.table import Cell, Column, print_table, print_text
from flashsmith.counted import counted

_COLUMNS = (
    Column("verdict"),
    Column("error", True),
    Column("bound", True),
    Column("regs", True),
    Column("spilled\nbytes", True),
    Column("smem\nKiB", True),
    Column("CTAs\n/SM", True),
    Column("instr", True),
    *(Column(kind.replace(" ", "\n"), True) for kind in CONFLICT_KINDS),
)
_TIME_COLUMNS = (Column("ms", True), Column("TFLOP/s", True))


def print_report(console: Console, report: Report) -> None:
    """Problem, arch and backend; the table; what is wrong, if anything; what the figures mean."""
    for line in header(report):
        print_text(console, line, indent=9)
    _print_rows(console, report)
    for row in report.rows:
        for problem in row.problems:
            print_text(console, f"{row.config}\n{problem}", style="red")
    passed = sum(row.ok for row in report.rows)
    console.print(f"{passed} of {counted(len(report.rows), 'kernel')} passed", markup=False)


def header(report: Report) -> list[str]:
    """What was run, where, and on how much."""
    target = report.target
    dtypes = ", ".join(sorted({row.config.dtype.name.lower() for row in report.rows}))
    d_heads = ", ".join(map(str, sorted({row.config.d_head for row in report.rows})))
    lines = [
        f"problem: {_size(report.proven, [row.proven_seq for row in report.rows])}, "
        f"d_head {d_heads}, {dtypes}, random inputs, seed {report.seed}",
        f"arch:    {target.arch} ({target.device.name})",
    ]
    if target.backend == "gpu":
        lines += [
            "backend: the GPU; instructions and bank conflicts from the emulator at "
            f"{_size(report.emulated, [row.emulated_seq for row in report.rows])}",
            "timed:   in turn, "
            f"batch {TIMED.batch}, seq {TIMED.seq}, heads {TIMED.heads}; the output is judged",
        ]
    else:
        lines.append("backend: the emulator" + (", every check on" if report.checks else ""))
    return lines


def _size(size: Size, lengths: Sequence[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    seq = shortest if shortest == longest else f"{shortest} to {longest} (each kernel its own)"
    return f"batch {size.batch}, seq {seq}, heads {size.heads}"


def _print_rows(console: Console, report: Report) -> None:
    timed = any(row.timing for row in report.rows)
    lengths = [row.emulated_seq for row in report.rows]
    differ = len(set(lengths)) > 1
    columns = [Column("kernel"), *_COLUMNS, *(_TIME_COLUMNS if timed else ())]
    if differ:
        columns.insert(1, Column("seq", True))
    rows = [
        (str(row.config), *((str(row.emulated_seq),) if differ else ()), *_cells(row, timed))
        for row in report.rows
    ]
    print_table(console, columns, rows)


def _cells(row: KernelRow, timed: bool) -> tuple[Cell, ...]:
    cells: list[Cell] = [
        Text("pass", "green") if row.ok else Text("FAIL", "bold red"),
        _small(row.max_error),
        _small(row.bound),
        str(row.registers),
        _marked(str(row.spill_store_bytes), row.spill_store_bytes > 0),
        f"{row.smem_bytes / 1024:g}",
        str(row.ctas_per_sm),
        "-" if row.instructions is None else f"{row.instructions:,}",
        *(_factor(factor) for factor in row.conflicts.values()),
    ]
    if timed:
        timing = row.timing
        cells += [f"{timing.ms:.3f}", f"{timing.tflops:.0f}"] if timing else ["-", "-"]
    return tuple(cells)


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _factor(factor: float | None) -> Cell:
    return "-" if factor is None else _marked(f"{factor:.1f}", factor > 1.05)


def _marked(text: str, costly: bool) -> Cell:
    """What costs time is marked."""
    return Text(text, "yellow") if costly else text
