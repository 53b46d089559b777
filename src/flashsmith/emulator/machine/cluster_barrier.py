"""barrier.cluster: where all threads of a cluster meet, arrival and wait apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashsmith.emulator.interface import ClusterBarrierEvent, Site
from flashsmith.emulator.machine.group import Group
from flashsmith.emulator.machine.waits import Wait

if TYPE_CHECKING:
    from flashsmith.emulator.machine.wave import Wave


class ClusterWait(Wait):
    """A group at the cluster barrier until it has opened as often as each thread has arrived."""

    def __init__(self, group: Group, site: Site, barrier: ClusterBarrier) -> None:
        super().__init__(group, site)
        self.barrier = barrier

    def passed(self) -> np.ndarray:
        """Per thread, whether its cluster's barrier has opened."""
        return self.barrier.opened(self.group)

    def part(self, group: Group, mask: np.ndarray) -> ClusterWait:
        """The wait of some of its threads."""
        return ClusterWait(group, self.site, self.barrier)

    def grant(self, mask: np.ndarray | None = None) -> None:
        """Threads have passed."""
        threads = self.group.threads if mask is None else self.group.threads[mask]
        self.barrier.tell(self.site, "wait", threads)

    def reasons(self) -> list[tuple[np.ndarray, str]]:
        """How many threads have arrived of how many."""
        places = np.flatnonzero(~self.passed())
        cluster = int(self.barrier.cluster_of(self.group)[places[0]])
        arrived, live = self.barrier.arrived[cluster], self.barrier.live[cluster]
        words = f"the cluster barrier ({int(arrived)} of {int(live)} threads have arrived)"
        return [(places, words)]


class ClusterBarrier:
    """The barrier of every cluster of a wave."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        geometry = wave.geometry
        ctas = np.arange(geometry.ctas) + geometry.first_cta
        _, self._clusters = np.unique(geometry.clusters.number(ctas), return_inverse=True)
        count = int(self._clusters.max()) + 1
        self.live = np.bincount(self._clusters, minlength=count) * geometry.threads_per_cta
        self.arrived = np.zeros(count, np.int64)
        self.openings = np.zeros(count, np.int64)
        #: How often each thread has arrived, and gone on.
        self.arrivals = np.zeros(geometry.threads, np.int64)
        self.waits = np.zeros(geometry.threads, np.int64)

    def cluster_of(self, group: Group) -> np.ndarray:
        """Per thread, its cluster within the wave."""
        found: np.ndarray = self._clusters[group.cta]
        return found

    def opened(self, group: Group) -> np.ndarray:
        """Per thread, whether the barrier has opened since it arrived."""
        return self.openings[self.cluster_of(group)] >= self.arrivals[group.index]

    def arrive(self, group: Group, site: Site, *, relaxed: bool) -> None:
        """barrier.cluster.arrive."""
        if (self.arrivals[group.index] > self.waits[group.index]).any():
            self._misuse(site, group, "arrives twice without a wait between")
        self.arrivals[group.index] += 1
        self.tell(site, "relaxed" if relaxed else "arrive", group.threads)
        self.arrived += np.bincount(self.cluster_of(group), minlength=self.arrived.size)
        self._open()

    def wait(self, group: Group, site: Site) -> ClusterWait | None:
        """barrier.cluster.wait: None when the group may go on."""
        if (self.arrivals[group.index] <= self.waits[group.index]).any():
            self._misuse(site, group, "waits without having arrived")
        self.waits[group.index] = self.arrivals[group.index]
        wait = ClusterWait(group, site, self)
        if not wait.passed().all():
            return wait
        wait.grant()
        return None

    def exited(self, group: Group) -> None:
        """Threads are gone and are not waited for."""
        self.live -= np.bincount(self.cluster_of(group), minlength=self.live.size)
        self._open()

    def _open(self) -> None:
        full = (self.arrived > 0) & (self.arrived >= self.live)
        if full.any():
            self.openings += full
            self.arrived[full] = 0
            self.wave.scheduler.tell()

    def tell(self, site: Site, kind: str, threads: np.ndarray) -> None:
        """Show it to the observers."""
        if self.wave.observers:
            event = ClusterBarrierEvent(site, kind, threads, self.wave.tick())
            for observer in self.wave.observers:
                observer.cluster_barrier(event)

    def _misuse(self, site: Site, group: Group, what: str) -> None:
        self.wave.misuse("cluster-barrier", site, group.threads, f"barrier.cluster: {what}")
