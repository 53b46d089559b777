"""Finds accesses to shared memory that an unfinished asynchronous copy will write."""

from __future__ import annotations

import numpy as np

from ptxlab.checks.check import Check
from ptxlab.checks.shadow import Shadow
from ptxlab.interface import (
    AsyncLanding,
    EngineAccess,
    EngineLanding,
    Launch,
    MemoryAccess,
    Site,
)

_NO_ISSUER = -1


class InFlight(Check):
    """Kinds of findings: ``in-flight-read`` and ``in-flight-write``.

    A cp.async keeps its cells in flight from the issue until the issuing thread has waited for the
    copy's group. A bulk copy keeps its cells in flight from the issue until the data arrive. No
    thread may read or write a cell in flight. After that, the data count as a write of the issuing
    thread. ``Races`` checks that other threads pass a barrier before they read the data.
    """

    def begin(self, launch: Launch) -> None:
        """Stores the size of shared memory."""
        super().begin(launch)
        self._shared_bytes = launch.shared_bytes
        self._sites: dict[int, Site] = {}
        self.wave(0, launch.cta_count)

    def wave(self, first_cta: int, cta_count: int) -> None:
        """Begins new CTAs, which have no copy in flight."""
        self._first_cta = first_cta
        self._shadow = Shadow(
            cta_count,
            self._shared_bytes,
            {"issuer": (np.dtype(np.int32), _NO_ISSUER), "site": (np.dtype(np.int32), _NO_ISSUER)},
        )

    def memory(self, event: MemoryAccess) -> None:
        """Checks every access to shared memory and records the issue of copies."""
        if event.space != "shared":
            return
        ctas = event.threads // self._threads_per_cta if event.ctas is None else event.ctas
        touched = self._shadow.locate(ctas - self._first_cta, event.addresses, event.sizes)
        issuer = self._shadow["issuer"]
        pending = issuer[touched.cells] != _NO_ISSUER
        if pending.any():
            self._report(event, touched.cells[pending], touched.rows[pending])
        if event.kind == "async_write":
            self._sites[event.site.index] = event.site
            issuer[touched.cells] = event.threads[touched.rows]
            self._shadow["site"][touched.cells] = event.site.index

    def async_landing(self, event: AsyncLanding) -> None:
        """Records that the cells that the copy wrote may be accessed again."""
        ctas = event.threads // self._threads_per_cta - self._first_cta
        touched = self._shadow.locate(ctas, event.addresses, event.sizes)
        issuer = self._shadow["issuer"]
        own = issuer[touched.cells] == event.threads[touched.rows]
        issuer[touched.cells[own]] = _NO_ISSUER

    def engine_access(self, event: EngineAccess) -> None:
        """Checks an engine's access when it is issued, and records the cells that it will write."""
        touched = self._shadow.locate(event.cta - self._first_cta, event.addresses, event.size)
        issuer, site = self._shadow["issuer"], self._shadow["site"]
        pending = touched.cells[issuer[touched.cells] != _NO_ISSUER]
        if pending.size:
            address = self._shadow.address(pending[0])
            self.report(
                f"in-flight-{event.kind}",
                event.site,
                f"issued by {self.name(int(event.threads[0]))}, it {event.kind}s shared address "
                f"{address} while the copy of {self.name(issuer[pending[0]])} "
                f"({self._sites[int(site[pending[0]])]}) has not arrived",
                event.threads[:1],
                address,
            )
        if event.kind == "write":
            self._sites[event.site.index] = event.site
            issuer[touched.cells] = event.threads[0]
            site[touched.cells] = event.site.index

    def engine_landing(self, event: EngineLanding) -> None:
        """Records that the cells that a bulk copy wrote may be accessed again."""
        touched = self._shadow.locate(event.cta - self._first_cta, event.addresses, event.size)
        own = self._shadow["site"][touched.cells] == event.issued_at.index
        self._shadow["issuer"][touched.cells[own]] = _NO_ISSUER

    def _report(self, event: MemoryAccess, cells: np.ndarray, rows: np.ndarray) -> None:
        reading = event.kind == "read"
        address = self._shadow.address(cells[0])
        issuer = self._shadow["issuer"][cells[0]]
        site = self._sites[int(self._shadow["site"][cells[0]])]
        self.report(
            "in-flight-read" if reading else "in-flight-write",
            event.site,
            f"{self.actor(event, rows[0])} {'reads' if reading else 'overwrites'} shared "
            f"address {address} while the copy of {self.name(issuer)} ({site}) has not been "
            "waited for",
            event.threads[np.unique(rows)],
            address,
        )
