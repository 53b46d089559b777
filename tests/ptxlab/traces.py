"""Hand-written event traces: what a launch would show to its observers, without a launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxlab.interface import (
    AsyncGroupEvent,
    AsyncLanding,
    BarrierEvent,
    GlobalMemoryView,
    Launch,
    MemoryAccess,
    MemoryRange,
    Observer,
    Site,
    WarpSync,
)


class Ranges(GlobalMemoryView):
    """Global memory made of given ranges."""

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self._ranges = ranges

    def ranges(self) -> Sequence[MemoryRange]:
        return self._ranges


class Trace:
    """Sends events to observers in the order of the calls; one call is one instruction."""

    def __init__(
        self,
        *observers: Observer,
        ctas: int = 1,
        threads: int = 64,
        shared_bytes: int = 1024,
        ranges: Sequence[MemoryRange] = (),
    ) -> None:
        self.observers, self.threads_per_cta, self.ctas = observers, threads, ctas
        self._clock = self._line = 0
        self._copies: list[tuple[Site, np.ndarray, np.ndarray, int]] = []
        launch = Launch(
            "trace", (ctas, 1, 1), (threads, 1, 1), (1, 1, 1), 0, shared_bytes, Ranges(ranges)
        )
        for observer in observers:
            observer.begin(launch)
            observer.wave(0, ctas)

    def _site(self, mnemonic: str) -> Site:
        self._line += 1
        return Site(self._line, mnemonic, self._line, f"kernel.cuh:{100 + self._line}")

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def access(
        self,
        kind: str,
        threads: Sequence[int],
        addresses: Sequence[int],
        size: int | Sequence[int] = 4,
        *,
        space: str = "shared",
        shape: str = "plain",
        mnemonic: str = "",
    ) -> Site:
        site = self._site(mnemonic or f"{kind}.{space}")
        event = MemoryAccess(
            site,
            space,
            kind,
            np.array(threads, np.int64),
            np.array(addresses, np.int64),
            size if isinstance(size, int) else np.array(size, np.int64),
            shape,
            self._tick(),
        )
        for observer in self.observers:
            observer.memory(event)
        return site

    def read(self, threads: Sequence[int], addresses: Sequence[int], size: int = 4) -> None:
        self.access("read", threads, addresses, size)

    def write(self, threads: Sequence[int], addresses: Sequence[int], size: int = 4) -> None:
        self.access("write", threads, addresses, size)

    def ldmatrix(self, threads: Sequence[int], addresses: Sequence[int]) -> None:
        self.access("read", threads, addresses, 16, shape="matrix", mnemonic="ldmatrix.x4")

    def copy(self, threads: Sequence[int], addresses: Sequence[int], size: int = 16) -> None:
        site = self.access("async_write", threads, addresses, size, mnemonic="cp.async")
        self._copies.append((site, np.array(threads), np.array(addresses), size))

    def wait(self, threads: Sequence[int]) -> None:
        """wait_group 0 by these threads: all their copies land."""
        site, kept = self._site("cp.async.wait_group"), []
        waiting = np.array(threads)
        event = AsyncGroupEvent(site, "wait", waiting, 0, self._tick())
        for observer in self.observers:
            observer.async_group(event)
        for issued, owners, addresses, size in self._copies:
            lands = np.isin(owners, waiting)
            if lands.any():
                landing = AsyncLanding(
                    site, issued, owners[lands], addresses[lands], size, self._tick()
                )
                for observer in self.observers:
                    observer.async_landing(landing)
            if not lands.all():
                kept.append((issued, owners[~lands], addresses[~lands], size))
        self._copies = kept

    def barrier(
        self,
        threads: Sequence[int] | None = None,
        number: int = 0,
        arrived: Sequence[int] = (),
    ) -> None:
        """A CTA barrier at which all threads wait, or some; others may have arrived before."""
        all_threads = range(self.ctas * self.threads_per_cta)
        waiting = np.array(all_threads if threads is None else threads, np.int64)
        members = np.concatenate([np.array(arrived, np.int64), waiting])
        site = self._site("bar.sync")
        for kind, whom in (("arrive", waiting), ("release", members)):
            event = BarrierEvent(site, kind, number, members.size, whom, self._tick())
            for observer in self.observers:
                observer.barrier(event)

    def arrive(self, threads: Sequence[int], number: int, expected: int) -> None:
        """bar.arrive: these threads do not wait."""
        members = np.array(threads, np.int64)
        site = self._site("bar.arrive")
        event = BarrierEvent(site, "arrive", number, expected, members, self._tick())
        for observer in self.observers:
            observer.barrier(event)

    def warp_sync(self, threads: Sequence[int]) -> None:
        event = WarpSync(self._site("bar.warp.sync"), np.array(threads), self._tick())
        for observer in self.observers:
            observer.warp_sync(event)

    def kinds(self) -> list[str]:
        """Kinds of all findings, sorted."""
        return sorted(f.kind for observer in self.observers for f in observer.findings)
