"""The model demo's results as text."""

from __future__ import annotations

from rich.console import Console

from flashsmith.benchmark.table import Column, print_table, print_text
from flashsmith_demos.minilm import LEAST_COSINE, MinilmReport

_COLUMNS = (
    Column("#", True),
    Column("tokens", True),
    Column("sentence", prose=True),
    Column("nearest", True),
    Column("similarity", True),
    Column("cosine of its\ntwo embeddings", True),
)
# A sentence may be as long as a paragraph.
_SHOWN = 48


def print_minilm(console: Console, report: MinilmReport) -> None:
    """Prints the device, a row for each sentence, and the result: cosine, launches, fallbacks,
    times."""
    for line in (
        f"model:   all-MiniLM-L6-v2, {report.layers} layers; {len(report.sentences)} sentences of "
        f"{min(report.tokens)} to {max(report.tokens)} tokens",
        f"device:  {report.device}; attention in fp16"
        + (", in the emulator" if report.backend == "emulator" else ""),
    ):
        print_text(console, line, indent=9)
    print_table(console, _COLUMNS, [_row(report, index) for index in range(len(report.sentences))])
    for line in _conclusions(report):
        print_text(console, line, indent=9)


def _row(report: MinilmReport, index: int) -> tuple[str, ...]:
    other, similarity = report.nearest[index]
    sentence = report.sentences[index]
    if len(sentence) > _SHOWN:
        sentence = sentence[: _SHOWN - 3] + "..."
    return (
        str(index + 1),
        str(report.tokens[index]),
        sentence,
        str(other + 1),
        f"{similarity:.3f}",
        f"{report.cosine[index]:.8f}",
    )


def _conclusions(report: MinilmReport) -> list[str]:
    expected = report.layers * report.forward_passes
    emulated = " (in the emulator: no measure of a GPU)" if report.backend == "emulator" else ""
    same = "the same" if report.nearest_agree else "NOT the same"
    return [
        f"cosine:  at least {report.least_cosine:.8f} between PyTorch's attention and "
        f"flashsmith's; {LEAST_COSINE} is needed. Elements differ by up to "
        f"{report.largest_difference:.1e}; nearest sentences are {same} with both",
        f"kernels: {report.launches} launched by flashsmith, {expected} expected ({report.layers} "
        f"layers x {report.forward_passes} forward passes); {report.fallbacks} fallbacks",
        f"time:    {_seconds(report.pytorch_seconds)} with PyTorch's attention, "
        f"{_seconds(report.flashsmith_seconds)} with flashsmith's{emulated}",
        "passed" if report.ok else "FAILED",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
