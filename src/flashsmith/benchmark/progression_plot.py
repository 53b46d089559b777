"""An ablation as a picture: time of each step where there is one, and what its instructions are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashsmith.benchmark.charts.labels import label
from flashsmith.benchmark.charts.style import Theme, dress, new_figure, title
from flashsmith.benchmark.progression import Ablation, Step, conflict_words, step_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What the stacked bars show one by one; the other classes are added up.
_GROUPS = {
    "mma": ("mma",),
    "ldmatrix": ("ldmatrix",),
    "exp2": ("special function",),
    "float": ("float", "convert"),
    "integer, moves": ("integer", "move", "predicate"),
}
_REST = "the rest"
# Of a step's name.
_MOST_LINES = 4
_GROUP_HUES = (0, 1, 2, 3, 4, 6)


def draw_ablation(ablation: Ablation, theme: Theme) -> Figure:
    """Steps from top to bottom; TFLOP/s, if timed, and executed instructions side by side."""
    names = step_names(ablation)
    timed = ablation.has_times
    figure = new_figure(11 if timed else 9, 1.5 + 0.55 * max(len(names), 2), theme)
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    if timed:
        _draw_times(panels[0], ablation, theme)
    _draw_instructions(panels[-1], ablation, theme)
    panels[0].set_yticks(range(len(names)), [_wrapped(name) for name in names])
    panels[0].tick_params(axis="y", labelcolor=theme.ink)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _wrapped(name: str) -> str:
    """A step's name on few short lines: a short form breaks after its tile, changes at commas."""
    tile, found, knobs = name.partition("): ")
    lines = [f"{tile}):", knobs] if found else name.replace(", ", ",\n").split("\n")
    return "\n".join(map(label, lines[:_MOST_LINES]))


def _draw_times(axes: Axes, ablation: Ablation, theme: Theme) -> None:
    dress(axes, theme, grid=None)
    axes.set_xticks([])
    title(axes, "TFLOP/s" + (f" (share of {label(ablation.peer)})" if ablation.peer else ""), theme)
    times = [step.time for step in ablation.steps]
    rates = [time.tflops if time else 0.0 for time in times]
    colours = [theme.hues[0] if step.ok else theme.bad for step in ablation.steps]
    axes.barh(range(len(rates)), rates, height=0.62, color=colours)
    peers = [time.tflops / time.share for time in times if time and time.share]
    longest = max([*rates, *peers])
    axes.set_xlim(0, longest * 1.12)
    for place, step in enumerate(ablation.steps):
        _write_rate(axes, place, step, longest, theme)
    if peers:
        # Behind the bars; steps of several dtypes have a peer's time each, all but the same.
        axes.axvline(
            max(peers), color=theme.hues[1], linewidth=1.4, linestyle=(0, (4, 3)), zorder=0
        )
        axes.text(
            max(peers),
            -0.52,
            f"{label(ablation.peer)}: {max(peers):.0f} ",
            ha="right",
            va="bottom",
            fontsize=9,
            color=theme.hues[1],
        )


def _write_rate(axes: Axes, place: int, step: Step, longest: float, theme: Theme) -> None:
    """A step's rate at the end of its bar; inside, where the bar is long enough for it."""
    rate = step.time.tflops if step.time else 0.0
    text = "not timed" if step.time is None else f"{rate:.0f}"
    if step.time and step.time.share:
        text += f"  ({step.time.share:.0%})"
    text += "" if step.ok else "  WRONG"
    inside = rate > 0.45 * longest
    axes.text(
        rate + (-0.02 if inside else 0.015) * longest,
        place,
        text,
        ha="right" if inside else "left",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=theme.surface if inside else theme.ink if step.ok else theme.bad,
    )


def _draw_instructions(axes: Axes, ablation: Ablation, theme: Theme) -> None:
    dress(axes, theme, grid=None)
    axes.set_xticks([])
    title(axes, f"Warp instructions ({label(ablation.counted)})", theme)
    left = [0.0] * len(ablation.steps)
    for (group, counts), hue in zip(_grouped(ablation.steps).items(), _GROUP_HUES, strict=True):
        axes.barh(
            range(len(counts)),
            counts,
            left=left,
            height=0.62,
            color=theme.hues[hue],
            edgecolor=theme.surface,
            linewidth=1.2,
            label=group,
        )
        left = [begin + count for begin, count in zip(left, counts, strict=True)]
    longest = max([*left, 1.0])
    axes.set_xlim(0, longest * 1.55)
    for place, step in enumerate(ablation.steps):
        axes.text(
            left[place] + longest * 0.015,
            place,
            _costs(step),
            va="center",
            fontsize=8.5,
            color=theme.ink,
            linespacing=1.25,
        )
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=6,
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.muted,
        handlelength=1,
        columnspacing=1.2,
    )


def _costs(step: Step) -> str:
    total = step.total_instructions
    lines = ["did not end" if total is None else f"{total:,}"]
    lines[0] += f", {step.registers} registers"
    if step.spill_store_bytes:
        lines[0] += f", {step.spill_store_bytes} B spilled"
    conflicts = conflict_words(step)
    if conflicts != "none":
        lines.append(label(f"conflicts: {conflicts}"))
    return "\n".join(lines)


def _grouped(steps: tuple[Step, ...]) -> dict[str, list[float]]:
    """Instructions of every step, by group of classes."""
    grouped: dict[str, list[float]] = {group: [] for group in (*_GROUPS, _REST)}
    for step in steps:
        mix = step.instructions or {}
        named = 0
        for group, classes in _GROUPS.items():
            count = sum(mix.get(name, 0) for name in classes)
            grouped[group].append(count)
            named += count
        grouped[_REST].append(sum(mix.values()) - named)
    return grouped
