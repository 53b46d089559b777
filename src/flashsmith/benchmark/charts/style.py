"""What all pictures share: colours for a light and a dark page, a bare pair of axes, files."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashsmith.benchmark.charts.labels import label
from flashsmith.benchmark.measurement_files import require_writable
from flashsmith.errors import ArgumentError, DependencyError, install_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# Twice a page's own pixels, so that pictures stay crisp on dense screens and on paper.
DPI = 144


@dataclass(frozen=True)
class Theme:
    """The colours of one kind of page.

    `hues` are told apart by all common kinds of colour vision, in the order in which they are
    given out; the first is flashsmith's.
    """

    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    bad: str
    hues: tuple[str, ...]


LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1a1c20",
    muted="#5b616b",
    grid="#dfe2e7",
    bad="#b3261e",
    hues=("#0b5cad", "#c75000", "#007f5c", "#a33c80", "#7a6a00", "#3a8fc7", "#565b64", "#8a4b2d"),
)
DARK = Theme(
    name="dark",
    surface="#1b1e24",
    ink="#e8eaee",
    muted="#a3a9b4",
    grid="#343942",
    bad="#ff8a80",
    hues=("#6cb6ff", "#ff9a52", "#3fcf9f", "#f08ac8", "#d8c24a", "#9ad6f5", "#b4bac4", "#d9a38a"),
)


def check_picture_path(path: Path) -> None:
    """Raises ArgumentError unless `path` names a kind of picture, in a place that can be written.

    Makes its folder. Raises DependencyError where matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(
            f"plot={str(path)!r}: a picture ends in {' or '.join(SUFFIXES)}; "
            f"for example {path.stem or 'ladder'}.png"
        )
    require_matplotlib()
    require_writable("plot", path)


def require_matplotlib() -> None:
    """Raises DependencyError, which names the extra, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            f"pictures need matplotlib, not installed here; {install_extra('bench')}"
        ) from error


def new_figure(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure, inches, on the theme's surface, that lays its parts out by itself."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    figure = Figure(figsize=(width, height), facecolor=theme.surface, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, theme: Theme, *, grid: Literal["y", "both"] | None = "y") -> None:
    """The theme's colours on a pair of axes: no frame, thin lines along the axis `grid`."""
    axes.set_facecolor(theme.surface)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=theme.muted, labelcolor=theme.muted, length=0, labelsize=9)
    axes.grid(visible=False)
    if grid:
        axes.grid(visible=True, axis=grid, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def title(axes: Axes, text: str, theme: Theme) -> None:
    """A heading flush with the left of the axes."""
    axes.set_title(label(text), loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=10)


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    _save(figure, buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _save(figure: Figure, file: io.BytesIO | Path, **options: Any) -> None:
    with warnings.catch_warnings():
        # Whatever names a file has, a terminal need not be told that the font lacks a character,
        # which is drawn as a box, or that long ones leave the chart little room.
        warnings.filterwarnings("ignore", r"Glyph \d+|constrained_layout not applied", UserWarning)
        figure.savefig(file, dpi=DPI, **options)


def save_chart(figure: Figure, path: Path) -> None:
    """Write the figure as what `path` ends in; the same figure gives the same bytes.

    Raises ArgumentError for another ending or where the file cannot be written.
    """
    check_picture_path(path)
    from matplotlib import rc_context

    kind = path.suffix.lower().removeprefix(".")
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None}
    # Ids in an SVG are salted at random otherwise.
    with rc_context({"svg.hashsalt": "flashsmith"}):
        _save(figure, path, format=kind, metadata=metadata)
