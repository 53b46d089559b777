"""Finds reads of shared memory that was never written."""

from __future__ import annotations

import numpy as np

from ptxlab.checks.check import Check
from ptxlab.checks.shadow import Shadow
from ptxlab.interface import EngineAccess, Launch, MemoryAccess


class Uninitialised(Check):
    """Kind of finding: ``uninitialised``.

    A cell that a cp.async writes counts as written when the copy is issued. ``InFlight`` checks
    whether the data have arrived, so that one mistake is not reported twice.
    """

    def begin(self, launch: Launch) -> None:
        """Stores the size of shared memory."""
        super().begin(launch)
        self._shared_bytes = launch.shared_bytes
        self.wave(0, launch.cta_count)

    def wave(self, first_cta: int, cta_count: int) -> None:
        """Begins new CTAs, whose shared memory counts as unwritten."""
        self._first_cta = first_cta
        self._shadow = Shadow(cta_count, self._shared_bytes, {"written": (np.dtype(bool), False)})

    def memory(self, event: MemoryAccess) -> None:
        """Checks reads and records writes."""
        if event.space != "shared":
            return
        ctas = event.threads // self._threads_per_cta if event.ctas is None else event.ctas
        ctas = ctas - self._first_cta
        touched = self._shadow.locate(ctas, event.addresses, event.sizes)
        written = self._shadow["written"]
        if event.kind in ("read", "atomic"):
            missing = ~written[touched.cells]
            if missing.any():
                self._report(event, touched.cells[missing], touched.rows[missing])
        if event.kind != "read":
            written[touched.cells] = True

    def engine_access(self, event: EngineAccess) -> None:
        """Checks an engine's reads and records its writes."""
        touched = self._shadow.locate(event.cta - self._first_cta, event.addresses, event.size)
        written = self._shadow["written"]
        if event.kind == "write":
            written[touched.cells] = True
            return
        missing = touched.cells[~written[touched.cells]]
        if missing.size:
            address = self._shadow.address(missing[0])
            self.report(
                "uninitialised",
                event.site,
                f"{event.engine} read shared address {address}, which was never written",
                event.threads[:1],
                address,
            )

    def _report(self, event: MemoryAccess, cells: np.ndarray, rows: np.ndarray) -> None:
        readers = event.threads[np.unique(rows)]
        address = self._shadow.address(cells[0])
        self.report(
            "uninitialised",
            event.site,
            f"{self.actor(event, rows[0])} reads shared address {address}, which was never written",
            readers,
            address,
        )
