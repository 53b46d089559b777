"""Tracks the happens-before order that mbarriers and cluster barriers create."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ptxlab.checks.happens_before import Clocks, HappensBefore
from ptxlab.interface import (
    ClusterBarrierEvent,
    Clusters,
    Engine,
    MbarrierEvent,
    ProxyFence,
)


@dataclass
class _Handover:
    """The clocks that threads have published at a barrier, in the current phase and in all
    completed phases."""

    current: Clocks | None = None
    completed: Clocks | None = None

    def publish(self, clocks: Clocks) -> None:
        """Adds the clocks of more arrivals."""
        self.current = clocks.joined(self.current)

    def end(self) -> None:
        """Ends the phase."""
        if self.current is not None:
            self.completed, self.current = self.current.joined(self.completed), None


@dataclass
class _Init:
    """The initialisation of an mbarrier.

    ``seen`` are the threads that are ordered after the initialisation only through
    fence.mbarrier_init.
    """

    thread: int
    clock: int
    is_fenced: bool = False
    #: Whether the initialising thread has since arrived at the cluster barrier. All threads that
    #: pass that barrier are then ordered after the initialisation.
    is_released: bool = False
    seen: set[int] = field(default_factory=set)


class BarrierOrder:
    """Every mbarrier and cluster barrier of a wave."""

    def __init__(self, order: HappensBefore, clusters: Clusters) -> None:
        self._order, self._clusters = order, clusters
        self._mbarriers: dict[tuple[int, int], _Handover] = {}
        self._inits: dict[tuple[int, int], _Init] = {}
        self._cluster_barriers: dict[int, _Handover] = {}

    def mbarrier(self, event: MbarrierEvent) -> Iterator[tuple[str, np.ndarray, int]]:
        """Updates the order with an event.

        Yields (kind of finding, threads, initialising thread) if threads use an mbarrier but are
        not ordered after its initialisation. Bulk copies also need a proxy fence between the
        initialisation and the copy.
        """
        if event.kind == "complete":
            self._complete(event)
            return
        for cta in np.unique(event.ctas):
            key = (int(cta), event.address)
            threads = event.threads[event.ctas == cta]
            if event.kind == "init":
                self._inits[key] = _Init(int(threads[0]), event.clock)
                self._mbarriers[key] = _Handover()
                continue
            yield from self._unseen(event.kind, key, threads)
            handover = self._mbarriers.setdefault(key, _Handover())
            for own in self._order.by_cta(threads):
                if event.kind == "arrive":
                    handover.publish(self._order.published(own, event.clock))
                elif event.kind == "wait" and handover.completed is not None:
                    self._order.acquire(own, handover.completed)

    def _unseen(
        self, kind: str, key: tuple[int, int], threads: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray, int]]:
        init = self._inits.get(key)
        if init is None:
            return
        if init.seen:
            threads = threads[[thread not in init.seen for thread in threads.tolist()]]
            if not threads.size:
                return
        thread, clock = init.thread, init.clock
        unseen = ~self._order.ordered_after(threads, np.array([thread]), np.array([clock]))
        if unseen.any():
            yield "race-mbarrier", threads[unseen], thread
        elif kind == "copy":
            column = self._order.column(threads, np.array([thread]))
            _, fenced = self._order.common(threads)
            if fenced[column[0]] < clock:
                yield "proxy-fence", threads, thread

    def _complete(self, event: MbarrierEvent) -> None:
        for index, cta in enumerate(event.ctas):
            handover = self._mbarriers.setdefault((int(cta), event.address), _Handover())
            landed = event.clock if event.landed is None else int(event.landed[index])
            engine = Engine("mbarrier", int(cta), event.address)
            handover.end()
            if handover.completed is not None:
                done = handover.completed
                known = self._order.note_engine(done.known, engine, landed)
                handover.completed = replace(done, known=known)

    def fence(self, event: ProxyFence) -> None:
        """Records that, from now on, a relaxed arrival of these threads also publishes their
        initialisations of mbarriers."""
        if "mbarrier_init" not in event.site.mnemonic:
            return
        threads = set(event.threads.tolist())
        for init in self._inits.values():
            init.is_fenced |= init.thread in threads

    def cluster_barrier(self, event: ClusterBarrierEvent) -> None:
        """Updates the order with an event.

        Arriving threads publish their clocks, unless the arrival is relaxed, and the mbarriers that
        they initialised before fence.mbarrier_init. Threads that pass the barrier acquire all that
        was published.
        """
        self._hand_over_inits(event)
        numbers = self._clusters.number(event.threads // self._order.threads_per_cta)
        for number in np.unique(numbers):
            handover = self._cluster_barriers.setdefault(int(number), _Handover())
            for own in self._order.by_cta(event.threads[numbers == number]):
                if event.kind == "arrive":
                    handover.publish(self._order.published(own, event.clock))
                elif event.kind == "wait" and handover.current is not None:
                    # A thread that has already arrived for the next phase has passed this phase.
                    self._order.acquire(own, handover.current)

    def _hand_over_inits(self, event: ClusterBarrierEvent) -> None:
        arriving = set(event.threads.tolist())
        numbers = self._clusters.number(event.threads // self._order.threads_per_cta)
        for (cta, _), init in self._inits.items():
            if event.kind != "wait":
                init.is_released |= init.is_fenced and init.thread in arriving
            elif init.is_released:
                same = numbers == self._clusters.number(cta)
                init.seen.update(event.threads[same].tolist())
