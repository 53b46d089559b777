"""The page's sections: each a heading with its pictures and tables, or nothing."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashsmith.benchmark.ncu import ProfileRow
from flashsmith.benchmark.progression import Change, Ladder, Step, change_between
from flashsmith.benchmark.progression.words import change_words, conflict_words, step_names
from flashsmith.benchmark.report.cells import Cell as BenchCell
from flashsmith.benchmark.report.cells import describe, peer_order
from flashsmith.benchmark.report.html import Html, element, join
from flashsmith.benchmark.report.pictures import Picture
from flashsmith.benchmark.report.placing import Placed
from flashsmith.benchmark.report.results import (
    ENVIRONMENT,
    Results,
    Setting,
    absent_peers,
    failed,
    of_search,
    setting_of,
)
from flashsmith.benchmark.report.table import Cell, number, table
from flashsmith.benchmark.roofline.roofline_table import describe as ceiling_words
from flashsmith.benchmark.rows import BenchRow

_NAMES = {"gpu": "GPU", "arch": "arch", "cuda": "CUDA", "torch": "PyTorch", "python": "Python"}


@dataclass(frozen=True)
class Section:
    """A part of the page that links lead to; one without parts is not shown."""

    identifier: str
    heading: str
    parts: tuple[Html, ...]

    @property
    def shown(self) -> bool:
        """Whether there is anything in it."""
        return any(self.parts)

    @property
    def html(self) -> Html:
        """The section itself."""
        return element("section", element("h2", self.heading), *self.parts, id=self.identifier)

    @property
    def link(self) -> Html:
        """A link to it."""
        return element("a", self.heading, href=f"#{self.identifier}")


def section(identifier: str, heading: str, *parts: Html) -> Section:
    """The section of these parts."""
    return Section(identifier, heading, parts)


def figures(pictures: Iterable[Picture]) -> Html:
    """The pictures side by side, as many as the width allows."""
    drawn = [_figure(picture) for picture in pictures]
    return element("div", *drawn, class_="charts") if drawn else Html("")


def _figure(picture: Picture) -> Html:
    dark = element(
        "source", srcset=_data_url(picture.dark), media="screen and (prefers-color-scheme: dark)"
    )
    light = element("img", src=_data_url(picture.light), alt=picture.alt, width=picture.width)
    return element(
        "figure",
        element("picture", dark, light),
        element("figcaption", picture.caption),
        class_="wide" if picture.wide else None,
    )


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def note(text: str, alarm: bool = False) -> Html:
    """A paragraph that stands out."""
    return element("p", text, class_="note alarm" if alarm else "note")


# --- the head of the page ------------------------------------------------------------------------


def key_figures(results: Results, cells: Sequence[BenchCell]) -> Html:
    """What a reader wants to know first."""
    shown = []
    compared = peer_order(name for cell in cells for name in cell.peers)
    for peer in compared[:2]:
        ratios = [ratio for cell in cells if (ratio := cell.ratio(peer))]
        if ratios:
            ahead = sum(ratio >= 1 for ratio in ratios)
            shown.append(
                _key(
                    f"ours / {peer}",
                    f"{_mean(ratios):.3f}",
                    f"geometric mean; {min(ratios):.2f} to {max(ratios):.2f}; "
                    f"ahead in {ahead} of {len(ratios)} problems",
                )
            )
    fastest = max((cell.ours for cell in cells if cell.ours), key=_rate, default=None)
    if fastest:
        shown.append(_key("fastest of ours", f"{_rate(fastest):.0f} TFLOP/s", _where(fastest)))
    wrong: list[BenchRow | Step] = [*failed(results.compared)]
    wrong += [step for ladder in results.ladders for step in ladder.steps if not step.ok]
    judged = sum(row.verdict != "absent" for row in results.compared)
    judged += sum(len(ladder.steps) for ladder in results.ladders)
    detail = f"of {judged:,} outputs and kernels judged"
    shown.append(_key("wrong or failed", str(len(wrong)), detail, "bad" if wrong else "good"))
    return element("dl", *shown, class_="key")


def _key(name: str, value: str, detail: str, kind: str = "") -> Html:
    shown = element("dd", value, element("small", detail), class_=kind or None)
    return element("div", element("dt", name), shown)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _rate(row: BenchRow) -> float:
    return row.tflops or 0.0


def _where(row: BenchRow) -> str:
    return f"{describe(row)}, length {row.seq_k}, batch {row.batch}"


# --- failures, gaps ------------------------------------------------------------------------------


def failures(results: Results) -> Html:
    """Everything that was wrong, in red; what a search lost stands with the search."""
    rows = [
        (
            Cell(row.contender, kind="code"),
            _where(row),
            Cell(row.verdict, kind="bad"),
            Cell(row.note or "no reason given", kind="wrap"),
        )
        for row in failed(results.compared)
    ]
    rows += [
        (
            Cell(step.config, kind="code"),
            f"the ladder on {ladder.device}",
            Cell("fail", kind="bad"),
            Cell(problem, kind="wrap"),
        )
        for ladder in results.ladders
        for step in ladder.steps
        for problem in step.problems
    ]
    if not rows:
        return Html("")
    text = (
        "These did not pass their check, or did not come to their end: no figure of theirs counts."
    )
    headings = ("contender", "problem", "verdict", "what was wrong")
    return join((note(text, alarm=True), table("What failed", headings, rows)))


def gaps(rows: Iterable[BenchRow]) -> Html:
    """Peers that took no part, with the reason."""
    found = absent_peers(rows)
    if not found:
        return Html("")
    body = [
        (peer, Cell(why, kind="wrap"), number(count))
        for (peer, why), count in sorted(found.items())
    ]
    return table("Peers that took no part", ("peer", "why", "problems"), body)


# --- the cells -----------------------------------------------------------------------------------


def cells_table(cells: Sequence[BenchCell], settings: Mapping[Setting, str]) -> Html:
    """A row for each problem: ours, the peers, the ratios, the config."""
    if not cells:
        return Html("")
    peers = peer_order(name for cell in cells for name in cell.peers)
    several = len(settings) > 1
    headings = ["problem", *["measured"] * several, "length", "batch", "ours", *peers[:2]]
    headings += [f"ours/{peer}" for peer in peers[:2]] + ["ours/best"] * (len(peers) > 1)
    headings += ["config", *peers[2:], "spread", "MHz", "W"]
    rows = [_cell_row(cell, peers, settings if several else {}) for cell in cells]
    return table("TFLOP/s of every problem", headings, rows)


def _cell_row(
    cell: BenchCell, peers: Sequence[str], settings: Mapping[Setting, str]
) -> list[Cell | str]:
    ours = cell.ours
    wrong = {row.contender: row for row in cell.wrong}
    bad = next((row for row in cell.wrong if row.kind == "ours"), None)
    rates = [_rate_cell(cell.peers.get(peer), wrong.get(peer)) for peer in peers]
    row: list[Cell | str] = [
        describe(cell.row),
        *([settings[setting_of(cell.row)]] if settings else []),
        Cell(str(cell.row.seq_k), cell.row.seq_k),
        Cell(str(cell.row.batch), cell.row.batch),
        _rate_cell(ours, bad if ours is None else None),
        *rates[:2],
        *(_ratio(cell.ratio(peer)) for peer in peers[:2]),
    ]
    if len(peers) > 1:
        row.append(_ratio(cell.ratio_to_best))
    row += [
        Cell(ours.config if ours else "", kind="code"),
        *rates[2:],
        _percent(ours.spread if ours else None),
        number(ours.sm_clock_mhz if ours else None),
        number(ours.power_w if ours else None),
    ]
    return row


def _rate_cell(row: BenchRow | None, wrong: BenchRow | None) -> Cell:
    if row is None and wrong is not None:
        return Cell(wrong.verdict.upper(), kind="bad", hint=wrong.note)
    return number(row.tflops if row else None)


def _ratio(ratio: float | None) -> Cell:
    return number(ratio, 2, "" if ratio is None else "good" if ratio >= 1 else "low")


def _percent(share: float | None) -> Cell:
    return Cell("–", None, "faint") if share is None else Cell(f"{share:.1%}", share)


# --- the ladder, the roofline, the profiler ------------------------------------------------------


def ladder_table(ladder: Ladder) -> Html:
    """A row for each step."""
    timed = ladder.has_times
    headings = ["step", "kernel", "registers", "spilled bytes", "smem KiB", "CTAs/SM"]
    headings += ["instructions", "bank conflicts"]
    if timed:
        headings[2:2] = ["ms", "TFLOP/s", f"of {ladder.peer or 'a peer'}"]
    rows = []
    for place, (name, step) in enumerate(zip(step_names(ladder), ladder.steps, strict=True), 1):
        row: list[Cell | str] = [
            Cell(str(place), place),
            Cell(name, kind="code" if step.ok else "code bad", hint=step.config),
            Cell(str(step.registers), step.registers),
            Cell(f"{step.spill_store_bytes:,}", step.spill_store_bytes,
                 "bad" if step.spill_store_bytes else ""),
            number(step.smem_bytes / 1024, 0),
            Cell(str(step.ctas_per_sm), step.ctas_per_sm),
            number(step.total_instructions),
            conflict_words(step),
        ]  # fmt: skip
        if timed:
            time = step.time
            row[2:2] = [
                number(time.ms if time else None, 3),
                number(time.tflops if time else None),
                _percent(time.share if time else None),
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
            _where(one.row),
            Cell(one.row.config, kind="code"),
            number(one.row.tflops),
            number(one.flop_per_byte),
            ceiling_words(one.tightest.ceiling) if one.tightest else "",
            number(one.tightest.tflops if one.tightest else None),
            _percent((one.row.tflops or 0) / one.tightest.tflops if one.tightest else None),
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
    body: list[list[Cell | str]] = [
        [
            Cell(row.config, kind="code" if row.verdict == "pass" else "code bad"),
            str(row.problem),
            *(number(getattr(row, name), digits) for name, digits in _PROFILED.values()),
            _over_ideal(row.wavefronts, row.wavefronts_ideal),
            _over_ideal(row.emulated_wavefronts, row.emulated_wavefronts_ideal),
            number(None if row.l2_bytes is None else row.l2_bytes / 1e9, 2),
            number(_dram(row), 2),
            Cell(row.stalls if row.verdict == "pass" else row.note, kind="wrap"),
        ]
        for row in rows
    ]
    headings += ["L2 GB", "DRAM GB", "waits, cycles per issue"]
    return table("Nsight Compute", headings, body)


def _over_ideal(actual: int | None, ideal: int | None) -> Cell:
    return number(actual / ideal if actual is not None and ideal else None, 2)


def _dram(row: ProfileRow) -> float | None:
    if row.dram_read_bytes is None or row.dram_write_bytes is None:
        return None
    return (row.dram_read_bytes + row.dram_write_bytes) / 1e9


# --- environment and sources ---------------------------------------------------------------------


def environments(results: Results) -> Html:
    """Every environment, and in red what differs between them."""
    found = [dict(environment) for environment in results.environments]
    parts = []
    if results.differing:
        differing = ", ".join(_NAMES.get(name, name) for name in results.differing)
        text = f"Figures come from {len(found)} environments, which differ in: {differing}. "
        text += "Ratios are taken within one environment only."
        parts.append(note(text, alarm=True))
    unnamed = sum(not any(environment.values()) for environment in found)
    if unnamed:
        parts.append(note("Some rows do not say where they were measured."))
    rows = [
        [
            Cell(str(environment[name] or "–"), kind="bad" if name in results.differing else "")
            for name in ENVIRONMENT
        ]
        for environment in found
        if any(environment.values())
    ]
    if rows:
        headings = [_NAMES.get(name, name) for name in ENVIRONMENT]
        parts.append(table("Where figures were measured", headings, rows))
    return join(parts)


def sources(results: Results) -> Html:
    """The files that were read."""
    rows = [
        (Cell(source.path.name, kind="code", hint=str(source.path)), source.what,
         number(source.count))
        for source in results.sources
    ]  # fmt: skip
    return table("Files", ("file", "what it holds", "rows"), rows)


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
            Cell(row.config or row.contender, kind="code"),
            _where(row),
            Cell(words[row.verdict], kind="bad"),
            Cell(row.note, kind="wrap"),
        )
        for row in failed(searched)
    ]
    parts = [note(f"The search: {', '.join(said)}.")]
    if lost:
        listed = table("What the search lost", ("config", "problem", "verdict", "why"), lost)
        parts.append(element("details", element("summary", f"{len(lost)} wrong or failed"), listed))
    return join(parts)
