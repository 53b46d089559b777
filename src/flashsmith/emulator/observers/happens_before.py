"""Which of an emulated launch's actions are ordered before which: vector clocks per thread.

The order is PTX's causality order as far as barriers make it. Thread a *knows* thread b up to
clock c when everything b did until then happens before whatever a does next. What creates order:

- program order: a thread knows itself;
- a CTA barrier: whoever waited at it knows everybody who arrived, up to their arrival, and all that
  those knew; who only arrived (bar.arrive) learns nothing;
- bar.warp.sync, likewise among the threads it names.

What does not: ``.sync.aligned`` instructions (shfl, ldmatrix, mma, vote). They make lanes meet, but
the ISA gives no memory ordering to that: a store before a shuffle need not be visible to another
lane after it, and CUDA asks for __syncwarp() there. Lockstep execution of a warp is no order either
(there is none since sm_70). Nothing orders threads of different CTAs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LANES = np.arange(32, dtype=np.int64)


class HappensBefore:
    """The clocks of one wave of CTAs. Times are the emulator's event clock, which only grows.

    Barriers of whole CTAs are kept as one number per CTA, below which everybody knows everybody.
    The matrix of who knows whom is only there once a smaller set of threads has synchronised.
    """

    def __init__(self, first_cta: int, cta_count: int, threads_per_cta: int) -> None:
        self._first_cta = first_cta
        self._threads = threads_per_cta
        self._floor = np.zeros(cta_count, np.int64)
        self._known: np.ndarray | None = None
        # What those who arrived at a barrier without waiting have handed over, by (barrier, CTA).
        self._handed: dict[tuple[int, int], tuple[list[np.ndarray], np.ndarray]] = {}

    @property
    def partial(self) -> bool:
        """Whether anything but whole-CTA barriers has made order."""
        return self._known is not None

    def cta(self, threads: np.ndarray) -> np.ndarray:
        """Index of each thread's CTA within the wave; negative for one of an earlier wave."""
        return threads // self._threads - self._first_cta

    def floor(self, threads: np.ndarray) -> np.ndarray:
        """Clock up to which each thread knows every thread of its CTA."""
        return self._floor[self.cta(threads)]

    def warp_mates(self, threads: np.ndarray) -> np.ndarray:
        """Flat numbers of the 32 lanes of each thread's warp, an axis more.

        A last warp that is not full repeats the CTA's last thread.
        """
        tids = threads % self._threads
        lanes = (tids // 32 * 32)[..., None] + LANES
        return (threads - tids)[..., None] + np.minimum(lanes, self._threads - 1)

    def knows(self, threads: np.ndarray, actors: np.ndarray, clocks: np.ndarray) -> np.ndarray:
        """Whether each thread knows its actor up to the clock given; arrays broadcast."""
        threads, actors, clocks = np.broadcast_arrays(threads, actors, clocks)
        ctas = self.cta(threads)
        same_cta = ctas == self.cta(actors)
        result = (threads == actors) | (same_cta & (self._floor[ctas] >= clocks))
        if self._known is not None:
            known = self._known[ctas, threads % self._threads, actors % self._threads]
            result |= same_cta & (known >= clocks)
        return result

    def arrive(self, threads: np.ndarray, barrier: int, clock: int) -> None:
        """Threads reach a CTA barrier and go on without waiting; they may be of several CTAs."""
        for cta, members in self._by_cta(threads):
            given = self._rows(cta)[members].max(axis=0)
            given[members] = clock
            arrived, known = self._handed.get((barrier, cta), ([], np.zeros_like(given)))
            self._handed[barrier, cta] = ([*arrived, members], np.maximum(known, given))

    def release(self, threads: np.ndarray, barrier: int, clock: int) -> None:
        """A CTA barrier opens for ``threads``, of one or several CTAs; all had arrived."""
        for cta, members in self._by_cta(threads):
            handed = self._handed.pop((barrier, cta), None)
            if handed is None and members.size == self._threads:
                self._floor[cta] = clock
            elif handed is None:
                self._join(cta, members, clock)
            else:
                arrived, known = handed
                waiting = np.setdiff1d(members, np.concatenate(arrived))
                self._join(cta, waiting, clock, known)

    def synchronise_warps(self, threads: np.ndarray, clock: int) -> None:
        """The threads named meet within each warp; they may be of several warps."""
        for cta, members in self._by_cta(threads):
            for warp in np.unique(members // 32):
                self._join(cta, members[members // 32 == warp], clock)

    def _by_cta(self, threads: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """CTA index and thread numbers within it, for each CTA that has some."""
        ctas, tids = self.cta(threads), threads % self._threads
        for cta in np.unique(ctas):
            yield int(cta), tids[ctas == cta]

    def _rows(self, cta: int) -> np.ndarray:
        """Who knows whom in a CTA, beside what the floor says: [thread, actor]."""
        if self._known is None:
            shape = (self._floor.size, self._threads, self._threads)
            self._known = np.zeros(shape, np.int64)
        rows: np.ndarray = self._known[cta]
        return rows

    def _join(
        self, cta: int, members: np.ndarray, clock: int, handed: np.ndarray | None = None
    ) -> None:
        if not members.size:
            return
        rows = self._rows(cta)
        together = rows[members].max(axis=0)
        if handed is not None:
            together = np.maximum(together, handed)
        together[members] = clock
        rows[members] = together
