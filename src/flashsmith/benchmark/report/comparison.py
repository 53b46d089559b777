"""Problem by problem: ours beside the peers, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashsmith.benchmark.report.cells import Cell, describe, peer_order
from flashsmith.benchmark.report.html import Html
from flashsmith.benchmark.report.results import Setting, setting_of
from flashsmith.benchmark.report.table import Entry, number, percent, table
from flashsmith.benchmark.rows import BenchRow


def cells_table(cells: Sequence[Cell], settings: Mapping[Setting, str]) -> Html:
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
    cell: Cell, peers: Sequence[str], settings: Mapping[Setting, str]
) -> list[Entry | str]:
    ours = cell.ours
    wrong = {row.contender: row for row in cell.wrong}
    bad = next((row for row in cell.wrong if row.kind == "ours"), None)
    rates = [_rate_cell(cell.peers.get(peer), wrong.get(peer)) for peer in peers]
    row: list[Entry | str] = [
        describe(cell.row),
        *([settings[setting_of(cell.row)]] if settings else []),
        Entry(str(cell.row.seq_k), cell.row.seq_k),
        Entry(str(cell.row.batch), cell.row.batch),
        _rate_cell(ours, bad if ours is None else None),
        *rates[:2],
        *(_ratio(cell.ratio(peer)) for peer in peers[:2]),
    ]
    if len(peers) > 1:
        row.append(_ratio(cell.ratio_to_best))
    row += [
        Entry(ours.config if ours else "", kind="code"),
        *rates[2:],
        percent(ours.spread if ours else None),
        number(ours.sm_clock_mhz if ours else None),
        number(ours.power_w if ours else None),
    ]
    return row


def _rate_cell(row: BenchRow | None, wrong: BenchRow | None) -> Entry:
    if row is None and wrong is not None:
        return Entry(wrong.verdict.upper(), kind="bad", hint=wrong.note)
    return number(row.tflops if row else None)


def _ratio(ratio: float | None) -> Entry:
    return number(ratio, 2, "" if ratio is None else "good" if ratio >= 1 else "low")
