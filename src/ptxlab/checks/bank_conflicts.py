"""Bank conflicts: wavefronts of shared memory, and how many there would be without conflicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxlab.interface import Launch, MemoryAccess, Observer, Site

_BANKS = 32
_WORD = 4
_PHASE_BYTES = _BANKS * _WORD


@dataclass
class Wavefronts:
    """Wavefronts of shared memory: ``ideal`` is one per phase, ``actual`` counts bank conflicts
    too."""

    ideal: int = 0
    actual: int = 0

    @property
    def factor(self) -> float:
        """actual / ideal: 1.0 without conflicts; 1.0 too when there was no access at all."""
        return self.actual / self.ideal if self.ideal else 1.0


class BankConflicts(Observer):
    """A measurement, no check: wavefronts by kind of access and by instruction, of all launches
    that it observes.

    Hardware serves 128 bytes at a time. A warp's access runs in phases of as many lanes as fill
    them: all 32 at 4 bytes or less a lane, 16 at 8, 8 at 16; ldmatrix takes one 8x8 matrix, eight
    rows of 16 bytes, a phase. Within a phase each of the 32 banks gives one 4-byte word a
    wavefront, to every lane that wants that word; the phase takes as many wavefronts as the
    busiest bank has distinct words. Lanes that are switched off do not count.

    Kinds: ``ldmatrix``, ``cp.async`` (its store into shared memory), ``ld.shared.<bytes>B``,
    ``st.shared.<bytes>B``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, Wavefronts] = {}
        self.by_site: dict[Site, Wavefronts] = {}

    def begin(self, launch: Launch) -> None:
        """Takes the size of the launch's CTAs; a plan's launches are counted together."""
        self._threads_per_cta = launch.threads_per_cta
        self._warps_per_cta = -(-launch.threads_per_cta // 32)

    def factors(self) -> dict[str, float]:
        """Conflict factor of each kind of access that occurred."""
        return {kind: counted.factor for kind, counted in sorted(self.by_kind.items())}

    def memory(self, event: MemoryAccess) -> None:
        """Counts one event's wavefronts."""
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
        """Phases, and wavefronts over all of them.

        An access of 8 or 16 bytes takes whole groups of banks, so a lane counts once, as one unit
        of its size in one of the 128 / size groups.
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
        # Lanes that want the same unit are served together.
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
