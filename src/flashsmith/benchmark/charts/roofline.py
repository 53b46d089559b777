"""The roofline: what bandwidth and arithmetic allow at each intensity, and where kernels lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashsmith.benchmark.charts.labels import label, spread_out
from flashsmith.benchmark.charts.style import MARKERS, Theme, dress, new_figure, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trace:
    """Kernels of one kind: (FLOP per DRAM byte, TFLOP/s) in the order of their lengths."""

    name: str
    points: tuple[tuple[float, float], ...]


def draw_roofline(
    heading: str,
    dram_tb_per_s: float | None,
    ceilings: Sequence[tuple[str, float]],
    traces: Sequence[Trace],
    theme: Theme,
) -> Figure:
    """`ceilings` are (name, TFLOP/s), level lines; the bandwidth is a slope, if it is known."""
    figure = new_figure(6.4, 4.2, theme)
    axes = figure.subplots()
    dress(axes, theme, grid="both")
    title(axes, heading, theme)
    intensities = [x for trace in traces for x, _ in trace.points]
    left, right = min(intensities) / 8, max(intensities) * 1.5
    rates = [y for trace in traces for _, y in trace.points]
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    tallest = max([*rates, *(rate for _, rate in ceilings)])
    axes.set_ylim(0, tallest * 1.1)
    _draw_ceilings(axes, dram_tb_per_s, ceilings, (left, right), theme)
    for number, trace in enumerate(traces):
        _draw_trace(axes, number, trace, theme)
    _label(axes, ceilings, traces, right, theme)
    axes.set_xlabel("FLOP per byte of q, k, v and o", color=theme.muted, fontsize=9)
    axes.set_ylabel("TFLOP/s", color=theme.muted, fontsize=9)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
    axes.minorticks_off()
    return figure


def _draw_ceilings(
    axes: Axes,
    dram: float | None,
    ceilings: Sequence[tuple[str, float]],
    ends: tuple[float, float],
    theme: Theme,
) -> None:
    left, right = ends
    for _, rate in ceilings:
        # A ceiling begins where the bandwidth reaches it.
        begin = left if dram is None else min(max(left, rate / dram), right)
        axes.plot([begin, right], [rate, rate], color=theme.muted, linewidth=1.4)
    if dram is not None:
        top = max((rate for _, rate in ceilings), default=axes.get_ylim()[1])
        steps = [left + (min(right, top / dram) - left) * part / 60 for part in range(61)]
        if steps[-1] > left:
            axes.plot(steps, [dram * x for x in steps], color=theme.muted, linewidth=1.4)
            axes.annotate(
                f"DRAM {dram:.2f} TB/s",
                xy=(steps[0], dram * steps[0]),
                xytext=(8, -4),
                textcoords="offset points",
                color=theme.muted,
                fontsize=8.5,
                va="top",
            )


def _draw_trace(axes: Axes, number: int, trace: Trace, theme: Theme) -> None:
    axes.plot(
        [x for x, _ in trace.points],
        [y for _, y in trace.points],
        color=theme.hues[number % len(theme.hues)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=6,
        linewidth=1.2,
        markeredgecolor=theme.surface,
        markeredgewidth=0.8,
        zorder=3,
    )


def _label(
    axes: Axes,
    ceilings: Sequence[tuple[str, float]],
    traces: Sequence[Trace],
    right: float,
    theme: Theme,
) -> None:
    """Names of lines and ceilings to the right of the axes, none on another."""
    labels = [(f"{label(name)} {rate:.0f}", rate, theme.muted, right) for name, rate in ceilings]
    for number, trace in enumerate(traces):
        x, y = trace.points[-1]
        labels.append((f"{label(trace.name)} {y:.0f}", y, theme.hues[number % len(theme.hues)], x))
    gap = 0.052 * axes.get_ylim()[1]
    heights = spread_out([y for _, y, _, _ in labels], gap)
    for (text, y, colour, x), height in zip(labels, heights, strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.03, height),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=9,
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
