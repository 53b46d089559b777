"""A GPU's ceilings, measured by single-purpose kernels, and how far kernels stay below them.

``measure_roofline`` measures, ``load_roofline`` reads an earlier measurement, and ``bounds``
returns what each ceiling allows a config on a problem.
"""

from __future__ import annotations

from flashsmith.benchmark.roofline.roofline import (
    Bound,
    Ceiling,
    ProblemIntensity,
    Roofline,
    bounds,
    intensity,
    load_roofline,
    read_roofline,
    roofline_path,
    save_roofline,
    stored_rooflines,
)

__all__ = [
    "Bound",
    "Ceiling",
    "ProblemIntensity",
    "Roofline",
    "bounds",
    "intensity",
    "load_roofline",
    "read_roofline",
    "roofline_path",
    "save_roofline",
    "stored_rooflines",
]
