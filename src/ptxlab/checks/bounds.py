"""Finds accesses that are out of bounds or misaligned, and writes to read-only memory."""

from __future__ import annotations

import numpy as np

from ptxlab.checks.check import Check
from ptxlab.checks.shadow import Ranges
from ptxlab.interface import Launch, MemoryAccess

_WRITES = frozenset({"write", "atomic", "async_write", "async_atomic"})


class Bounds(Check):
    """Kinds of findings: ``out-of-bounds``, ``read-only``, ``misaligned``.

    The bounds of shared memory are the launch's dynamic size; the bounds of global memory are the
    registered ranges. PTX requires an access to be aligned to its whole size. This includes vectors
    and rows of matrices.
    """

    handles_bad_access = True

    def begin(self, launch: Launch) -> None:
        """Stores the size of shared memory and the ranges of global memory."""
        super().begin(launch)
        self._shared_bytes = launch.shared_bytes
        self._ranges = Ranges(launch.memory.ranges())
        self._outputs = Ranges([r for r in launch.memory.ranges() if r.writable])

    def memory(self, event: MemoryAccess) -> None:
        """Checks one event's addresses."""
        sizes = np.maximum(event.sizes, 1)
        misaligned = event.addresses % sizes != 0
        if event.shape != "tile" and misaligned.any():
            self._report(
                "misaligned", event, misaligned, "is not a multiple of the access's {size} bytes"
            )
        if event.space == "shared":
            outside = (event.addresses < 0) | (event.addresses + event.sizes > self._shared_bytes)
            if outside.any():
                self._report(
                    "out-of-bounds", event, outside,
                    f"with {{size}} bytes leaves the CTA's {self._shared_bytes} bytes of shared "
                    "memory",
                )  # fmt: skip
        elif event.space == "global":
            self._check_global(event)

    def _check_global(self, event: MemoryAccess) -> None:
        index = self._ranges.find(event.addresses, event.sizes)
        # A cp.async whose source size is 0 reads nothing, so any source address is valid.
        outside = (index < 0) & (np.asarray(event.sizes) > 0)
        if outside.any():
            first = int(event.addresses[np.argmax(outside)])
            self._report(
                "out-of-bounds", event, outside,
                f"with {{size}} bytes is in no tensor of the launch{self._near(first)}",
            )  # fmt: skip
        if event.kind in _WRITES:
            forbidden = (index >= 0) & (self._outputs.find(event.addresses, event.sizes) < 0)
            if forbidden.any():
                name = self._ranges.ranges[int(index[np.argmax(forbidden)])].name
                self._report("read-only", event, forbidden, f"belongs to {name}, an input")

    def _near(self, address: int) -> str:
        near = self._ranges.nearest(address)
        if near is None:
            return ""
        if address < near.begin:
            return f" ({near.begin - address} bytes before {near.name})"
        return f" ({address - near.end} bytes after the end of {near.name})"

    def _report(self, kind: str, event: MemoryAccess, bad: np.ndarray, what: str) -> None:
        first = int(np.argmax(bad))
        thread, address = int(event.threads[first]), int(event.addresses[first])
        size = int(np.broadcast_to(event.sizes, bad.shape)[first])
        shown = address if event.space == "shared" else f"{address:#x}"
        self.report(
            kind,
            event.site,
            f"{event.space} address {shown} of {self.name(thread)} {what.format(size=size)}",
            event.threads[bad],
            address,
        )
