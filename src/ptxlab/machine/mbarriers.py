"""mbarriers: their arrivals, expected bytes, phases, and the threads that wait at them.

In PTX an mbarrier is an opaque word of shared memory. The emulator keeps mbarriers outside that
memory. One object stands for the mbarriers at one address in all CTAs of a wave, since all CTAs
have the same memory layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxlab.interface import MbarrierEvent, Site
from ptxlab.machine.group import Group
from ptxlab.machine.protocols import HoldsShared
from ptxlab.machine.waits import Wait

_MOST_ARRIVALS = (1 << 20) - 1


class Mbarrier:
    """The mbarriers at one address. Its arrays have one entry for each CTA of a wave."""

    def __init__(self, address: int, ctas: int) -> None:
        self.address = address
        self.valid = np.zeros(ctas, np.bool_)
        self.expected = np.zeros(ctas, np.int64)
        self.pending = np.zeros(ctas, np.int64)
        self.bytes = np.zeros(ctas, np.int64)
        self.phases = np.zeros(ctas, np.int64)

    def state(self, cta: int) -> str:
        """Describes what the mbarrier of one CTA waits for."""
        if not self.valid[cta]:
            return "which was never initialised"
        return (
            f"phase {int(self.phases[cta])}: {int(self.pending[cta])} of "
            f"{int(self.expected[cta])} arrivals and {int(self.bytes[cta])} bytes to come"
        )


class MbarrierWait(Wait):
    """The wait of a group at mbarriers.

    Each thread waits until its mbarrier has completed a number of phases.
    """

    refusable = True

    def __init__(
        self,
        group: Group,
        site: Site,
        targets: list[tuple[Mbarrier, np.ndarray, np.ndarray]],
        granted: Callable[[MbarrierWait, np.ndarray], None],
    ) -> None:
        super().__init__(group, site)
        #: Tuples of an mbarrier, the positions of the threads that wait at it, and for each of
        #: these threads the number of phases that must be complete.
        self.targets, self.granted = targets, granted

    def passed(self) -> np.ndarray:
        """Returns, for each thread, whether its phase is complete."""
        over = np.ones(self.group.n, np.bool_)
        for barrier, positions, phases in self.targets:
            over[positions] = barrier.phases[self.group.cta[positions]] >= phases
        return over

    def part(self, group: Group, mask: np.ndarray) -> MbarrierWait:
        """Returns the same wait for only the threads in ``mask``."""
        renumbered, targets = np.cumsum(mask) - 1, []
        for barrier, positions, phases in self.targets:
            stays = mask[positions]
            if stays.any():
                targets.append((barrier, renumbered[positions[stays]], phases[stays]))
        return MbarrierWait(group, self.site, targets, self.granted)

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Notifies observers that threads have observed the end of their phases."""
        self.granted(self, np.ones(self.group.n, np.bool_) if mask is None else mask)

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """Describes each mbarrier, with the awaited parity and the missing arrivals and bytes."""
        found, over = [], self.passed()
        for barrier, positions, phases in self.targets:
            positions, phases = positions[~over[positions]], phases[~over[positions]]
            if positions.size:
                cta = int(self.group.cta[positions[0]])
                found.append((
                    positions,
                    f"the mbarrier at shared address {barrier.address} to end a phase of parity "
                    f"{(int(phases[0]) - 1) % 2} ({barrier.state(cta)})",
                ))  # fmt: skip
        return found


class Mbarriers:
    """All mbarriers of a wave."""

    def __init__(self, wave: HoldsShared) -> None:
        self.wave, self.geometry = wave, wave.geometry
        self.barriers: dict[int, Mbarrier] = {}
        #: Called with (CTA, address): the clock of the oldest bulk copy in flight to that mbarrier,
        #: or None. BulkCopies provides it.
        self.oldest_copy: Callable[[int, int], int | None] = lambda cta, address: None

    # Instructions

    def init(self, group: Group, site: Site, addresses: Any, count: Any, mask: Any) -> None:
        """Executes mbarrier.init."""
        for address, positions in by_address(group, addresses, mask):
            ctas = group.cta[positions]
            barrier = self._at(address)
            self._check_address(site, group, positions, address)
            again = barrier.valid[ctas]
            if again.any():
                self._misuse(
                    "mbarrier-reinitialised", site, group, positions[again], barrier,
                    "is initialised a second time",
                )  # fmt: skip
            wanted = np.broadcast_to(count, (group.n,))[positions].astype(np.int64)
            if ((wanted < 1) | (wanted > _MOST_ARRIVALS)).any():
                self._misuse(
                    "mbarrier-count", site, group, positions, barrier,
                    f"is initialised with a count of {int(wanted[0])}",
                )  # fmt: skip
            barrier.valid[ctas] = True
            barrier.expected[ctas] = barrier.pending[ctas] = wanted
            barrier.bytes[ctas] = barrier.phases[ctas] = 0
            self._notify(site, "init", group, positions, ctas, address)

    def invalidate(self, group: Group, site: Site, addresses: Any, mask: Any) -> None:
        """Executes mbarrier.inval."""
        for address, positions in by_address(group, addresses, mask):
            barrier = self._at(address)
            self._require_valid(site, group, positions, group.cta[positions], barrier)
            barrier.valid[group.cta[positions]] = False

    def arrive(
        self, group: Group, site: Site, addresses: Any, count: Any, size: Any, mask: Any
    ) -> np.ndarray:
        """Executes mbarrier.arrive, or .arrive.expect_tx if ``size`` (in bytes) is not None.

        Returns the phases.

        The mbarrier may be in another CTA of the cluster.
        """
        phases = np.zeros(group.n, np.uint64)
        for address, positions in by_address(group, addresses, mask):
            address, ctas = self._owners(group, positions, address)
            barrier = self._at(address)
            if not self._require_valid(site, group, positions, ctas, barrier):
                continue
            phases[positions] = barrier.phases[ctas]
            self._notify(site, "arrive", group, positions, ctas, address)
            if size is not None:
                self._expect(barrier, ctas, _per_thread(group, size, positions))
            counts = np.bincount(
                ctas, weights=_per_thread(group, count, positions), minlength=self.geometry.ctas
            ).astype(np.int64)
            self._arrive(site, group, positions, barrier, counts)
        return phases

    def expect(self, group: Group, site: Site, addresses: Any, size: Any, mask: Any) -> None:
        """Executes mbarrier.expect_tx."""
        for address, positions in by_address(group, addresses, mask):
            address, ctas = self._owners(group, positions, address)
            barrier = self._at(address)
            if self._require_valid(site, group, positions, ctas, barrier):
                self._expect(barrier, ctas, _per_thread(group, size, positions))

    def complete(self, group: Group, site: Site, addresses: Any, size: Any, mask: Any) -> None:
        """Executes mbarrier.complete_tx."""
        for address, positions in by_address(group, addresses, mask):
            address, ctas = self._owners(group, positions, address)
            barrier = self._at(address)
            if self._require_valid(site, group, positions, ctas, barrier):
                self._expect(barrier, ctas, -_per_thread(group, size, positions))
                self._end_phases(site, barrier)

    def wait_parity(
        self, group: Group, site: Site, addresses: Any, parity: Any, mask: Any
    ) -> MbarrierWait | None:
        """Executes try_wait.parity.

        Returns a wait, or None if the phase of that parity is complete for all threads.
        """
        return self._wait(group, site, addresses, parity, mask, by_parity=True)

    def wait_state(
        self, group: Group, site: Site, addresses: Any, state: Any, mask: Any
    ) -> MbarrierWait | None:
        """Executes try_wait with the state that an earlier arrive returned."""
        return self._wait(group, site, addresses, state, mask, by_parity=False)

    def _wait(
        self, group: Group, site: Site, addresses: Any, token: Any, mask: Any, *, by_parity: bool
    ) -> MbarrierWait | None:
        targets = []
        for address, positions in by_address(group, addresses, mask):
            ctas = group.cta[positions]
            barrier = self._at(address)
            if not self._require_valid(site, group, positions, ctas, barrier):
                continue
            given = _per_thread(group, token, positions)
            phases = barrier.phases[ctas]
            target = phases + (phases % 2 == given % 2) if by_parity else given + 1
            targets.append((barrier, positions, target))
        wait = MbarrierWait(group, site, targets, self._granted)
        if not wait.passed().all():
            return wait
        wait.grant()
        return None

    # Bulk copies

    def require(
        self, group: Group, site: Site, position: int, owner: int, address: int
    ) -> Mbarrier | None:
        """Returns the mbarrier on which a bulk copy will complete; None if there is no valid
        mbarrier at the address."""
        barrier = self._at(address)
        where = np.array([position])
        self._notify(site, "copy", group, where, np.array([owner]), address)
        valid = self._require_valid(site, group, where, np.array([owner]), barrier)
        return barrier if valid else None

    def landed(self, site: Site, barrier: Mbarrier, cta: int, size: int) -> None:
        """Records that ``size`` bytes of a bulk copy have arrived."""
        barrier.bytes[cta] -= size
        self._end_phases(site, barrier)

    # Phases

    def _expect(self, barrier: Mbarrier, ctas: np.ndarray, sizes: np.ndarray) -> None:
        np.add.at(barrier.bytes, ctas, sizes)

    def _arrive(
        self, site: Site, group: Group, positions: np.ndarray, barrier: Mbarrier, counts: np.ndarray
    ) -> None:
        while counts.any():
            now = np.minimum(counts, barrier.pending)
            if not now.any():
                over = np.isin(group.cta[positions], np.flatnonzero(counts))
                who = positions[over] if over.any() else positions
                self._misuse(
                    "mbarrier-over-arrival", site, group, who, barrier,
                    "gets more arrivals in a phase than it was initialised with",
                )  # fmt: skip
                return
            barrier.pending -= now
            counts = counts - now
            if (counts > 0)[barrier.pending == 0].any():
                # PTX does not define which of these arrivals end the phase and which count for the
                # next phase.
                self._misuse(
                    "mbarrier-over-arrival", site, group, positions, barrier,
                    "gets more arrivals at once than its phase still waits for",
                )  # fmt: skip
            self._end_phases(site, barrier)

    def _end_phases(self, site: Site, barrier: Mbarrier) -> None:
        quiet = barrier.valid & (barrier.pending == 0)
        over = quiet & (barrier.bytes == 0)
        lacking = quiet & (barrier.bytes < 0)
        if lacking.any():
            cta = int(np.flatnonzero(lacking)[0])
            self.wave.misuse(
                "mbarrier-bytes",
                site,
                np.zeros(0, np.int64),
                f"the mbarrier at shared address {barrier.address} of CTA "
                f"{cta + self.geometry.first_cta} gets {-int(barrier.bytes[cta])} bytes more than "
                "it was set to expect",
                barrier.address,
            )
            # The emulator continues as if these bytes had been expected.
            barrier.bytes[lacking] = 0
            over |= lacking
        if not over.any():
            return
        barrier.phases += over
        barrier.pending = np.where(over, barrier.expected, barrier.pending)
        self.wave.scheduler.notify()
        if self.wave.observers:
            ctas = np.flatnonzero(over)
            clock = self.wave.tick()
            landed = [self.oldest_copy(int(cta), barrier.address) for cta in ctas]
            self._send(
                site, "complete", np.zeros(0, np.int64), ctas, barrier.address, clock,
                np.array([clock if oldest is None else oldest - 1 for oldest in landed]),
            )  # fmt: skip

    def _granted(self, wait: MbarrierWait, mask: np.ndarray) -> None:
        if self.wave.observers:
            for barrier, positions, _ in wait.targets:
                chosen = positions[mask[positions]]
                if chosen.size:
                    ctas = wait.group.cta[chosen]
                    self._notify(wait.site, "wait", wait.group, chosen, ctas, barrier.address)

    # Helpers

    def _at(self, address: int) -> Mbarrier:
        barrier = self.barriers.get(address)
        if barrier is None:
            barrier = self.barriers[address] = Mbarrier(address, self.geometry.ctas)
        return barrier

    def _owners(self, group: Group, positions: np.ndarray, address: int) -> tuple[int, np.ndarray]:
        """Resolves a shared::cluster address: returns the address within the owning CTA, and for
        each thread the number of the owning CTA within the wave."""
        return self.geometry.owners(group.cta[positions], address)

    def _check_address(self, site: Site, group: Group, positions: np.ndarray, address: int) -> None:
        self.wave.shared.check(np.array([address]), 8, 8)

    def _require_valid(
        self, site: Site, group: Group, positions: np.ndarray, ctas: np.ndarray, barrier: Mbarrier
    ) -> bool:
        missing = ~barrier.valid[ctas]
        if missing.any():
            self._misuse(
                "mbarrier-uninitialised", site, group, positions[missing], barrier,
                "is used but was never initialised",
            )  # fmt: skip
        return not missing.any()

    def _misuse(
        self,
        kind: str,
        site: Site,
        group: Group,
        positions: np.ndarray,
        barrier: Mbarrier,
        what: str,
    ) -> None:
        cta = int(group.cta[positions[0]]) + self.geometry.first_cta
        self.wave.misuse(
            kind, site, group.threads[positions],
            f"the mbarrier at shared address {barrier.address} (CTA {cta}) {what}",
            barrier.address,
        )  # fmt: skip

    def _notify(
        self,
        site: Site,
        kind: str,
        group: Group,
        positions: np.ndarray,
        ctas: np.ndarray,
        address: int,
    ) -> None:
        if self.wave.observers:
            self._send(site, kind, group.threads[positions], ctas, address, self.wave.tick())

    def _send(
        self,
        site: Site,
        kind: str,
        threads: np.ndarray,
        ctas: np.ndarray,
        address: int,
        clock: int,
        landed: np.ndarray | None = None,
    ) -> None:
        flat = ctas + self.geometry.first_cta
        event = MbarrierEvent(site, kind, threads, flat, address, clock, landed)
        for observer in self.wave.observers:
            observer.mbarrier(event)


def by_address(group: Group, addresses: Any, mask: Any) -> list[tuple[int, np.ndarray]]:
    """Returns the addresses that active threads name, each with the positions of these threads in
    the group."""
    positions = group.active(mask)
    if not positions.size:
        return []
    if np.ndim(addresses) == 0:
        return [(int(addresses), positions)]
    chosen = addresses[positions]
    distinct = np.unique(chosen)
    if distinct.size == 1:
        return [(int(distinct[0]), positions)]
    return [(int(address), positions[chosen == address]) for address in distinct]


def _per_thread(group: Group, value: Any, positions: np.ndarray) -> np.ndarray:
    if np.ndim(value) == 0:
        return np.full(positions.size, value, np.int64)
    return value[positions].astype(np.int64)
