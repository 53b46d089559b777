"""TileWork: all that the schedule needs to know of a kernel, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class TileWork(NamedTuple):
    """One kernel's tile on one GPU.

    A CTA computes ``rows`` rows of Q in steps of ``keys`` keys; an SM holds ``resident`` CTAs.
    ``step_cycles(n)`` are the cycles in which each of n resident CTAs does one step; ``cta_cycles``
    those of a CTA apart from its steps.
    """

    rows: int
    keys: int
    resident: int
    cta_cycles: float
    step_cycles: Callable[[int], float]
