"""Which charts the page has, each drawn once for light and once for dark pages."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flashsmith.benchmark.charts import DARK, DPI, LIGHT, Theme, png_bytes
from flashsmith.benchmark.charts.heat_map import HeatMap, draw_heat_map
from flashsmith.benchmark.charts.roofline import draw_roofline
from flashsmith.benchmark.charts.throughput import Line, draw_throughput
from flashsmith.benchmark.progression import Ablation as Ladder
from flashsmith.benchmark.progression_plot import draw_ablation as draw_ladder
from flashsmith.benchmark.report.cells import Group, describe, peer_order
from flashsmith.benchmark.report.placing import Placing
from flashsmith.benchmark.rows import BenchRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Of a page, and of a chart; the tables have all.
MOST_CHARTS = 100
MOST_PEERS = 12
# Of a file's name.
MOST_CHARACTERS = 100
CSS_DPI = 96
# Wider pictures do not stand beside another.
HALF_PAGE = 650


@dataclass(frozen=True)
class Picture:
    """A chart as PNG files, with what it shows in words (`alt`) and a caption."""

    slug: str
    light: bytes
    dark: bytes
    alt: str
    caption: str

    @property
    def width(self) -> int:
        """How wide a page shows it at most, CSS pixels: text is then as large as was meant."""
        # The PNG header: signature and chunk head, then width and height.
        return round(struct.unpack(">I", self.light[16:20])[0] * CSS_DPI / DPI)

    @property
    def wide(self) -> bool:
        """Whether it needs the page's whole width."""
        return self.width > HALF_PAGE


def _picture(slug: str, draw: Callable[[Theme], Figure], alt: str, caption: str) -> Picture:
    light, dark = (png_bytes(draw(theme)) for theme in (LIGHT, DARK))
    return Picture(_slug(slug), light, dark, alt, caption)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MOST_CHARACTERS]


def throughput_pictures(groups: Sequence[Group], settings: Sequence[str]) -> Iterator[Picture]:
    """One for each group, up to MOST_CHARTS; `settings` say where each was measured, if that
    differs."""
    for group, setting in zip(groups[:MOST_CHARTS], settings, strict=False):
        heading = describe(group.first)
        lines = _lines(group)
        if not lines:
            continue
        lengths = [f"{cell.row.seq_k}\nb {cell.row.batch}" for cell in group.cells]
        peers = len({name for cell in group.cells for name in cell.peers})
        more = f" {peers - MOST_PEERS} more peers are in the table." if peers > MOST_PEERS else ""
        yield _picture(
            f"throughput {heading} b{group.first.batch} {setting}",
            partial(draw_throughput, heading, lengths, lines),
            f"TFLOP/s by length, {heading}: {_ends(lines)}",
            f"TFLOP/s by length and batch (b). {setting}".strip() + more,
        )


def _lines(group: Group) -> list[Line]:
    cells = group.cells
    lines = []
    if any(cell.chosen for cell in cells):
        lines.append(Line("ours", tuple(_rate(cell.chosen) for cell in cells), ours=True))
    kernels = max(len(cell.kernels) for cell in cells)
    if kernels:
        name = "ours" if kernels == 1 and not lines else f"best of {kernels}"
        rates = tuple(_rate(cell.best_kernel) for cell in cells)
        lines.append(Line(name, rates, ours=True, dashed=bool(lines)))
    for peer in peer_order(name for cell in cells for name in cell.peers)[:MOST_PEERS]:
        lines.append(Line(peer, tuple(_rate(cell.peers.get(peer)) for cell in cells)))
    return lines


def _rate(row: BenchRow | None) -> float | None:
    return row.tflops if row else None


def _ends(lines: Sequence[Line]) -> str:
    """What a reader who does not see the chart gets: each line's last rate."""
    return ", ".join(f"{line.name} {line.last[1]:.0f}" for line in lines if line.last)


def ladder_pictures(ladders: Sequence[Ladder]) -> Iterator[Picture]:
    """One for each ladder, up to MOST_CHARTS."""
    for number, ladder in enumerate(ladders[:MOST_CHARTS], 1):
        yield _picture(
            f"ladder {number}",
            partial(draw_ladder, ladder),
            f"The ladder of {len(ladder.steps)} kernels on {ladder.device}, as in the table below",
            f"{ladder.device}. Instructions and bank conflicts: the emulator at {ladder.counted}. "
            + (f"Times: {ladder.timed}, {ladder.protocol}." if ladder.timed else ladder.peer_note),
        )


def space_pictures(heat_maps: Sequence[tuple[HeatMap, str]]) -> Iterator[Picture]:
    """One for each heat map and its caption, up to MOST_CHARTS."""
    for heat, caption in heat_maps[:MOST_CHARTS]:
        best = max(heat.rates, key=heat.rates.__getitem__)
        heading = heat.heading.replace("\n", ", ")
        yield _picture(
            f"space {heat.heading}",
            partial(draw_heat_map, heat),
            f"{heading}; the best is {heat.rates[best]:.0f} at tile {best[1]} with {best[0]}",
            caption,
        )


def roofline_pictures(placings: Sequence[Placing]) -> Iterator[Picture]:
    """One for each GPU, dtype and head dimension, up to MOST_CHARTS."""
    for placing in placings[:MOST_CHARTS]:
        yield _picture(
            f"roofline {placing.heading}",
            partial(
                draw_roofline,
                placing.heading,
                placing.dram_tb_per_s,
                placing.ceilings,
                placing.traces,
            ),
            f"{placing.heading}: our kernels below the GPU's measured ceilings",
            "Ceilings as 'flashsmith roofline' measured them. A point is a length; each byte of "
            "q, k, v and o counted once.",
        )
