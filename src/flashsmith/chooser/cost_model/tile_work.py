"""TileWork: all that the schedule needs to know of a kernel, whatever its family."""

from __future__ import annotations

from typing import NamedTuple


class TileWork(NamedTuple):
    """One kernel's tile on one GPU.

    A CTA computes ``rows`` rows of Q in steps of ``keys`` keys; an SM holds ``resident`` CTAs.
    ``step_cycles[n]`` are the cycles in which each of n CTAs on an SM does one step, for n from 0
    to resident; ``cta_cycles`` those of a CTA apart from its steps. ``clock`` is the SM's under
    this work, GHz.

    ``masked_rows``: a mask spares a CTA's work in blocks of so many rows; 0: of all its rows.
    ``longest_first``: the longest tiles of many heads begin first, so that the short ones fill up
    the end.
    """

    rows: int
    keys: int
    resident: int
    cta_cycles: float
    step_cycles: tuple[float, ...]
    clock: float
    masked_rows: int = 0
    longest_first: bool = False
