"""The generation demo's results as text."""

from __future__ import annotations

from rich.console import Console

from flashsmith.benchmark.table import Column, print_table, print_text
from flashsmith_demos.generation import SIZES, GenerationReport

_COLUMNS = (
    Column("pairs", True),
    Column("asked for"),
    Column("PyTorch's"),
    Column("flashsmith's"),
    Column("right"),
)


def print_generation(console: Console, report: GenerationReport) -> None:
    """Prints the model, every sequence's answers, and whether they are the same."""
    emulated = ", in the emulator" if report.backend == "emulator" else ""
    for line in (
        f"model:   {SIZES.layers} layers, {SIZES.heads} heads over {SIZES.heads_k}, d {SIZES.d}, "
        f"{report.parameters:,} parameters, trained for associative recall",
        f"cache:   {report.pages} pages of {report.page} keys, in random order",
        f"device:  {report.device}; attention in bf16{emulated}",
    ):
        print_text(console, line, indent=9)
    print_table(
        console,
        _COLUMNS,
        [
            (str(len(prompt) // 2), *(" ".join(map(str, it)) for it in tokens))
            for prompt, *tokens in zip(
                *(report.prompts, report.questions, report.pytorch, report.flashsmith),
                report.right,
                strict=True,
            )
        ],
    )
    same = "the same tokens" if report.flashsmith == report.pytorch else "OTHER TOKENS"
    for line in (
        f"tokens:  {same} as with PyTorch's attention; {report.accuracy:.0%} are right",
        f"kernels: {report.launches} launched by flashsmith, at least {report.least_launches} "
        "expected (2 for each layer of a prompt or a step)",
        "passed" if report.ok else "FAILED",
    ):
        print_text(console, line, indent=9)
