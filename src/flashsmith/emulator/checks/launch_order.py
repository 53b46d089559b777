"""What a launch may not touch before it has waited for the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashsmith.emulator.interface import MemoryAccess

_WORD = 4


@dataclass(frozen=True)
class Footprint:
    """The words of a range of global memory that launches have written, and those they have read.

    ``reached``: whether waiting for the launch before reaches it. It does not where that launch
    never waited for the launches before it.
    """

    entry: str
    begin: int
    written: np.ndarray
    read: np.ndarray
    reached: bool = True

    def met_by(self, event: MemoryAccess) -> np.ndarray:
        """Rows of an event that touch what must not be touched yet."""
        met = self.written
        if event.kind not in ("read", "async_read"):
            met = met | self.read
        first = (event.addresses - self.begin) // _WORD
        last = (event.addresses + np.asarray(event.sizes) - 1 - self.begin) // _WORD
        inside = (last >= 0) & (first < met.size) & (np.asarray(event.sizes) > 0)
        before = np.concatenate([[0], np.cumsum(met)])
        low, high = (np.clip(x, 0, met.size) for x in (first, last + 1))
        return inside & (before[high] > before[low])


class LaunchOrder:
    """The launches before a programmatic one, back to the last that began when all were over."""

    def __init__(self) -> None:
        self._earlier: list[Footprint] = []

    def next(self, last: list[Footprint], *, waited: bool, programmatic: bool) -> None:
        """A launch begins behind one with the footprints ``last``, which has waited or not."""
        if not programmatic:
            self._earlier = []
            return
        old = [
            Footprint(one.entry, one.begin, one.written, one.read, one.reached and waited)
            for one in self._earlier
        ]
        self._earlier = [*old, *last]

    def conflicts(
        self, event: MemoryAccess, after_launch: np.ndarray
    ) -> Iterator[tuple[Footprint, np.ndarray]]:
        """Footprints, and the rows of an access that meet them without being ordered after."""
        for one in self._earlier:
            bad = one.met_by(event)
            if one.reached:
                bad &= ~after_launch
            if bad.any():
                yield one, np.flatnonzero(bad)
