"""Which of an emulated launch's actions are ordered before which: vector clocks per thread.

The order is PTX's causality order as far as barriers make it. Thread a *knows* thread b up to
clock c when everything b did until then happens before whatever a does next. What creates order:

- program order: a thread knows itself;
- a CTA barrier: whoever leaves it knows everybody who arrived, and all that those knew;
- bar.warp.sync, likewise among the threads it names.

What does not: ``.sync.aligned`` instructions (shfl, ldmatrix, mma, vote). They make lanes meet, but
the ISA gives no memory ordering to that: a store before a shuffle need not be visible to another
lane after it, and CUDA asks for __syncwarp() there. Lockstep execution of a warp is no order either
(there is none since sm_70). Nothing orders threads of different CTAs.
"""

from __future__ import annotations

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

    def synchronise(self, threads: np.ndarray, clock: int, group: int) -> None:
        """Threads met at a barrier, each ``group`` (a CTA's threads, or a warp's 32) apart.

        ``threads`` may hold several CTAs or warps.
        """
        tids = threads % self._threads
        ctas = self.cta(threads)
        keys = ctas * self._threads + tids // group * group
        for key in np.unique(keys):
            cta, members = int(key) // self._threads, tids[keys == key]
            if members.size == self._threads:
                self._floor[cta] = clock
            else:
                self._join(cta, members, clock)

    def _join(self, cta: int, members: np.ndarray, clock: int) -> None:
        if self._known is None:
            shape = (self._floor.size, self._threads, self._threads)
            self._known = np.zeros(shape, np.int64)
        rows = self._known[cta]
        together = rows[members].max(axis=0)
        together[members] = clock
        rows[members] = together
