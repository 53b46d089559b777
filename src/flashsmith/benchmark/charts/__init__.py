"""Pictures of measurements, drawn with matplotlib (extra 'bench'), for light and for dark pages.

Each chart is a function from plain figures to a matplotlib Figure. No display and no global state:
`style` draws on its own canvas.
"""

from __future__ import annotations

from flashsmith.benchmark.charts.style import (
    DARK,
    DPI,
    LIGHT,
    Theme,
    check_picture_path,
    png_bytes,
    require_matplotlib,
    save_chart,
)

__all__ = [
    "DARK",
    "DPI",
    "LIGHT",
    "Theme",
    "check_picture_path",
    "png_bytes",
    "require_matplotlib",
    "save_chart",
]
