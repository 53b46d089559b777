"""What a group can wait for, as the scheduler sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ptxlab.interface import Site
from ptxlab.machine.geometry import Geometry
from ptxlab.machine.group import Group


class Refused:
    """Sent to a coroutine when the instruction it waits at gives up: try_wait returns false."""

    def __repr__(self) -> str:
        return "refused"


REFUSED = Refused()


class Wait(ABC):
    """A group that stands at an instruction until something happens.

    ``refusable``: the instruction may also give up (mbarrier.try_wait); it then receives REFUSED.
    """

    refusable = False

    def __init__(self, group: Group, site: Site) -> None:
        self.group, self.site = group, site

    @abstractmethod
    def passed(self) -> np.ndarray:
        """Per thread of the group, whether it may go on."""

    @abstractmethod
    def part(self, group: Group, mask: np.ndarray) -> Wait:
        """The same for the threads in ``mask``, which are now ``group``."""

    @abstractmethod
    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """What is missing: (positions of the threads concerned, words), for a deadlock report."""

    @abstractmethod
    def grant(self, mask: np.ndarray | None = None) -> None:
        """Threads (None: all) go on now; observers are notified here."""


def describe(waits: list[Wait], geometry: Geometry) -> str:
    """The waiting threads and what they wait for; CTAs in the same state are counted together."""
    lines = []
    for wait in waits:
        for positions, words in wait.reasons():
            ctas = wait.group.cta[positions]
            cta = int(ctas[0])
            tids = (wait.group.index[positions] % geometry.threads_per_cta)[ctas == cta]
            others = int(np.unique(ctas).size) - 1
            lines.append(
                f"CTA {cta + geometry.first_cta} threads {ranges(tids)} at {wait.site} wait "
                f"for {words}" + (f" and likewise in {others} more CTAs" if others else "")
            )
    return "; ".join(lines)


def ranges(numbers: np.ndarray) -> str:
    """``0-31, 64-95`` for ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    texts = []
    for run in np.split(numbers, breaks)[:8]:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(texts) + (", ..." if len(breaks) >= 8 else "")
