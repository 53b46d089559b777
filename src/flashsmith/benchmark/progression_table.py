"""Prints an ablation: a row for each step, then what each step changed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.progression import (
    Ablation,
    Step,
    change_between,
    change_words,
    conflict_words,
    step_names,
)
from flashsmith.benchmark.run_table import COST_COLUMNS, cost_cells, marked
from flashsmith.benchmark.table import Cell, Column, make_columns, print_table, print_text

_COLUMNS = (
    Column("verdict"),
    *COST_COLUMNS,
    Column("bank conflicts", prose=True),
)


def print_ablation(console: Console, ablation: Ablation) -> None:
    """Prints the header, the table of steps, what each step changed, and any problems."""
    for line in header(ablation):
        print_text(console, line, indent=9)
    columns = [Column("#", True), Column("step"), *_COLUMNS]
    if ablation.has_times:
        columns += make_columns("ms> | TFLOP/s>")
        columns += [Column(f"% of\n{ablation.peer}", True)] if _has_shares(ablation) else []
    named = zip(step_names(ablation), ablation.steps, strict=True)
    rows = [
        [str(number), name, *_cells(step, ablation)] for number, (name, step) in enumerate(named, 1)
    ]
    print_table(console, columns, rows)
    _print_changes(console, ablation)
    for step in ablation.steps:
        for problem in step.problems:
            print_text(console, f"{step.config}\n{problem}", style="red")


def header(ablation: Ablation) -> list[str]:
    """The lines above the table: the device, the problem that was counted, and the problem that was
    timed."""
    lines = [
        f"device:  {ablation.arch} ({ablation.device})",
        f"counted: {ablation.counted}, in the emulator; instructions are PTX warp instructions",
    ]
    if ablation.timed:
        lines.append(f"timed:   {ablation.timed}; {ablation.protocol}")
    if ablation.peer_note:
        lines.append(f"note:    {ablation.peer_note}")
    return lines


def _print_changes(console: Console, ablation: Ablation) -> None:
    if len(ablation.steps) > 1:
        console.print("what each step changed:", markup=False)
    pairs = zip(ablation.steps, ablation.steps[1:], strict=False)
    for number, (before, after) in enumerate(pairs, 2):
        words = change_words(change_between(before, after))
        changed = "; ".join(words) or "no counted figure"
        print_text(console, f"{number:3} {changed}", indent=4)


def _has_shares(ablation: Ablation) -> bool:
    return any(step.time and step.time.share for step in ablation.steps)


def _cells(step: Step, ablation: Ablation) -> list[Cell]:
    conflicts = conflict_words(step)
    cells: list[Cell] = [
        Text("pass", "green") if step.ok else Text("FAIL", "bold red"),
        *cost_cells(step),
        marked(conflicts, costly=conflicts != "none"),
    ]
    if ablation.has_times:
        time = step.time
        cells += [f"{time.ms:.3f}", f"{time.tflops:.0f}"] if time else ["-", "-"]
        if _has_shares(ablation):
            share = time.share if time else None
            cells.append("-" if share is None else f"{share:.1%}")
    return cells
