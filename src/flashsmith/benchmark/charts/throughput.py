"""TFLOP/s by length: a line for each contender, labelled at its end; bars for a single length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashsmith.benchmark.charts.labels import label, spread_out
from flashsmith.benchmark.charts.style import MARKERS, Theme, dress, new_figure, place_of, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_HEIGHT = 0.062  # of the axes' height: a line of text at the labels' size


@dataclass(frozen=True)
class Line:
    """One contender: its rate at each length, None where it has none. `ours` is drawn strongly."""

    name: str
    rates: tuple[float | None, ...]
    ours: bool = False
    dashed: bool = False

    @property
    def last(self) -> tuple[int, float] | None:
        """The last length's place, and the rate there; None without any rate."""
        known = [(place, rate) for place, rate in enumerate(self.rates) if rate is not None]
        return known[-1] if known else None


def draw_throughput(
    heading: str, lengths: Sequence[str], lines: Sequence[Line], theme: Theme
) -> Figure:
    """`lengths` are the axis' labels, evenly spaced; `lines` have a rate for each."""
    shown = [line for line in lines if line.last]
    if len(lengths) == 1:
        return _draw_bars(heading, lengths[0], shown, theme)
    figure = new_figure(6.4, 3.8, theme)
    axes = figure.subplots()
    dress(axes, theme)
    title(axes, heading, theme)
    for number, line in enumerate(shown):
        _draw_line(axes, number, line, theme)
    axes.set_xticks(range(len(lengths)), list(lengths))
    axes.set_xlim(-0.3, len(lengths) - 1 + 0.08 * len(lengths) + 0.02)
    highest = max((rate for line in shown for rate in line.rates if rate), default=1.0)
    axes.set_ylim(0, highest * 1.08)
    axes.set_ylabel("TFLOP/s", color=theme.muted, fontsize=9)
    _label_ends(axes, shown, highest * 1.08, lengths, theme)
    return figure


def _draw_line(axes: Axes, number: int, line: Line, theme: Theme) -> None:
    points = [(place, rate) for place, rate in enumerate(line.rates) if rate is not None]
    axes.plot(
        [place for place, _ in points],
        [rate for _, rate in points],
        color=_colour(line, number, theme),
        linewidth=2.6 if line.ours and not line.dashed else 1.6,
        linestyle=(0, (4, 2)) if line.dashed else "-",
        marker=MARKERS[_place(line, number)],
        markersize=6 if line.ours else 5,
        markeredgecolor=theme.surface,
        markeredgewidth=0.8,
        zorder=3 if line.ours else 2,
        clip_on=False,
    )


def _colour(line: Line, number: int, theme: Theme) -> str:
    return theme.hues[_place(line, number)]


def _place(line: Line, number: int) -> int:
    return place_of("ours" if line.ours else line.name, number)


def _label_ends(
    axes: Axes, lines: Sequence[Line], top: float, lengths: Sequence[str], theme: Theme
) -> None:
    ends = [line.last for line in lines if line.last]
    heights = spread_out([rate for _, rate in ends], gap=_LABEL_HEIGHT * top)
    for number, (line, (place, rate), height) in enumerate(zip(lines, ends, heights, strict=True)):
        ended = place < len(lengths) - 1
        axes.annotate(
            f"{label(line.name)} {rate:.0f}"
            + (f" at {lengths[place].split()[0]}" if ended else ""),
            xy=(place, rate),
            xytext=(len(lengths) - 1 + 0.055 * len(lengths), height),
            color=_colour(line, number, theme),
            fontsize=9,
            fontweight="bold" if line.ours else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": theme.grid,
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def _draw_bars(heading: str, length: str, lines: Sequence[Line], theme: Theme) -> Figure:
    figure = new_figure(6.4, 1.3 + 0.42 * max(len(lines), 2), theme)
    axes = figure.subplots()
    dress(axes, theme, grid=None)
    title(axes, f"{heading}, length {length.replace(chr(10), ', ')}", theme)
    axes.set_xticks([])
    rates = [line.rates[0] or 0.0 for line in lines]
    colours = [_colour(line, number, theme) for number, line in enumerate(lines)]
    axes.barh(range(len(lines)), rates, height=0.6, color=colours)
    axes.set_yticks(range(len(lines)), [label(line.name) for line in lines])
    axes.tick_params(axis="y", labelcolor=theme.ink)
    axes.set_ylim(max(len(lines), 2) - 0.5, -0.5)
    axes.set_xlim(0, max([*rates, 1.0]) * 1.2)
    for place, rate in enumerate(rates):
        axes.text(rate, place, f"  {rate:.0f} TFLOP/s", va="center", fontsize=9, color=theme.ink)
    return figure
