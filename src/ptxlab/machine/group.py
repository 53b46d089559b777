"""A group: threads that share one program counter, and their pending asynchronous copies.

At the beginning of a launch, one group contains all threads of a wave. A divergent branch forks a
group into two, which run as separate coroutines and join at the branch's immediate post-dominator.
Different groups may be at different instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import Site
from ptxlab.machine.geometry import WARP, WARPGROUP, Geometry
from ptxlab.machine.polls import Poll
from ptxlab.machine.protocols import PendingWgmma

u4 = np.uint32


@dataclass(slots=True)
class AsyncCopy:
    """A cp.async in flight: words of 16, 8 or 4 bytes and the cells of shared memory that they go
    to.

    ``whole`` is the copy of which this is a part, or None if this is a whole copy.
    """

    issued: Site
    size: int
    threads: np.ndarray
    cells: np.ndarray
    addresses: np.ndarray
    words: np.ndarray
    whole: AsyncCopy | None = None

    def part(self, keep: np.ndarray) -> AsyncCopy:
        """Returns the part of the copy that belongs to the threads in ``keep`` (numbers within the
        wave)."""
        return self._at(np.flatnonzero(keep[self.threads]))

    def _at(self, chosen: np.ndarray) -> AsyncCopy:
        return AsyncCopy(
            self.issued,
            self.size,
            self.threads[chosen],
            self.cells[chosen],
            self.addresses[chosen],
            self.words[chosen],
            self.whole or self,
        )

    @staticmethod
    def reunite(copies: list[AsyncCopy]) -> list[AsyncCopy]:
        """Merges the parts of each copy.

        Without this, every fork and join while a copy is pending would double the number of its
        parts.
        """
        families: dict[int, list[AsyncCopy]] = {}
        for copy in copies:
            families.setdefault(id(copy.whole or copy), []).append(copy)
        return [_reunited(parts) for parts in families.values()]


def _reunited(parts: list[AsyncCopy]) -> AsyncCopy:
    whole = parts[0].whole
    if len(parts) == 1 or whole is None:
        return parts[0]
    threads = np.concatenate([part.threads for part in parts])
    if threads.size == whole.threads.size:
        return whole
    # Some parts have landed since the fork. The others remain, in the order of the whole copy.
    return whole._at(np.flatnonzero(np.isin(whole.threads, threads)))


class Group:
    """Threads that execute together, at one program counter.

    ``index`` has their numbers within the wave, ascending (int64).
    """

    def __init__(self, grid: Geometry, index: np.ndarray) -> None:
        self.geometry = grid
        self.index = index
        self.n = len(index)
        self.warp = grid.warp(index)
        self.warps = int(np.count_nonzero(self.warp[1:] != self.warp[:-1])) + (self.n > 0)
        self.whole = grid.threads_per_cta % WARP == 0 and self.warps * WARP == self.n
        self.cta = index // grid.threads_per_cta
        self.shared_base = self.cta * grid.shared_pitch
        self.local_base = index * grid.local_pitch
        #: The copies of cp.async: committed groups that were not waited for, oldest first, and the
        #: copies that are not committed yet.
        self.committed: list[list[AsyncCopy]] = []
        self.open: list[AsyncCopy] = []
        #: The products of wgmma: products that are not committed yet, and committed groups that
        #: were not waited for.
        self.pending_wgmma: list[PendingWgmma] = []
        self.wgmma_groups: list[list[PendingWgmma]] = []
        #: For each load of a polling loop, by the load's index, the words that it has read in this
        #: iteration.
        self.polls: dict[int, Poll] = {}
        self._special: dict[str, Any] = {}
        self._shuffles: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}

    @property
    def threads(self) -> np.ndarray:
        """The flat indices of the threads in the launch."""
        return self.index + self.geometry.first_thread

    def special(self, name: str) -> Any:
        """Returns a special register: an array over the group, or a NumPy scalar if it is
        uniform."""
        if name not in self._special:
            self._special[name] = self.geometry.special(name, self.index)
        return self._special[name]

    @cached_property
    def whole_warpgroups(self) -> bool:
        """Whether the threads form whole warpgroups: four warps, the first at a multiple of 4."""
        if self.n % WARPGROUP or self.geometry.threads_per_cta % WARPGROUP:
            return False
        first = self.index[::WARPGROUP]
        return bool(
            (first % WARPGROUP == 0).all()
            and (self.index[WARPGROUP - 1 :: WARPGROUP] - first == WARPGROUP - 1).all()
        )

    def require_whole(self, mnemonic: str) -> None:
        """Raises EmulatorError if a warp is only partly in this group, since ``.aligned``
        instructions need whole warps."""
        if not self.whole:
            missing = WARP - self.n % WARP
            raise EmulatorError(
                f"{mnemonic} is executed by part of a warp ({missing} lanes are elsewhere or "
                f"have exited)"
            )

    # Forks and joins

    def split(self, mask: np.ndarray) -> tuple[Group, Group]:
        """Splits the group into the threads inside and those outside ``mask``. Each of the two
        groups keeps the copies and polls of its threads."""
        parts = []
        for chosen in (mask, ~mask):
            part = Group(self.geometry, self.index[chosen])
            if self.committed or self.open:
                keep = np.zeros(self.geometry.threads, np.bool_)
                keep[part.index] = True
                part.committed = [[c.part(keep) for c in copies] for copies in self.committed]
                part.open = [c.part(keep) for c in self.open]
            part.polls = {load: poll.part(chosen) for load, poll in self.polls.items()}
            part.pending_wgmma = list(self.pending_wgmma)
            part.wgmma_groups = [list(products) for products in self.wgmma_groups]
            parts.append(part)
        return parts[0], parts[1]

    def absorb(self, parts: list[Group]) -> None:
        """Takes over the copies and polls of parts that join.

        A wait counts committed groups from the newest one, so lists of different lengths are
        aligned at their ends.
        """
        depth = max(len(part.committed) for part in parts)
        self.committed = [[] for _ in range(depth)]
        for part in parts:
            offset = depth - len(part.committed)
            for position, copies in enumerate(part.committed):
                self.committed[offset + position].extend(copies)
        self.committed = [AsyncCopy.reunite(copies) for copies in self.committed]
        self.open = AsyncCopy.reunite([copy for part in parts for copy in part.open])
        self._absorb_wgmma(parts)
        self._absorb_polls(parts)

    def _absorb_polls(self, parts: list[Group]) -> None:
        self.polls = {}
        for part in parts:
            if part.polls:
                positions = np.searchsorted(self.index, part.index)
                for load, poll in part.polls.items():
                    its, known = poll.at(positions), self.polls.get(load)
                    self.polls[load] = its if known is None else known.joined(its)

    def _absorb_wgmma(self, parts: list[Group]) -> None:
        if not any(part.pending_wgmma or part.wgmma_groups for part in parts):
            self.pending_wgmma, self.wgmma_groups = [], []
            return
        depth = max(len(part.wgmma_groups) for part in parts)
        groups: list[dict[int, PendingWgmma]] = [{} for _ in range(depth)]
        for part in parts:
            offset = depth - len(part.wgmma_groups)
            for position, products in enumerate(part.wgmma_groups):
                groups[offset + position].update((id(product), product) for product in products)
        self.wgmma_groups = [list(found.values()) for found in groups]
        self.pending_wgmma = list({id(p): p for part in parts for p in part.pending_wgmma}.values())

    def active(self, mask: Any) -> np.ndarray:
        """Returns the positions of the threads in ``mask``; None if ``mask`` is None, which means
        all."""
        if mask is None:
            return np.arange(self.n)
        return np.flatnonzero(np.broadcast_to(mask, (self.n,)))

    # Lanes

    def shuffle_source(self, mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
        """Executes shfl.sync with operands that are the same for all threads.

        Returns (the position in the group to read from, whether it is in range).

        The position is -1 if the source lane is not in this group.
        """
        key = (mode, b, c)
        if key not in self._shuffles:
            self._shuffles[key] = self.shuffle_source_varying(mode, u4(b), u4(c))
        return self._shuffles[key]

    def shuffle_source_varying(
        self, mode: str, b: np.ndarray, c: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same as shuffle_source() for operands that differ between threads (uint32
        arrays or scalars)."""
        b = np.broadcast_to(b, (self.n,)).astype(np.int64)
        c = np.broadcast_to(c, (self.n,)).astype(np.int64)
        tid = self.index % self.geometry.threads_per_cta
        lane = tid % WARP
        segment, clamp, b = (c >> 8) & 31, c & 31, b & 31
        lowest = lane & segment
        highest = lowest | (clamp & ~segment)
        if mode == "up":
            source = lane - b
            good = source >= highest
        else:
            step = {"down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}
            source = step[mode]
            good = source <= highest
        source = np.where(good, source, lane)
        position = np.full(self.geometry.padded_threads, -1, np.int64)
        position[self.index] = np.arange(self.n)
        found = position[self.index - lane + source]
        beyond = tid - lane + source >= self.geometry.threads_per_cta
        return np.where(beyond, -1, found), good

    def ballot(self, predicate: Any) -> np.ndarray:
        """Returns, for each thread, the mask (uint32) of the lanes of its warp for which the
        predicate is true; only lanes in this group count."""
        lane = self.index % self.geometry.threads_per_cta % WARP
        bits = np.broadcast_to(predicate, (self.n,)).astype(np.float64) * np.exp2(lane)
        return np.bincount(self.warp, weights=bits)[self.warp].astype(u4)

    def require_members(self, mnemonic: str, members: Any) -> None:
        """Raises EmulatorError if a lane named by a warp instruction is not in this group."""
        if self.whole:
            return
        here = self.ballot(np.bool_(True))
        missing = np.atleast_1d(members) & ~here & self.geometry.existing_lanes(self.index)
        if missing.any():
            raise EmulatorError(
                f"{mnemonic} waits for lanes {int(missing[missing != 0][0]):#010x} (mask), which "
                f"are elsewhere or have exited"
            )
