"""Barriers: the numbered barriers of a CTA (bar.sync and its variants) and the cluster barrier.

At the cluster barrier, arriving and waiting are separate instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import ClusterBarrierEvent, Site
from ptxlab.machine.geometry import Geometry
from ptxlab.machine.group import Group
from ptxlab.machine.protocols import Wakes
from ptxlab.machine.waits import Wait

#: Called when barriers open, with (site, barrier number, expected count, the threads of the wave
#: that took part).
Released = Callable[[Site, int, int, np.ndarray], None]


@dataclass(eq=False)
class Barrier:
    """The barriers with one number in all CTAs of a wave."""

    number: int
    arrived: np.ndarray
    expected: np.ndarray
    generations: np.ndarray
    #: For bar.red, one entry per CTA: ``votes`` is the number of yes votes since the barrier last
    #: opened, ``counted`` the number of yes votes at that opening, and ``took_part`` the number of
    #: threads that took part in it.
    votes: np.ndarray
    counted: np.ndarray
    took_part: np.ndarray
    whole_cta: bool = True
    #: The instruction of the last arrival.
    site: Site | None = None
    #: The threads (numbers within the wave) that have arrived since their CTA's barrier last
    #: opened.
    arrivals: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class _Target:
    """The threads of a group (``positions``; None: all) that wait at one barrier.

    For each CTA, ``generations`` is how often the barrier must have opened before the CTA's threads
    may continue.
    """

    barrier: Barrier
    positions: np.ndarray | None
    generations: np.ndarray


class BarrierWait(Wait):
    """The wait of a group at one or several numbered barriers."""

    def __init__(self, group: Group, site: Site, targets: list[_Target]) -> None:
        super().__init__(group, site)
        self.targets = targets

    def passed(self) -> np.ndarray:
        """Returns, for each thread, whether its CTA's barrier has opened."""
        opened = np.ones(self.group.n, np.bool_)
        for target in self.targets:
            by_cta = target.barrier.generations >= target.generations
            if target.positions is None:
                opened = by_cta[self.group.cta]
            else:
                opened[target.positions] = by_cta[self.group.cta[target.positions]]
        return opened

    def part(self, group: Group, mask: np.ndarray) -> BarrierWait:
        """Returns the same wait for only the threads in ``mask``."""
        renumbered = np.cumsum(mask) - 1
        targets = []
        for target in self.targets:
            positions = target.positions
            if positions is not None:
                positions = renumbered[positions[mask[positions]]]
            if positions is None or positions.size:
                targets.append(_Target(target.barrier, positions, target.generations))
        return BarrierWait(group, self.site, targets)

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Does nothing, because the observers were already notified when the barrier opened."""

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """Describes, for each barrier, how many of the expected threads have arrived."""
        closed = ~self.passed()
        found = []
        for target in self.targets:
            positions = np.flatnonzero(closed) if target.positions is None else target.positions
            positions = positions[closed[positions]]
            if not positions.size:
                continue
            barrier, cta = target.barrier, int(self.group.cta[positions[0]])
            found.append((
                positions,
                f"barrier {barrier.number} ({int(barrier.arrived[cta])} of "
                f"{int(barrier.expected[cta])} threads have arrived)",
            ))  # fmt: skip
        return found


class NamedBarriers:
    """All numbered barriers of a wave."""

    def __init__(self, geometry: Geometry, released: Released) -> None:
        self.geometry, self.released = geometry, released
        self.live = np.full(geometry.ctas, geometry.threads_per_cta, np.int64)
        self.live_total = geometry.threads
        self.barriers: dict[int, Barrier] = {}

    def exited(self, group: Group) -> None:
        """Removes the exited threads from the barriers that wait for all threads of a CTA."""
        self.live_total -= group.n
        self.live -= np.bincount(group.cta, minlength=self.geometry.ctas)
        for barrier in self.barriers.values():
            if barrier.whole_cta and barrier.arrived.any():
                barrier.expected = np.where(barrier.arrived > 0, self.live, barrier.expected)
                self._open(barrier)

    def arrive(
        self,
        group: Group,
        site: Site,
        number: Any,
        expected: int | None,
        *,
        blocks: bool,
        vote: Any = None,
    ) -> BarrierWait | None:
        """Lets a group arrive at barriers. Returns a wait unless the group may continue at once.

        ``number`` is a scalar, or an array with one barrier number per thread. ``expected`` is the
        number of threads per CTA that take part; None: all threads that have not exited. ``vote``
        is a predicate per thread.
        """
        targets = []
        if vote is not None:
            self._vote(group, number, vote)
        for which, positions in _numbers(number):
            index = group.index if positions is None else group.index[positions]
            targets.append(_Target(*self._arrive(index, site, which, positions, expected)))
        if not blocks:
            return None
        wait = BarrierWait(group, site, targets)
        return None if wait.passed().all() else wait

    def _vote(self, group: Group, number: Any, vote: Any) -> None:
        votes = np.broadcast_to(vote, (group.n,))
        for which, positions in _numbers(number):
            ctas = group.cta[votes if positions is None else positions[votes[positions]]]
            barrier = self._barrier(which)
            barrier.votes = barrier.votes + np.bincount(ctas, minlength=self.geometry.ctas)

    def result(self, group: Group, number: Any, mode: str) -> np.ndarray:
        """Returns the result of each thread's last bar.red. ``mode`` is popc, and, or or."""
        found = np.zeros(group.n, np.uint32 if mode == "popc" else np.bool_)
        for which, positions in _numbers(number):
            barrier = self.barriers[which]
            ctas = group.cta if positions is None else group.cta[positions]
            yes, of = barrier.counted[ctas], barrier.took_part[ctas]
            values = {"popc": yes, "and": yes == of, "or": yes > 0}[mode]
            found[slice(None) if positions is None else positions] = values
        return found

    def _barrier(self, number: int) -> Barrier:
        if number not in self.barriers:
            zeros = np.zeros(self.geometry.ctas, np.int64)
            barrier = Barrier(number, zeros, zeros, zeros, zeros, zeros, zeros)
            self.barriers[number] = barrier
        return self.barriers[number]

    def _arrive(
        self, index: np.ndarray, site: Site, number: int, positions: Any, expected: int | None
    ) -> tuple[Barrier, Any, np.ndarray]:
        barrier = self._barrier(number)
        ctas = index // self.geometry.threads_per_cta
        counts = np.bincount(ctas, minlength=self.geometry.ctas)
        here = counts > 0
        wanted = self.live if expected is None else np.full_like(self.live, expected)
        mixed = here & (barrier.arrived > 0) & (barrier.expected != wanted)
        if mixed.any():
            cta = int(np.flatnonzero(mixed)[0])
            raise EmulatorError(
                f"barrier {number} of CTA {cta + self.geometry.first_cta}: one thread expects "
                f"{int(barrier.expected[cta])} threads, another {int(wanted[cta])}"
            )
        generations = np.where(here, barrier.generations + 1, 0)
        barrier.whole_cta, barrier.site = expected is None, site
        barrier.expected = np.where(here, wanted, barrier.expected)
        barrier.arrived = barrier.arrived + counts
        barrier.arrivals.append(index)
        self._open(barrier)
        return barrier, positions, generations

    def _open(self, barrier: Barrier) -> None:
        full = (barrier.arrived > 0) & (barrier.arrived >= barrier.expected)
        if not full.any():
            return
        over = full & (barrier.arrived > barrier.expected)
        if over.any():
            cta = int(np.flatnonzero(over)[0])
            raise EmulatorError(
                f"barrier {barrier.number} of CTA {cta + self.geometry.first_cta}: "
                f"{int(barrier.arrived[cta])} threads arrived where {int(barrier.expected[cta])} "
                f"were expected"
            )
        arrivals = np.concatenate(barrier.arrivals)
        leaves = full[arrivals // self.geometry.threads_per_cta]
        expected = int(barrier.expected[full][0])
        site = barrier.site or Site(-1, "exit", 0, "")
        self.released(site, barrier.number, expected, arrivals[leaves])
        barrier.arrivals = [arrivals[~leaves]]
        barrier.generations = barrier.generations + full
        barrier.counted = np.where(full, barrier.votes, barrier.counted)
        barrier.took_part = np.where(full, barrier.arrived, barrier.took_part)
        barrier.votes = np.where(full, 0, barrier.votes)
        barrier.arrived = np.where(full, 0, barrier.arrived)


def _numbers(number: Any) -> list[tuple[int, np.ndarray | None]]:
    """Returns each barrier number that occurs, with the positions of the threads that name it."""
    if np.ndim(number) == 0:
        return [(int(number), None)]
    distinct = np.unique(number)
    if distinct.size == 1:
        return [(int(distinct[0]), None)]
    return [(int(which), np.flatnonzero(number == which)) for which in distinct]


class ClusterWait(Wait):
    """The wait of a group at the cluster barrier.

    A thread passes when the barrier has opened as often as the thread has arrived.
    """

    def __init__(self, group: Group, site: Site, barrier: ClusterBarrier) -> None:
        super().__init__(group, site)
        self.barrier = barrier

    def passed(self) -> np.ndarray:
        """Returns, for each thread, whether its cluster's barrier has opened."""
        return self.barrier.opened(self.group)

    def part(self, group: Group, mask: np.ndarray) -> ClusterWait:
        """Returns the same wait for only the threads in ``mask``."""
        return ClusterWait(group, self.site, self.barrier)

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Notifies observers that threads have passed."""
        threads = self.group.threads if mask is None else self.group.threads[mask]
        self.barrier.notify(self.site, "wait", threads)

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """Describes, for each cluster, how many of the expected threads have arrived."""
        positions = np.flatnonzero(~self.passed())
        cluster = int(self.barrier.cluster_of(self.group)[positions[0]])
        arrived, live = self.barrier.arrived[cluster], self.barrier.live[cluster]
        words = f"the cluster barrier ({int(arrived)} of {int(live)} threads have arrived)"
        return [(positions, words)]


class ClusterBarrier:
    """The cluster barriers of all clusters of a wave."""

    def __init__(self, wave: Wakes) -> None:
        self.wave = wave
        geometry = wave.geometry
        ctas = np.arange(geometry.ctas) + geometry.first_cta
        _, self._clusters = np.unique(geometry.clusters.number(ctas), return_inverse=True)
        count = int(self._clusters.max()) + 1
        self.live = np.bincount(self._clusters, minlength=count) * geometry.threads_per_cta
        self.arrived = np.zeros(count, np.int64)
        self.openings = np.zeros(count, np.int64)
        #: How often each thread has arrived, and how often it has waited.
        self.arrivals = np.zeros(geometry.threads, np.int64)
        self.waits = np.zeros(geometry.threads, np.int64)

    def cluster_of(self, group: Group) -> np.ndarray:
        """Returns, for each thread, the index of its cluster within the wave."""
        found: np.ndarray = self._clusters[group.cta]
        return found

    def opened(self, group: Group) -> np.ndarray:
        """Returns, for each thread, whether the barrier has opened since the thread arrived."""
        return self.openings[self.cluster_of(group)] >= self.arrivals[group.index]

    def arrive(self, group: Group, site: Site, *, relaxed: bool) -> None:
        """Executes barrier.cluster.arrive."""
        if (self.arrivals[group.index] > self.waits[group.index]).any():
            self._misuse(site, group, "arrives twice without a wait in between")
        self.arrivals[group.index] += 1
        self.notify(site, "relaxed" if relaxed else "arrive", group.threads)
        self.arrived += np.bincount(self.cluster_of(group), minlength=self.arrived.size)
        self._open()

    def wait(self, group: Group, site: Site) -> ClusterWait | None:
        """Executes barrier.cluster.wait; returns None if the group may continue."""
        if (self.arrivals[group.index] <= self.waits[group.index]).any():
            self._misuse(site, group, "waits without having arrived")
        self.waits[group.index] = self.arrivals[group.index]
        wait = ClusterWait(group, site, self)
        if not wait.passed().all():
            return wait
        wait.grant()
        return None

    def exited(self, group: Group) -> None:
        """Removes exited threads and their arrivals from the counts."""
        clusters = self.cluster_of(group)
        arrived = clusters[self.arrivals[group.index] > self.openings[clusters]]
        self.live -= np.bincount(clusters, minlength=self.live.size)
        self.arrived -= np.bincount(arrived, minlength=self.arrived.size)
        self._open()

    def _open(self) -> None:
        full = (self.arrived > 0) & (self.arrived >= self.live)
        if full.any():
            self.openings += full
            self.arrived[full] = 0
            self.wave.scheduler.notify()

    def notify(self, site: Site, kind: str, threads: np.ndarray) -> None:
        """Notifies the observers."""
        if self.wave.observers:
            event = ClusterBarrierEvent(site, kind, threads, self.wave.tick())
            for observer in self.wave.observers:
                observer.cluster_barrier(event)

    def _misuse(self, site: Site, group: Group, what: str) -> None:
        self.wave.misuse("cluster-barrier", site, group.threads, f"barrier.cluster: {what}")
