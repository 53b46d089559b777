"""Our kernels one by one: the ladder, the search, the roofline, the profiler, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from flashsmith.benchmark.ncu import ProfileRow
from flashsmith.benchmark.progression import Ablation as Ladder
from flashsmith.benchmark.progression import (
    Change,
    change_between,
    change_words,
    conflict_words,
    step_names,
)
from flashsmith.benchmark.report.cells import where
from flashsmith.benchmark.report.html import Html, element, join
from flashsmith.benchmark.report.placing import Placed
from flashsmith.benchmark.report.results import failed, of_search
from flashsmith.benchmark.report.section import note
from flashsmith.benchmark.report.table import Entry, number, percent, table
from flashsmith.benchmark.roofline.roofline_table import describe as ceiling_words
from flashsmith.benchmark.rows import BenchRow


def ladder_table(ladder: Ladder) -> Html:
    """A row for each step."""
    timed = ladder.has_times
    headings = ["step", "kernel", "registers", "spilled bytes", "smem KiB", "CTAs/SM"]
    headings += ["instructions", "bank conflicts"]
    if timed:
        headings[2:2] = ["ms", "TFLOP/s", f"of {ladder.peer or 'a peer'}"]
    rows = []
    for place, (name, step) in enumerate(zip(step_names(ladder), ladder.steps, strict=True), 1):
        row: list[Entry | str] = [
            Entry(str(place), place),
            Entry(name, kind="code" if step.ok else "code bad", hint=step.config),
            Entry(str(step.registers), step.registers),
            Entry(f"{step.spill_store_bytes:,}", step.spill_store_bytes,
                 "bad" if step.spill_store_bytes else ""),
            number(step.smem_bytes / 1024, 0),
            Entry(str(step.ctas_per_sm), step.ctas_per_sm),
            number(step.total_instructions),
            conflict_words(step),
        ]  # fmt: skip
        if timed:
            time = step.time
            row[2:2] = [
                number(time.ms if time else None, 3),
                number(time.tflops if time else None),
                percent(time.share if time else None),
            ]
        rows.append(row)
    return join((table(f"The ladder on {ladder.device}", headings, rows), _changes(ladder)))


def _changes(ladder: Ladder) -> Html:
    """What each step changed, numbered as the steps are."""
    names = step_names(ladder)[1:]
    items = [
        element("li", element("code", name), f": {'; '.join(words) or 'nothing that is counted'}")
        for name, words in zip(names, map(change_words, _step_changes(ladder)), strict=True)
    ]
    heading = element("h3", "What each step changed")
    return join((heading, element("ol", *items, start=2, class_="changes"))) if items else Html("")


def _step_changes(ladder: Ladder) -> list[Change]:
    return [change_between(before, after) for before, after in pairwise(ladder.steps)]


def placed_table(placed: Sequence[Placed]) -> Html:
    """What each ceiling allows our kernels, and how much of the tightest they reach."""
    if not placed:
        return Html("")
    rows = [
        (
            where(one.row),
            Entry(one.row.config, kind="code"),
            number(one.row.tflops),
            number(one.flop_per_byte),
            ceiling_words(one.tightest.ceiling) if one.tightest else "",
            number(one.tightest.tflops if one.tightest else None),
            percent((one.row.tflops or 0) / one.tightest.tflops if one.tightest else None),
        )
        for one in placed
    ]
    headings = (
        "problem", "config", "TFLOP/s", "FLOP/byte", "tightest ceiling", "allows", "reached",
    )  # fmt: skip
    return table("Our kernels below their tightest ceiling", headings, rows)


_PROFILED = {
    "us": ("duration_us", 1),
    "TFLOP/s": ("tflops", 0),
    "MHz": ("sm_clock_mhz", 0),
    "tensor %": ("tensor_pct", 1),
    "MUFU %": ("mufu_pct", 1),
    "issue %": ("issue_pct", 1),
    "warps %": ("occupancy_pct", 0),
    "registers": ("registers", 0),
}


def profile_table(rows: Sequence[ProfileRow]) -> Html:
    """What the profiler counted, and the emulator's count of the same beside it."""
    if not rows:
        return Html("")
    headings = ["config", "problem", *_PROFILED, "wavefronts over ideal", "emulated"]
    body: list[list[Entry | str]] = [
        [
            Entry(row.config, kind="code" if row.verdict == "pass" else "code bad"),
            str(row.problem),
            *(number(getattr(row, name), digits) for name, digits in _PROFILED.values()),
            _over_ideal(row.wavefronts, row.wavefronts_ideal),
            _over_ideal(row.emulated_wavefronts, row.emulated_wavefronts_ideal),
            number(None if row.l2_bytes is None else row.l2_bytes / 1e9, 2),
            number(_dram(row), 2),
            Entry(row.stalls if row.verdict == "pass" else row.note, kind="wrap"),
        ]
        for row in rows
    ]
    headings += ["L2 GB", "DRAM GB", "waits, cycles per issue"]
    return table("Nsight Compute", headings, body)


def _over_ideal(actual: int | None, ideal: int | None) -> Entry:
    return number(actual / ideal if actual is not None and ideal else None, 2)


def _dram(row: ProfileRow) -> float | None:
    if row.dram_read_bytes is None or row.dram_write_bytes is None:
        return None
    return (row.dram_read_bytes + row.dram_write_bytes) / 1e9


def search_summary(rows: Sequence[BenchRow]) -> Html:
    """What became of the configs that a search tried; the wrong and the lost are listed."""
    searched = [row for row in rows if of_search(row)]
    if not searched:
        return Html("")
    words: dict[str, str] = {
        "pass": "measured",
        "fail": "wrong",
        "error": "failed",
        "absent": "dropped",
    }
    counts = Counter(str(row.verdict) for row in searched)
    said = [f"{counts[verdict]:,} {word}" for verdict, word in words.items() if counts[verdict]]
    lost = [
        (
            Entry(row.config or row.contender, kind="code"),
            where(row),
            Entry(words[row.verdict], kind="bad"),
            Entry(row.note, kind="wrap"),
        )
        for row in failed(searched)
    ]
    parts = [note(f"The search: {', '.join(said)}.")]
    if lost:
        listed = table("What the search lost", ("config", "problem", "verdict", "why"), lost)
        parts.append(element("details", element("summary", f"{len(lost)} wrong or failed"), listed))
    return join(parts)
