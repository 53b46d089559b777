"""Finds accesses that a launch makes before it waits for the previous launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.interface import MemoryAccess

_WORD = 4


@dataclass(frozen=True)
class Footprint:
    """The words of a range of global memory that one launch has written, and the words that it has
    read.

    - ``weakly_written``, ``weakly_read``: the words that it accessed in any way other than strongly
      and as a whole.
    - ``reached``: whether a griddepcontrol.wait of the current launch also waits for this launch.
      This is false if a launch between these two never waited for the launches before it.
    - ``direct``: whether this is the launch directly before the current one.
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
        """Marks the threads of an event whose accesses conflict with this footprint.

        ``by_word``: whether the event's accesses are strong and cover whole words. They do not
        conflict with accesses of the same kind by the launch directly before this one.
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
    """The earlier launches that a programmatic launch may overlap.

    The list reaches back to the last launch that did not overlap any earlier launch.
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
        """Begins a new launch; ``last`` are the footprints of the launch before it.

        - ``waited``: whether the previous launch has waited for the launches before it.
        - ``allowed_behind``: whether each CTA of the previous launch first waited and then allowed
          the new launch to begin. If so, the launches for which it waited have finished.
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
        """Yields footprints, each with the event's threads that conflict with it.

        ``by_word``: whether the accesses are strong and cover whole words.
        """
        for one in self._earlier:
            bad = one.met_by(event, by_word)
            if one.reached:
                bad &= ~after_launch
            if bad.any():
                yield one, np.flatnonzero(bad)
