"""What a launch may not touch before it has waited for the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.interface import MemoryAccess

_WORD = 4


@dataclass(frozen=True)
class Footprint:
    """The words of a range of global memory that a launch has written, and those it has read.

    - ``weakly_written``, ``weakly_read``: those of them that it touched in any other way than by
      strong accesses of a word each.
    - ``reached``: whether waiting for the launch before reaches it. It does not where that launch
      never waited for the launches before it.
    - ``direct``: whether no launch is between.
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
        """Rows of an event that touch what must not be touched yet.

        ``by_word``: the event's accesses are strong ones of a word each, which do not conflict with
        such accesses of the launch directly before.
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
    """The launches before a programmatic one, back to the last that began when all were over."""

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
        """A launch begins behind one with the footprints ``last``.

        - ``waited``: whether that has waited for the launches before it.
        - ``allowed_behind``: whether each of its CTAs has waited before it let this one begin,
          which so begins when the launches are over that the wait reached.
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
        """Footprints, and the rows of an access that meet them without being ordered after.

        ``by_word``: the accesses are strong ones of a word each.
        """
        for one in self._earlier:
            bad = one.met_by(event, by_word)
            if one.reached:
                bad &= ~after_launch
            if bad.any():
                yield one, np.flatnonzero(bad)
