"""What a reader wants to know of everything: key figures, failures, gaps, environments, files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from flashsmith.benchmark.progression import Step
from flashsmith.benchmark.report.cells import Cell, peer_order, where
from flashsmith.benchmark.report.html import Html, element, join
from flashsmith.benchmark.report.results import (
    ENVIRONMENT,
    Results,
    Source,
    absent_peers,
    failed,
)
from flashsmith.benchmark.report.section import note
from flashsmith.benchmark.report.table import Entry, number, table
from flashsmith.benchmark.rows import BenchRow
from flashsmith.counted import counted

# Of the figures of a file that are left out.
MOST_NAMED = 10
# Versions whose means stand beside the newest one's.
_MOST_OLDER = 3
_NAMES = {"gpu": "GPU", "arch": "arch", "cuda": "CUDA", "torch": "PyTorch", "python": "Python"}


def key_figures(results: Results, cells: Sequence[Cell]) -> Html:
    """What a reader wants to know first: of the version that was measured last, and what the others
    had beside it."""
    shown = []
    newest, *older = results.versions or {"": ""}
    by_version = {
        version: [cell for cell in cells if cell.row.revision == version]
        for version in (newest, *older)
    }
    cells = by_version[newest]
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
                    f"ahead in {ahead} of {len(ratios)} problems"
                    + _of_versions(newest, {one: by_version[one] for one in older}, peer),
                )
            )
    fastest = max((cell.ours for cell in cells if cell.ours), key=_rate, default=None)
    if fastest:
        shown.append(_key("fastest of ours", f"{_rate(fastest):.0f} TFLOP/s", where(fastest)))
    wrong: list[BenchRow | Step] = [*failed(results.compared)]
    wrong += [step for ladder in results.ladders for step in ladder.steps if not step.ok]
    judged = sum(row.verdict != "absent" for row in results.compared)
    judged += sum(len(ladder.steps) for ladder in results.ladders)
    detail = f"of {judged:,} outputs and kernels judged"
    shown.append(_key("wrong or failed", str(len(wrong)), detail, "bad" if wrong else "good"))
    return element("dl", *shown, class_="key")


def _of_versions(newest: str, older: Mapping[str, Sequence[Cell]], peer: str) -> str:
    """Which version a mean is of, and the means of the others; nothing where there is one."""
    if not older:
        return ""
    means = []
    for version, cells in older.items():
        ratios = [ratio for cell in cells if (ratio := cell.ratio(peer))]
        if ratios:
            means.append(f"{version or 'no version named'} {_mean(ratios):.3f} in {len(ratios)}")
    more = len(means) - _MOST_OLDER
    means = [*means[:_MOST_OLDER], *([f"and {counted(more, 'version')} more"] if more > 0 else ())]
    others = f" (older, not in it: {'; '.join(means)})" if means else ""
    return f"; of {newest or 'rows that name no version'} alone{others}"


def _key(name: str, value: str, detail: str, kind: str = "") -> Html:
    shown = element("dd", value, element("small", detail), class_=kind or None)
    return element("div", element("dt", name), shown)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _rate(row: BenchRow) -> float:
    return row.tflops or 0.0


def failures(results: Results) -> Html:
    """Everything that was wrong, in red; what a search lost stands with the search."""
    rows = [
        (
            Entry(row.contender, kind="code"),
            where(row),
            Entry(row.verdict, kind="bad"),
            Entry(row.note or "no reason given", kind="wrap"),
        )
        for row in failed(results.compared)
    ]
    rows += [
        (
            Entry(step.config, kind="code"),
            f"the ladder on {ladder.device}",
            Entry("fail", kind="bad"),
            Entry(problem, kind="wrap"),
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
        (peer, Entry(why, kind="wrap"), number(count))
        for (peer, why), count in sorted(found.items())
    ]
    return table("Peers that took no part", ("peer", "why", "problems"), body)


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
            Entry(str(environment[name] or "–"), kind="bad" if name in results.differing else "")
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
        (Entry(source.path.name, kind="code", hint=str(source.path)), source.what,
         number(source.count))
        for source in results.sources
    ]  # fmt: skip
    listed = table("Files", ("file", "what it holds", "rows"), rows)
    return join((*map(_left_out, results.sources), listed))


def _left_out(source: Source) -> Html:
    if not source.left_out:
        return Html("")
    named = "; ".join(source.left_out[:MOST_NAMED])
    more = len(source.left_out) - MOST_NAMED
    named += f"; and {more:,} more" if more > 0 else ""
    return note(f"Left out of {source.path.name}, since no figures: {named}.", alarm=True)
