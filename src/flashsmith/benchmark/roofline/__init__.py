"""A GPU's own ceilings, measured by kernels that do one thing each, and where kernels lie below.

``measure_roofline`` measures, ``load_roofline`` reads what was measured before, ``bounds`` says
what each ceiling allows a config on a problem.
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
