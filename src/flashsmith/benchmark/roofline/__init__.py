"""The roofline: a GPU's ceilings, each measured with a kernel that does only one thing, and how far
below these ceilings other kernels are.

``measure_roofline`` measures the ceilings, ``load_roofline`` reads an earlier measurement, and
``bounds`` gives the rates that the ceilings allow a config on a problem.
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
