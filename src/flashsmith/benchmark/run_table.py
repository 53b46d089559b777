"""Prints the table of `flashsmith run`: one row per kernel with its verdict, costs and counts."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.kernel_facts import CONFLICT_KINDS, KernelFacts
from flashsmith.benchmark.run import KernelRun, Report
from flashsmith.benchmark.table import Cell, Column, make_columns, print_table, print_text
from flashsmith.benchmark.tasks import describe_lengths
from flashsmith.families import Semantics
from flashsmith.pluralize import pluralize

# The columns for costs, in this table and in the table of an ablation.
COST_COLUMNS = make_columns("regs> | spilled\nbytes> | smem\nKiB> | CTAs\n/SM> | instr>")
_COLUMNS = (
    Column("verdict"),
    Column("error", True),
    Column("bound", True),
    *COST_COLUMNS,
    *(Column(kind.replace(" ", "\n"), True) for kind in CONFLICT_KINDS),
)
_TIME_COLUMNS = make_columns("ms> | TFLOP/s>")


def print_report(console: Console, report: Report) -> None:
    """Prints the header, the table, what is wrong, the kernels that were skipped, and how many
    passed."""
    for line in header(report):
        print_text(console, line, indent=9)
    _print_rows(console, report)
    for row in report.rows:
        for problem in row.problems:
            print_text(console, f"{row.config}\n{problem}", style="red")
    for cfg, reason in report.skipped.items():
        print_text(console, f"skipped: {cfg} {reason}", indent=9)
    passed = sum(row.ok for row in report.rows)
    console.print(f"{passed} of {pluralize(len(report.rows), 'kernel')} passed", markup=False)


def header(report: Report) -> list[str]:
    """The lines above the table: the problem, the architecture and the backend."""
    target, task = report.target, report.task
    configs = [row.config for row in report.rows]
    lines = [
        f"problem: {task.describe(configs)}, random inputs, seed {report.options.seed}",
        f"arch:    {target.arch} ({target.device.name})",
    ]
    if report.meaning != "plain":
        lines.insert(1, f"proven:  {report.meaning}")
    if target.backend == "gpu":
        emulated = report.rows[0].emulated
        lengths = describe_lengths([row.emulated.seq_q for row in report.rows])
        lines += [
            "backend: the GPU; instructions and bank conflicts from the emulator at "
            f"batch {emulated.batch}, seq {lengths}, heads {emulated.heads_q}",
            f"timed:   interleaved, {task.describe_timed()}; the output is checked",
        ]
    else:
        checked = ", every check on" if report.options.checks else ""
        lines.append(f"backend: the emulator{checked}")
    return lines


def _print_rows(console: Console, report: Report) -> None:
    timed = any(row.times for row in report.rows)
    # Kernels for one problem may be compiled for different semantics, since its lengths are
    # multiples of only some kernels' tiles.
    meant = any(row.proven.semantics != Semantics() for row in report.rows)
    differ = len({row.emulated.seq_q for row in report.rows}) > 1
    columns = [
        Column("kernel"),
        *[Column("seq", True)] * differ,
        *[Column("semantics")] * meant,
        *_COLUMNS,
        *(_TIME_COLUMNS if timed else ()),
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            str(row.config),
            *[str(row.emulated.seq_q)] * differ,
            *[str(row.proven.semantics)] * meant,
            *_cells(row, timed),
        )
        for row in report.rows
    ]
    print_table(console, columns, rows)


def _cells(row: KernelRun, timed: bool) -> tuple[Cell, ...]:
    facts = row.facts
    cells: list[Cell] = [
        Text("pass", "green") if row.ok else Text("FAIL", "bold red"),
        _small(row.proof.max_error),
        _small(row.proof.error_bound),
        *cost_cells(facts),
        *(_factor(factor) for factor in facts.conflicts.values()),
    ]
    if timed:
        times = row.times
        cells += [f"{times.ms:.3f}", f"{times.tflops:.0f}"] if times else ["-", "-"]
    return tuple(cells)


def cost_cells(facts: KernelFacts) -> tuple[Cell, ...]:
    """The cells of a row for COST_COLUMNS."""
    total = facts.total_instructions
    return (
        str(facts.registers),
        marked(str(facts.spill_store_bytes), costly=facts.spill_store_bytes > 0),
        f"{facts.smem_bytes / 1024:g}",
        str(facts.ctas_per_sm),
        "-" if total is None else f"{total:,}",
    )


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _factor(factor: float | None) -> Cell:
    return "-" if factor is None else marked(f"{factor:.1f}", costly=factor > 1.05)


def marked(text: str, *, costly: bool) -> Cell:
    """The string, in yellow if ``costly``, which means that it names something that takes time."""
    return Text(text, "yellow") if costly else text
