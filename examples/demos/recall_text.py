"""The training demo's results as text."""

from __future__ import annotations

from rich.console import Console

from flashsmith.benchmark.table import Column, print_table, print_text
from flashsmith_demos.recall import (
    FIRST_STEPS,
    LEAST_ACCURACY,
    MOST_DIFFERENCE,
    MOST_EXCESS,
    RecallReport,
)

_COLUMNS = (
    Column("step", True),
    Column("loss with\nPyTorch's", True),
    Column("loss with\nflashsmith's", True),
    Column("difference", True),
)
_SHOWN = 10


def print_recall(console: Console, report: RecallReport) -> None:
    """Prints the model, the losses of some steps, and the result: differences, launches, times."""
    sizes = report.sizes
    for line in (
        f"model:   {sizes.layers} layers, {sizes.heads} heads over {sizes.heads_k}, d {sizes.d}, "
        f"{report.parameters:,} parameters",
        f"data:    {sizes.batch} lines a step, each of {sizes.pairs} pairs of a key and a value, "
        f"then queries for every value ({sizes.length} tokens)",
        f"device:  {report.device}; attention in bf16"
        + (", in the emulator" if report.backend == "emulator" else ""),
    ):
        print_text(console, line, indent=9)
    print_table(console, _COLUMNS, [_row(report, step) for step in shown_steps(sizes.steps)])
    for line in _conclusions(report):
        print_text(console, line, indent=9)


def shown_steps(steps: int) -> list[int]:
    """Some of the steps, counted from 0: the first, the last, and others at equal distances."""
    every = max(1, steps // _SHOWN)
    return sorted({0, *range(every - 1, steps, every), steps - 1})


def _row(report: RecallReport, step: int) -> tuple[str, ...]:
    theirs, ours = report.pytorch.losses[step], report.flashsmith.losses[step]
    return str(step + 1), f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.1e}"


def _conclusions(report: RecallReport) -> list[str]:
    sizes, ours, theirs = report.sizes, report.flashsmith, report.pytorch
    emulated = " (in the emulator: no measure of a GPU)" if report.backend == "emulator" else ""
    lines = [
        f"losses:  differ by up to {report.first_difference:.1e} in the first "
        f"{min(FIRST_STEPS, sizes.steps)} steps; at most {MOST_DIFFERENCE} is allowed",
        f"kernels: {report.launches} launched by flashsmith, at least "
        f"{report.least_launches} expected ({sizes.layers} layers x {sizes.steps} steps, forward "
        "and backward)",
        f"time:    {1e3 * theirs.seconds:.1f} ms a step with PyTorch's attention, "
        f"{1e3 * ours.seconds:.1f} ms with flashsmith's{emulated}",
        "passed" if report.ok else "FAILED",
    ]
    if report.is_judged_by_its_end:
        lines.insert(
            1,
            f"the end: {ours.accuracy:.1%} of the answers are right ({theirs.accuracy:.1%} with "
            f"PyTorch's attention; {LEAST_ACCURACY:.0%} is needed), and the loss is "
            f"{report.excess:+.1e} from PyTorch's; at most {MOST_EXCESS} more is allowed",
        )
    return lines
