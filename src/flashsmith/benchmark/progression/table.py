"""A ladder on the console: a row for each step, then what each step changed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.progression.change import change_between
from flashsmith.benchmark.progression.ladder import Ladder, Step
from flashsmith.benchmark.progression.words import change_words, conflict_words, step_names
from flashsmith.benchmark.table import Cell, Column, print_table, print_text

_COLUMNS = (
    Column("verdict"),
    Column("regs", True),
    Column("spilled\nbytes", True),
    Column("smem\nKiB", True),
    Column("CTAs\n/SM", True),
    Column("instr", True),
    Column("bank conflicts", prose=True),
)


def print_ladder(console: Console, ladder: Ladder) -> None:
    """Where and on what; the table; the changes; what is wrong, if anything."""
    for line in header(ladder):
        print_text(console, line, indent=9)
    columns = [Column("#", True), Column("step"), *_COLUMNS]
    if ladder.has_times:
        columns += [Column("ms", True), Column("TFLOP/s", True)]
        columns += [Column(f"% of\n{ladder.peer}", True)] if _has_shares(ladder) else []
    rows = [
        [str(number), name, *_cells(step, ladder)]
        for number, (name, step) in enumerate(zip(step_names(ladder), ladder.steps, strict=True), 1)
    ]
    print_table(console, columns, rows)
    _print_changes(console, ladder)
    for step in ladder.steps:
        for problem in step.problems:
            print_text(console, f"{step.config}\n{problem}", style="red")


def header(ladder: Ladder) -> list[str]:
    """What was counted and timed, and on what."""
    lines = [
        f"device:  {ladder.arch} ({ladder.device})",
        f"counted: {ladder.counted}, in the emulator; instructions are PTX's, per warp",
    ]
    if ladder.timed:
        lines.append(f"timed:   {ladder.timed}; {ladder.protocol}")
    if ladder.peer_note:
        lines.append(f"note:    {ladder.peer_note}")
    return lines


def _print_changes(console: Console, ladder: Ladder) -> None:
    if len(ladder.steps) > 1:
        console.print("what each step changed:", markup=False)
    pairs = zip(ladder.steps, ladder.steps[1:], strict=False)
    for number, (before, after) in enumerate(pairs, 2):
        words = change_words(change_between(before, after))
        changed = "; ".join(words) or "nothing that is counted"
        print_text(console, f"{number:3} {changed}", indent=4)


def _has_shares(ladder: Ladder) -> bool:
    return any(step.time and step.time.share for step in ladder.steps)


def _cells(step: Step, ladder: Ladder) -> list[Cell]:
    total, conflicts = step.total_instructions, conflict_words(step)
    cells: list[Cell] = [
        Text("pass", "green") if step.ok else Text("FAIL", "bold red"),
        str(step.registers),
        _marked(str(step.spill_store_bytes), step.spill_store_bytes > 0),
        f"{step.smem_bytes / 1024:g}",
        str(step.ctas_per_sm),
        "-" if total is None else f"{total:,}",
        _marked(conflicts, conflicts != "none"),
    ]
    if ladder.has_times:
        time = step.time
        cells += [f"{time.ms:.3f}", f"{time.tflops:.0f}"] if time else ["-", "-"]
        if _has_shares(ladder):
            share = time.share if time else None
            cells.append("-" if share is None else f"{share:.1%}")
    return cells


def _marked(text: str, costly: bool) -> Cell:
    """What costs time is marked."""
    return Text(text, "yellow") if costly else text
