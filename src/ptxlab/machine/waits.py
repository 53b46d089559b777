"""The interface of waits, through which the scheduler finds out when a group may continue."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ptxlab.interface import Site
from ptxlab.machine.geometry import Geometry
from ptxlab.machine.group import Group


class Refused:
    """The message to a coroutine whose waiting instruction gives up: try_wait then returns
    false."""

    def __repr__(self) -> str:
        return "refused"


REFUSED = Refused()


class Wait(ABC):
    """The wait of a group at an instruction.

    ``refusable``: whether the instruction may give up, as mbarrier.try_wait may; its coroutine then
    receives REFUSED.
    """

    refusable = False

    def __init__(self, group: Group, site: Site) -> None:
        self.group, self.site = group, site

    @abstractmethod
    def passed(self) -> np.ndarray:
        """Returns, for each thread of the group, whether it may continue."""

    @abstractmethod
    def part(self, group: Group, mask: np.ndarray) -> Wait:
        """Returns the same wait for only the threads in ``mask``, which are now ``group``."""

    @abstractmethod
    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """Returns the missing events for a deadlock report: (positions of the threads,
        description)."""

    @abstractmethod
    def grant(self, mask: np.ndarray | None = None) -> None:
        """Called when the threads in ``mask`` (None: all) continue; notifies observers."""


def describe(waits: list[Wait], geometry: Geometry) -> str:
    """Lists the waiting threads with their reasons; CTAs in the same state are counted together."""
    lines = []
    for wait in waits:
        for positions, words in wait.reasons():
            ctas = wait.group.cta[positions]
            cta = int(ctas[0])
            tids = (wait.group.index[positions] % geometry.threads_per_cta)[ctas == cta]
            others = int(np.unique(ctas).size) - 1
            lines.append(
                f"CTA {cta + geometry.first_cta} threads {ranges(tids)} at {wait.site} wait "
                f"for {words}" + (f"; the same in {others} more CTAs" if others else "")
            )
    return "; ".join(lines)


def ranges(numbers: np.ndarray) -> str:
    """Formats ascending numbers as ranges, such as ``0-31, 64-95``."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    texts = []
    for run in np.split(numbers, breaks)[:8]:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(texts) + (", ..." if len(breaks) >= 8 else "")
