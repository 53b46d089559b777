"""Bank conflicts: counts wavefronts of shared memory, with and without conflicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxlab.interface import Launch, MemoryAccess, Observer, Site

_BANKS = 32
_WORD = 4
_PHASE_BYTES = _BANKS * _WORD


@dataclass
class Wavefronts:
    """Counts of shared-memory wavefronts.

    ``ideal`` is one per phase; ``actual`` includes conflicts.
    """

    ideal: int = 0
    actual: int = 0

    @property
    def factor(self) -> float:
        """The ratio actual / ideal, which is 1.0 if there were no conflicts or no accesses at
        all."""
        return self.actual / self.ideal if self.ideal else 1.0


class BankConflicts(Observer):
    """Counts wavefronts over all observed launches, by kind of access and by instruction.

    This is a measurement, not a check. Hardware serves 128 bytes at a time, so a warp's access runs
    in phases of 32 lanes at up to 4 bytes each, 16 lanes at 8 bytes, or 8 lanes at 16 bytes.
    ldmatrix takes one 8x8 matrix, eight rows of 16 bytes, per phase.

    A bank delivers one 4-byte word per wavefront to all lanes that need this word; there are 32
    banks. A phase therefore takes as many wavefronts as its busiest bank has distinct words. Lanes
    that a guard masks out do not count.

    Kinds: ``ldmatrix``, ``cp.async`` (its store into shared memory), ``ld.shared.<bytes>B``,
    ``st.shared.<bytes>B``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, Wavefronts] = {}
        self.by_site: dict[Site, Wavefronts] = {}

    def begin(self, launch: Launch) -> None:
        """Stores the number of threads per CTA; the counts of all launches of a plan are added
        up."""
        self._threads_per_cta = launch.threads_per_cta
        self._warps_per_cta = -(-launch.threads_per_cta // 32)

    def factors(self) -> dict[str, float]:
        """Returns the conflict factor of each kind of access that occurred."""
        return {kind: counted.factor for kind, counted in sorted(self.by_kind.items())}

    def memory(self, event: MemoryAccess) -> None:
        """Adds the wavefronts of one event to the counts."""
        if event.space != "shared" or not event.threads.size:
            return
        bytes_per_lane = int(np.max(event.sizes))
        if not bytes_per_lane:
            return
        ideal, actual = self._wavefronts(event, bytes_per_lane)
        kind = _kind(event, bytes_per_lane)
        for counted in (
            self.by_kind.setdefault(kind, Wavefronts()),
            self.by_site.setdefault(event.site, Wavefronts()),
        ):
            counted.ideal += ideal
            counted.actual += actual

    def _wavefronts(self, event: MemoryAccess, bytes_per_lane: int) -> tuple[int, int]:
        """Returns the number of phases, and the number of wavefronts in all phases together.

        A lane's access of 8 or 16 bytes uses a whole group of banks. It is counted as one unit of
        this size, which lies in one of the 128 / size groups of banks.
        """
        unit = max(bytes_per_lane, _WORD)
        groups = lanes_per_phase = _PHASE_BYTES // unit
        cta, tid = np.divmod(event.threads, self._threads_per_cta)
        phase = (cta * self._warps_per_cta + tid // 32) * (32 // lanes_per_phase)
        phase += tid % 32 // lanes_per_phase
        phase -= phase.min()
        units = event.addresses // unit
        span = int(units.max()) + 1
        keys = np.sort(phase * span + units)
        # Lanes that access the same unit are served in one wavefront.
        distinct = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
        bins = distinct // span * groups + distinct % span % groups
        loads = np.bincount(bins, minlength=(int(phase.max()) + 1) * groups)
        busiest = loads.reshape(-1, groups).max(axis=1)
        return int(np.count_nonzero(busiest)), int(busiest.sum())


def _kind(event: MemoryAccess, bytes_per_lane: int) -> str:
    if event.shape == "matrix":
        return "ldmatrix" if event.kind == "read" else "stmatrix"
    if event.kind == "async_write":
        return "cp.async"
    name = {"read": "ld.shared", "write": "st.shared"}.get(event.kind, "atom.shared")
    return f"{name}.{bytes_per_lane}B"
