"""The base class of checks, which merges repeated findings and names threads in messages.

The check ``Rules`` reports the mistakes that the machine itself detects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ptxlab.interface import (
    Finding,
    Launch,
    MemoryAccess,
    MemoryRange,
    Misuse,
    Observer,
    Site,
)

_THREADS_SHOWN = 4


class Check(Observer):
    """The base class of observers that report findings.

    A mistake at one PTX line is reported once, with the number of occurrences.

    The message, threads and address belong to the first occurrence.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], int] = {}
        self._threads_per_cta = 1
        self._arrays: Sequence[MemoryRange] = ()

    def begin(self, launch: Launch) -> None:
        """Stores the launch's shape; subclasses extend it."""
        self._threads_per_cta = launch.threads_per_cta
        self._arrays = launch.memory.ranges()
        self._places = {}  # lines of one kernel mean nothing in another

    def report(
        self, kind: str, site: Site, message: str, threads: np.ndarray, address: int
    ) -> None:
        """Adds a finding with ``len(threads)`` occurrences. If this finding exists already, only
        its count grows."""
        count = int(threads.size)
        place = self._places.setdefault((kind, site.ptx_line), len(self.findings))
        if place < len(self.findings):
            known = self.findings[place]
            self.findings[place] = replace(known, count=known.count + count)
            return
        self.findings.append(
            Finding(
                kind=kind,
                message=f"{_instruction(site)}: {message}",
                source=site.source,
                ptx_line=site.ptx_line,
                threads=tuple(int(t) for t in threads[:_THREADS_SHOWN]),
                address=int(address),
                count=count,
            )
        )

    def actor(self, event: MemoryAccess, row: int) -> str:
        """Returns the name of the thread at this index of an event; for a matrix access, its warp's
        name."""
        thread = int(event.threads[row])
        if event.shape == "plain":
            return self.name(thread)
        cta, tid = divmod(thread, self._threads_per_cta)
        return f"CTA {cta} warp {tid // 32}"

    def place(self, space: str, address: int) -> str:
        """Returns a description such as ``shared address 48`` or ``global address 0x7f00 (byte 48
        of x)``."""
        if space == "shared":
            return f"shared address {address}"
        inside = [one for one in self._arrays if one.begin <= address < one.end]
        where = f" (byte {address - inside[0].begin} of {inside[0].name})" if inside else ""
        return f"{space} address {address:#x}{where}"

    def name(self, thread: int) -> str:
        """Returns the name of a flat thread number, such as ``CTA 1 thread 37 (warp 1, lane
        5)``."""
        cta, tid = divmod(int(thread), self._threads_per_cta)
        return f"CTA {cta} thread {tid} (warp {tid // 32}, lane {tid % 32})"


class Rules(Check):
    """Kinds of findings: ``mbarrier-...``, ``wgmma-...``, ``bulk-...``, ``setmaxnreg``.

    The emulator itself detects these mistakes; without this check they raise EmulatorError.
    """

    handles_misuse = True

    def misuse(self, event: Misuse) -> None:
        """Reports one broken rule."""
        who = f"{self.name(int(event.threads[0]))}: " if event.threads.size else ""
        self.report(event.kind, event.site, who + event.message, event.threads, event.address)


def _instruction(site: Site) -> str:
    # Most instructions of a kernel come from one-line functions, so the line of the caller is more
    # useful.
    return f"{site.mnemonic} called from {site.caller}" if site.caller else site.mnemonic
