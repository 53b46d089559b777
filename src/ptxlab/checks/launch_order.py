"""Finds accesses that a launch makes before it has waited for the previous launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.interface import MemoryAccess

_WORD = 4


@dataclass(frozen=True)
class Footprint:
    """The words of a range of global memory that a launch has written, and the words that it has
    read.

    - ``weakly_written``, ``weakly_read``: the words that the launch touched with accesses that are
      not strong whole-word accesses.
    - ``reached``: whether griddepcontrol.wait covers this launch. It does not cover the launch if a
      launch in between never waited for its own predecessors.
    - ``direct``: whether this is the directly preceding launch.
    """

    entry: str
    begin: int
    written: np.ndarray
    read: np.ndarray
    weakly_written: np.ndarray
    weakly_read: np.ndarray
    reached: bool = True
    direct: bool = True

    def met_by(self, event: MemoryAccess, by_word: bool) -> np.ndarray:
        """Marks the rows of an event that conflict with this footprint.

        ``by_word``: the event makes strong whole-word accesses. They do not conflict with such
        accesses of the directly preceding launch.
        """
        written, read = self.written, self.read
        if by_word and self.direct:
            written, read = self.weakly_written, self.weakly_read
        first = (event.addresses - self.begin) // _WORD
        end = (event.addresses + np.asarray(event.sizes) - 1 - self.begin) // _WORD + 1
        first, end = (np.clip(x, 0, written.size) for x in (first, end))
        if not (first < end).any():
            return np.zeros(first.shape, np.bool_)
        low, high = int(first.min()), int(end.max())
        met = written[low:high]
        if event.kind not in ("read", "async_read"):
            met = met | read[low:high]
        before = np.concatenate([[0], np.cumsum(met)])
        return (np.asarray(event.sizes) > 0) & (before[end - low] > before[first - low])


class LaunchOrder:
    """The launches that a programmatic launch may overlap.

    They go back to the last launch that began only after all earlier launches had finished.
    """

    def __init__(self) -> None:
        self._earlier: list[Footprint] = []

    def next(
        self,
        last: list[Footprint],
        *,
        waited: bool,
        allowed_behind: bool,
        programmatic: bool,
    ) -> None:
        """Begins a launch after a launch with the footprints ``last``.

        - ``waited``: whether the previous launch has waited for its own predecessors.
        - ``allowed_behind``: whether each CTA of the previous launch waited before it allowed this
          launch to begin. The launches that the wait covered have then finished.
        """
        if not programmatic:
            self._earlier = []
            return
        old = [
            replace(one, reached=one.reached and waited, direct=False)
            for one in self._earlier
            if not (one.reached and allowed_behind)
        ]
        self._earlier = [*old, *last]

    def conflicts(
        self, event: MemoryAccess, after_launch: np.ndarray, by_word: bool
    ) -> Iterator[tuple[Footprint, np.ndarray]]:
        """Yields footprints and the rows of an access that conflict with them.

        ``by_word``: the accesses are strong whole-word accesses.
        """
        for one in self._earlier:
            bad = one.met_by(event, by_word)
            if one.reached:
                bad &= ~after_launch
            if bad.any():
                yield one, np.flatnonzero(bad)
