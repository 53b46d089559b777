"""The config space as a heat map: tiles across, other knobs down, the best rate in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashsmith.benchmark.charts.labels import label
from flashsmith.benchmark.charts.style import Theme, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeatMap:
    """Rates by (row, column); a missing pair has no kernel, one in `failed` a wrong one."""

    heading: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    rates: dict[tuple[str, str], float]
    failed: frozenset[tuple[str, str]] = frozenset()


def draw_heat_map(heat: HeatMap, theme: Theme) -> Figure:
    """Each cell with its figure, the best one framed."""
    import numpy as np

    longest = max((len(label(row)) for row in heat.rows), default=0)
    width = 0.5 + 0.078 * longest + 0.78 * len(heat.columns)
    figure = new_figure(max(width, 5.5), 1.1 + 0.28 * len(heat.rows), theme)
    axes = figure.subplots()
    dress(axes, theme, grid=None)
    # Over the row labels too: the map itself may be narrower than its heading.
    figure.suptitle(
        "\n".join(map(label, heat.heading.split("\n"))),
        x=0.02,
        ha="left",
        color=theme.ink,
        fontsize=11,
        fontweight="bold",
    )
    values = np.full((len(heat.rows), len(heat.columns)), np.nan)
    for (row, column), rate in heat.rates.items():
        values[heat.rows.index(row), heat.columns.index(column)] = rate
    # An axis that carries no rate would leave nothing to scale colours by.
    lowest, highest = (np.nanmin(values), np.nanmax(values)) if heat.rates else (0.0, 1.0)
    image = axes.imshow(
        values, cmap=theme.colour_map, aspect="auto", vmin=lowest, vmax=max(highest, lowest + 1e-9)
    )
    axes.set_xticks(range(len(heat.columns)), list(map(label, heat.columns)))
    axes.set_yticks(range(len(heat.rows)), list(map(label, heat.rows)))
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, labelcolor=theme.ink)
    _part_cells(axes, values.shape, theme)
    _write_rates(axes, heat, image, theme)
    return figure


def _part_cells(axes: Axes, shape: Sequence[int], theme: Theme) -> None:
    """A gap of the page's colour between cells."""
    axes.set_xticks([place - 0.5 for place in range(1, shape[1])], minor=True)
    axes.set_yticks([place - 0.5 for place in range(1, shape[0])], minor=True)
    axes.grid(visible=True, which="minor", color=theme.surface, linewidth=2)
    axes.tick_params(which="minor", length=0)


def _write_rates(axes: Axes, heat: HeatMap, image: object, theme: Theme) -> None:
    from matplotlib.patches import Rectangle

    best = max(heat.rates.values(), default=None)
    for down, row in enumerate(heat.rows):
        for across, column in enumerate(heat.columns):
            rate = heat.rates.get((row, column))
            if rate is None:
                wrong = (row, column) in heat.failed
                axes.text(
                    across, down, "wrong" if wrong else "·", ha="center", va="center",
                    fontsize=8.5, color=theme.bad if wrong else theme.muted,
                )  # fmt: skip
                continue
            background = image.cmap(image.norm(rate))[:3]  # type: ignore[attr-defined]
            axes.text(
                across, down, f"{rate:.0f}", ha="center", va="center", fontsize=8.5,
                fontweight="bold" if rate == best else "normal",
                color="#111111" if _luminance(background) > 0.35 else "#ffffff",
            )  # fmt: skip
            if rate == best:
                axes.add_patch(
                    Rectangle(
                        (across - 0.46, down - 0.44), 0.92, 0.88,
                        fill=False, edgecolor=theme.ink, linewidth=1.8,
                    )
                )  # fmt: skip


def _luminance(colour: Sequence[float]) -> float:
    """Relative luminance, 0 to 1, of an sRGB colour; approximate gamma."""
    red, green, blue = (part**2.2 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
