#!/usr/bin/env python3
"""Draws docs/speed.svg, the picture of the forward pass in README, from the rows in the repository.

Usage: python tools/docs/speed_picture.py [--out docs/speed.svg]

The bars are medians over the rounds in benchmarks/h200/verdict-public.csv.gz, which are also in
docs/log/results.md. FlashAttention 3 was measured on another day: its bar is the rate of cuDNN in
these rounds, times the ratio of the two on that day (best-public.csv). A test compares the picture
with the rows.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

# results_tables is in the folder of this file.
sys.path.insert(0, str(Path(__file__).parent))

import results_tables

ROOT = Path(__file__).parents[2]
KEYS = 4096
# The colours that the report's charts have, in a light and a dark form.
SERIES = (("flashsmith", "c0"), ("FA4", "c4"), ("FA3 *", "c3"), ("cuDNN", "c2"))
STYLE = """
:root { --surface: #ffffff; --ink: #1a1c20; --muted: #5b616b; --line: #dfe2e7;
  --c0: #0b5cad; --c4: #b9a43a; --c3: #c77fae; --c2: #6fb39d; }
@media (prefers-color-scheme: dark) { :root { --surface: #1b1e24; --ink: #e8eaee;
  --muted: #a3a9b4; --line: #343942; --c0: #6cb6ff; --c4: #9c8b32; --c3: #a3608a; --c2: #37876c; } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  fill: var(--muted); }
.ink { fill: var(--ink); font-weight: 600; }
.title { fill: var(--ink); font-size: 15px; font-weight: 600; }
"""
WIDTH, LEFT, TOP, BAR, GAP = 720, 110, 84, 13, 14
MOST = 800.0


def groups() -> Iterator[tuple[str, list[float]]]:
    """(problem, TFLOP/s of each of SERIES), for each head dimension with and without a causal
    mask."""
    with open(results_tables.ROWS / "best-public.csv", encoding="utf-8", newline="") as file:
        before = {row["problem"]: row for row in csv.DictReader(file)}
    for cell in results_tables.verdict_cells():
        row = cell.row
        if row.seq_k != KEYS or row.dtype != "fp16":
            continue
        causal = " causal" if "causal" in row.semantics else ""
        other_day = before[f"b{row.batch} s{KEYS} h{row.heads_q} d{row.d} fp16{causal}"]
        cudnn = cell.rate("cudnn")
        fa3 = cudnn * float(other_day["fa3"]) / float(other_day["cudnn"])
        rates = [cell.rate("ours"), cell.rate("flash_attn_4"), fa3, cudnn]
        yield f"d {row.d},{causal or ' full'}", rates


def picture() -> str:
    """The picture as SVG."""
    bars, y = [], TOP
    found = sorted(groups(), key=lambda group: int(group[0].split(",")[0][2:]))
    for name, rates in found:
        middle = y + BAR * len(rates) / 2 + 4
        bars.append(
            f'<text class="ink" x="{LEFT - 10}" y="{middle}" text-anchor="end">{name}</text>'
        )
        for (_, colour), rate in zip(SERIES, rates, strict=True):
            width = (WIDTH - LEFT - 50) * rate / MOST
            bars.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" '
                f'style="fill:var(--{colour})"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{y + BAR - 3}">{rate:.0f}</text>'
            )
            y += BAR
        y += GAP
    legend, x = [], LEFT
    for name, colour in SERIES:
        legend.append(
            f'<rect x="{x}" y="54" width="12" height="12" style="fill:var(--{colour})"/>'
            f'<text x="{x + 18}" y="64">{name}</text>'
        )
        x += 40 + 8 * len(name)
    alt = "; ".join(f"{name}: {_listed(rates)}" for name, rates in found)
    height = y + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" role="img" aria-label="TFLOP/s: {alt}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" style="fill:var(--surface)"/>',
            '<text class="title" x="16" y="26">Forward pass, TFLOP/s (longer is faster)</text>',
            '<text x="16" y="44">One H200, fp16, 4096 keys, batch 16. All in one process, '
            "launched alternately, each output checked.</text>",
            *legend,
            *bars,
            f'<text x="16" y="{y + 10}">* FlashAttention 3: its ratio to cuDNN on another day, '
            "good to about 3%.</text>",
            "</svg>\n",
        ]
    )


def _listed(rates: list[float]) -> str:
    pairs = zip(SERIES, rates, strict=True)
    return ", ".join(f"{series} {rate:.0f}" for (series, _), rate in pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.svg")
    parser.parse_args().out.write_text(picture(), encoding="utf-8")
