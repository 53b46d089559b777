"""Draws an ablation: the instruction mix of each step and, if the steps were timed, their
throughput.

It uses matplotlib (extra 'bench') without a display and without global state.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashsmith.benchmark.measurement_files import require_writable
from flashsmith.benchmark.progression import Ablation, Step, conflict_words, step_names
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# Twice the resolution of a web page, so that pictures are sharp on dense screens and on paper.
_DPI = 144
_SURFACE, _INK, _MUTED, BAD = "#ffffff", "#1a1c20", "#5b616b", "#b3261e"
# Colours that people with any common form of colour blindness can distinguish; the first is
# flashsmith's, the second the peer's.
_HUES = ("#0b5cad", "#c75000", "#007f5c", "#a33c80", "#7a6a00", "#565b64")
# Longer labels would leave no room for the bars; the knobs of all shipped configs are shorter.
_MOST_CHARACTERS = 105
# The instruction classes in each part of a stacked bar; all other classes are summed in _REST.
_GROUPS = {
    "mma": ("mma",),
    "ldmatrix": ("ldmatrix",),
    "exp2": ("special function",),
    "float": ("float", "convert"),
    "integer, moves": ("integer", "move", "predicate"),
}
_REST = "the rest"
# The maximum number of lines of a step's name.
_MOST_LINES = 4


def check_picture_path(path: Path) -> None:
    """Raises ArgumentError unless `path` ends in a supported suffix and a file can be written
    there.

    Raises DependencyError if matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(
            f"plot={str(path)!r}: a picture ends in {' or '.join(SUFFIXES)}; "
            f"for example {path.stem or 'ladder'}.png"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            f"pictures need matplotlib, not installed here; {install_extra('bench')}"
        ) from error
    require_writable("plot", path)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes the figure; the suffix of `path` selects the format. Equal figures give equal bytes.

    Raises ArgumentError if the suffix is unknown or the file cannot be written.
    """
    check_picture_path(path)
    from matplotlib import rc_context

    kind = path.suffix.lower().removeprefix(".")
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None}
    # Without this setting, the IDs in an SVG contain a random salt.
    with rc_context({"svg.hashsalt": "flashsmith"}), warnings.catch_warnings():
        # Names from a file may be too long for the chart, and may have characters that the font
        # lacks. Such characters are drawn as boxes. Neither case needs a warning.
        warnings.filterwarnings("ignore", r"Glyph \d+|constrained_layout not applied", UserWarning)
        figure.savefig(path, dpi=_DPI, format=kind, metadata=metadata)


def draw_ablation(ablation: Ablation) -> Figure:
    """Draws the steps from top to bottom in two panels: TFLOP/s if timed, and executed
    instructions."""
    names = step_names(ablation)
    timed = ablation.has_times
    figure = _new_figure(11 if timed else 9, 1.5 + 0.55 * max(len(names), 2))
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    if timed:
        _draw_times(panels[0], ablation)
    _draw_instructions(panels[-1], ablation)
    panels[0].set_yticks(range(len(names)), [_wrapped(name) for name in names])
    panels[0].tick_params(axis="y", labelcolor=_INK)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size (in inches) with automatic layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    figure = Figure(figsize=(width, height), facecolor=_SURFACE, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Axes, title: str) -> None:
    """Removes the frame of the axes and adds a left-aligned heading."""
    axes.set_facecolor(_SURFACE)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=_MUTED, labelcolor=_MUTED, length=0, labelsize=9)
    axes.grid(visible=False)
    axes.set_axisbelow(True)
    axes.set_xticks([])
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold", pad=10)


def _label(text: str) -> str:
    """A string from a file, shortened, and without the characters that a picture cannot show."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - 1]}…"
    # Matplotlib would read text between two dollar signs as a formula.
    return printable(text, lines=True).replace("$", r"\$")


def _wrapped(name: str) -> str:
    """A step's name on a few short lines.

    A short form is broken after its tile, and a list of changes is broken at commas.
    """
    tile, found, knobs = name.partition("): ")
    lines = [f"{tile}):", knobs] if found else name.replace(", ", ",\n").split("\n")
    return "\n".join(map(_label, lines[:_MOST_LINES]))


def _draw_times(axes: Axes, ablation: Ablation) -> None:
    _dress(axes, "TFLOP/s" + (f" (share of {_label(ablation.peer)})" if ablation.peer else ""))
    times = [step.time for step in ablation.steps]
    rates = [time.tflops if time else 0.0 for time in times]
    colours = [_HUES[0] if step.ok else BAD for step in ablation.steps]
    axes.barh(range(len(rates)), rates, height=0.62, color=colours)
    peers = [time.tflops / time.share for time in times if time and time.share]
    longest = max([*rates, *peers])
    axes.set_xlim(0, longest * 1.12)
    for place, step in enumerate(ablation.steps):
        _write_rate(axes, place, step, longest)
    if peers:
        # Drawn behind the bars. If the steps have several dtypes, the peer's times differ slightly;
        # the line marks the shortest time.
        axes.axvline(max(peers), color=_HUES[1], linewidth=1.4, linestyle=(0, (4, 3)), zorder=0)
        axes.text(
            max(peers),
            -0.52,
            f"{_label(ablation.peer)}: {max(peers):.0f} ",
            ha="right",
            va="bottom",
            fontsize=9,
            color=_HUES[1],
        )


def _write_rate(axes: Axes, place: int, step: Step, longest: float) -> None:
    """Writes a step's rate at the end of its bar, or inside the bar if it is long enough."""
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
        color=_SURFACE if inside else _INK if step.ok else BAD,
    )


def _draw_instructions(axes: Axes, ablation: Ablation) -> None:
    _dress(axes, f"Warp instructions ({_label(ablation.counted)})")
    left = [0.0] * len(ablation.steps)
    for (group, counts), hue in zip(_grouped(ablation.steps).items(), _HUES, strict=True):
        axes.barh(
            range(len(counts)),
            counts,
            left=left,
            height=0.62,
            color=hue,
            edgecolor=_SURFACE,
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
            color=_INK,
            linespacing=1.25,
        )
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=6,
        frameon=False,
        fontsize=8.5,
        labelcolor=_MUTED,
        handlelength=1,
        columnspacing=1.2,
    )


def _costs(step: Step) -> str:
    total = step.total_instructions
    lines = ["did not finish" if total is None else f"{total:,}"]
    lines[0] += f", {step.registers} registers"
    if step.spill_store_bytes:
        lines[0] += f", {step.spill_store_bytes} B spilled"
    conflicts = conflict_words(step)
    if conflicts != "none":
        lines.append(_label(f"conflicts: {conflicts}"))
    return "\n".join(lines)


def _grouped(steps: tuple[Step, ...]) -> dict[str, list[float]]:
    """The instruction counts of every step, summed by group of classes."""
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
