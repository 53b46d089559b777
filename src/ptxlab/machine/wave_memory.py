"""Executes the memory accesses of a wave: loads, stores, atomics, matrices, asynchronous copies.

They also notify observers. Code that is translated without observers never calls ``see``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import (
    AsyncGroupEvent,
    AsyncLanding,
    MemoryAccess,
    Observer,
    Site,
)
from ptxlab.machine.fragments import matrix_rows_to_registers, registers_to_matrix_rows
from ptxlab.machine.geometry import WARP, Geometry
from ptxlab.machine.group import AsyncCopy, Group
from ptxlab.machine.memory import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    WORDS,
    BankedMemory,
    GlobalMemory,
    generic_space,
)
from ptxlab.machine.random_schedule import RandomSchedule


@dataclass(frozen=True, slots=True)
class RowBase:
    """16-byte rows in shared memory: their cells, their byte addresses, and the OR of the
    addresses."""

    cells: np.ndarray
    addresses: np.ndarray
    bits: int


class WaveMemory:
    """The memories that the CTAs of a wave access; sends events to observers."""

    def __init__(
        self,
        geometry: Geometry,
        memory: GlobalMemory,
        shared_bytes: int,
        local_bytes: int,
        observers: Sequence[Observer],
    ) -> None:
        self.geometry, self.memory, self.observers = geometry, memory, observers
        self.shared = BankedMemory("shared", geometry.ctas, shared_bytes)
        self.local = BankedMemory("local", geometry.threads, local_bytes)
        geometry.shared_pitch, geometry.local_pitch = self.shared.pitch, self.local.pitch
        self.masks_bad_access = any(observer.handles_bad_access for observer in observers)
        self.clock = 0
        # Decides the order in which atomics to one address are executed; None: in the order of
        # threads.
        self.random: RandomSchedule | None = None
        # The seed of that order. It is drawn when the observers are notified of an atomic: before
        # the atomic is executed.
        self._drawn: int | None = None

    # Observation

    def tick(self) -> int:
        """Returns the clock of the next event."""
        self.clock += 1
        return self.clock

    def see(
        self,
        group: Group,
        site: Site,
        space: str,
        kind: str,
        addresses: Any,
        sizes: Any,
        shape: str,
        mask: Any,
        order: str = "",
    ) -> Any:
        """Notifies observers of an access.

        Returns the mask of the threads that may then execute it.

        For the shape "matrix", ``sizes`` is the number of lanes per warp that give row addresses.
        """
        positions = group.active(mask)
        flat = np.broadcast_to(addresses, (group.n,)).astype(np.int64)[positions]
        sizes = sizes if np.ndim(sizes) == 0 else np.asarray(sizes)[positions].astype(np.int64)
        if space == "generic":
            space, flat = self.resolve(flat)
        if np.ndim(sizes):
            # A cp.async that reads 0 bytes does not access its source.
            positions, flat, sizes = positions[sizes > 0], flat[sizes > 0], sizes[sizes > 0]
        if shape == "matrix":
            lanes = group.index[positions] % WARP < sizes
            positions, flat, sizes = positions[lanes], flat[lanes], 16
        if flat.size == 0:
            return mask
        if kind == "atomic" and self.random is not None:
            self._drawn = self.random.getrandbits(64)
            turns = np.random.default_rng(self._drawn).permutation(positions.size)
            positions, flat = positions[turns], flat[turns]
        threads = group.index[positions] + self.geometry.first_thread
        event = MemoryAccess(
            site, space, kind, threads, flat, sizes, shape, self.tick(),
            None, None, *(order.split(".") if space == "global" and order else ("", "")),
        )  # fmt: skip
        for observer in self.observers:
            observer.memory(event)
        if not self.masks_bad_access:
            return mask
        good = self._good(space, flat, sizes, write=kind in ("write", "atomic"))
        if good.all():
            return mask
        allowed = np.ones(group.n, np.bool_) if mask is None else np.broadcast_to(mask, group.n)
        allowed = allowed.copy()
        allowed[positions[~good]] = False
        return allowed

    def _good(self, space: str, addresses: np.ndarray, sizes: Any, *, write: bool) -> np.ndarray:
        if space == "global":
            inside = self.memory.inside(addresses, sizes, write=write)
        else:
            bank = self.shared if space == "shared" else self.local
            inside = bank.inside(addresses, sizes)
        aligned = addresses & (np.maximum(sizes & -sizes, 1) - 1) == 0
        # A cp.async whose source size is 0 reads nothing, so any source address is valid.
        return (inside & aligned) | (np.asarray(sizes) == 0)

    def resolve(self, addresses: Any) -> tuple[str, Any]:
        """Returns the state space of generic addresses, and these addresses within it."""
        space = generic_space(addresses)
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0}[space]
        return space, addresses - np.int64(window)

    # Loads and stores. Addresses are arrays or scalars, unsigned 32-bit or signed 64-bit.

    def load(self, group: Group, space: str, addresses: Any, size: int, mask: Any) -> Any:
        """Reads words of ``size`` bytes: an array over the group, or a scalar if the address is
        uniform and global.

        Threads outside ``mask`` get 0.
        """
        if mask is None:
            return self._load(group, space, addresses, size, None)
        positions = group.active(mask)
        out = np.zeros(group.n, WORDS[size])
        if positions.size:
            chosen = np.broadcast_to(addresses, (group.n,))[positions]
            out[positions] = self._load(group, space, chosen, size, positions)
        return out

    def _load(self, group: Group, space: str, addresses: Any, size: int, positions: Any) -> Any:
        if space == "generic":
            space, addresses = self.resolve(addresses)
        if space == "global":
            return self.memory.load(addresses, size)
        bank, base = self._bank(group, space, positions)
        bank.check(addresses, size, size)
        return bank.views[size][(base + addresses) >> (size.bit_length() - 1)]

    def store(
        self, group: Group, space: str, addresses: Any, size: int, values: Any, mask: Any
    ) -> None:
        """Writes words of ``size`` bytes for the threads in ``mask``."""
        positions = None
        if mask is not None:
            positions = group.active(mask)
            if not positions.size:
                return
            addresses = np.broadcast_to(addresses, (group.n,))[positions]
            values = np.broadcast_to(values, (group.n,))[positions]
        self._store(group, space, addresses, size, values, positions)

    def _store(
        self, group: Group, space: str, addresses: Any, size: int, values: Any, positions: Any
    ) -> None:
        if space == "generic":
            space, addresses = self.resolve(addresses)
        if space == "global":
            # If the address is uniform, the cell keeps the value of the last thread.
            if np.ndim(addresses) == 0 and np.ndim(values):
                values = values[-1]
            self.memory.store(addresses, size, values)
            return
        bank, base = self._bank(group, space, positions)
        bank.check(addresses, size, size)
        bank.views[size][(base + addresses) >> (size.bit_length() - 1)] = values

    def _bank(self, group: Group, space: str, positions: Any) -> tuple[BankedMemory, np.ndarray]:
        bank = self.shared if space == "shared" else self.local
        base = group.shared_base if space == "shared" else group.local_base
        return bank, base if positions is None else base[positions]

    def atomic(
        self, group: Group, space: str, addresses: Any, operation: Any, values: Any, mask: Any
    ) -> np.ndarray:
        """Executes an atomic operation; returns the old values.

        Threads with the same address are executed one after the other. The schedule decides their
        order, on which fp32 sums depend.
        """
        positions = group.active(mask)
        dtype = values[0].dtype
        size, old = dtype.itemsize, np.zeros(group.n, dtype)
        if not positions.size:
            return old
        if self.random is not None:
            drawn, self._drawn = self._drawn, None
            seed = self.random.getrandbits(64) if drawn is None else drawn
            positions = positions[np.random.default_rng(seed).permutation(positions.size)]
        flat = np.broadcast_to(addresses, (group.n,))[positions]
        given = [np.broadcast_to(value, (group.n,))[positions] for value in values]
        if space == "generic":
            space, flat = self.resolve(flat)
        cells = flat if space == "global" else self._bank(group, space, positions)[1] + flat
        for turn in _turns(cells):
            its, where = positions[turn], flat[turn]
            current = self._load(group, space, where, size, its).view(dtype)
            old[its] = current
            new = np.asarray(operation(current, *(value[turn] for value in given)), dtype)
            self._store(group, space, where, size, new.view(WORDS[size]), its)
        return old

    def add_vectors(
        self, group: Group, space: str, addresses: Any, values: Sequence[Any], mask: Any
    ) -> list[np.ndarray]:
        """Executes atom.add of fp32 vectors; returns the old elements.

        The addition is atomic for each element, not for the whole vector, so the order of sums may
        differ between elements.
        """
        # This checks the bounds and the alignment of the whole vector.
        self.load(group, space, addresses, 4 * len(values), mask)
        return [
            self.atomic(group, space, addresses + np.int64(4 * k), np.add, (value,), mask)
            for k, value in enumerate(values)
        ]

    # Matrices

    def load_matrix(
        self, group: Group, addresses: Any, count: int, transpose: bool, mask: Any
    ) -> np.ndarray:
        """Executes ldmatrix: returns uint32 registers (count, threads)."""
        group.require_whole("ldmatrix")
        addresses = np.broadcast_to(addresses, (group.n,))
        if mask is None and count == 4:
            self.shared.check(addresses, 16, 16)
            rows = self.shared.views[16].take((group.shared_base + addresses) >> 4)
            return matrix_rows_to_registers(rows, count, transpose)
        lanes = group.index % WARP < 8 * count
        keep = lanes if mask is None else lanes & mask
        rows = self.load(group, "shared", addresses, 16, keep)[lanes]
        return matrix_rows_to_registers(rows, count, transpose)

    def rows(self, group: Group, addresses: Any) -> RowBase:
        """Returns the 16-byte cells at a base address, for matrices at constant offsets from it."""
        group.require_whole("ldmatrix")
        if addresses.ndim == 0:
            addresses = np.broadcast_to(addresses, (group.n,))
        return RowBase(
            (group.shared_base + addresses) >> 4, addresses, int(np.bitwise_or.reduce(addresses))
        )

    def load_rows(self, group: Group, base: RowBase, offset: int, transpose: bool) -> np.ndarray:
        """Executes ldmatrix.x4 at ``base + offset``: returns uint32 registers (4, threads)."""
        bits = base.bits
        if offset < 0 or bits + offset + 16 > self.shared.size or (bits | offset) & 15:
            self.shared.check(base.addresses.astype(np.int64) + offset, 16, 16)
        cells = base.cells + (offset >> 4) if offset else base.cells
        return matrix_rows_to_registers(self.shared.views[16].take(cells), 4, transpose)

    def store_matrix(
        self, group: Group, addresses: Any, values: Sequence[Any], transpose: bool, mask: Any
    ) -> None:
        """Executes stmatrix, which stores one matrix for each register."""
        group.require_whole("stmatrix")
        lanes = group.index % WARP < 8 * len(values)
        rows = np.zeros(group.n, np.complex128)
        rows[lanes] = registers_to_matrix_rows(values, group.n, transpose)
        keep = lanes if mask is None else lanes & mask
        self.store(group, "shared", addresses, 16, rows, keep)

    # Asynchronous copies

    def copy_async(
        self,
        group: Group,
        site: Site,
        target: Any,
        source: Any,
        size: int,
        source_size: Any,
        mask: Any,
    ) -> None:
        """Executes cp.async: reads the data now; the data land at the wait that covers the copy.

        Reads ``source_size`` bytes (None: all); the rest of the destination becomes zero.
        """
        target, source = _spread(target, group.n), _spread(source, group.n)
        index, base = group.index, group.shared_base
        if mask is not None:
            positions = group.active(mask)
            if not positions.size:
                return
            target, source, index, base = (
                target[positions],
                source[positions],
                index[positions],
                base[positions],
            )
        self.shared.check(target, size, size)
        if source_size is None:
            words = self.memory.load(source, size)
        else:
            limit = _spread(source_size, group.n).astype(np.int64)
            words = self._short_words(source, size, limit if mask is None else limit[positions])
        flat = (base + target) >> (size.bit_length() - 1)
        group.open.append(AsyncCopy(site, size, index, flat, target, words))

    def _short_words(self, source: np.ndarray, size: int, limit: np.ndarray) -> np.ndarray:
        raw = np.zeros((source.size, size), np.uint8)
        if (limit > size).any():
            raise EmulatorError(f"cp.async of {size} bytes with src-size {int(limit.max())}")
        for length in np.unique(limit):
            chosen = limit == length
            piece = next(width for width in (16, 8, 4, 2, 1) if length % width == 0)
            for offset in range(0, int(length), piece):
                part = self.memory.load(source[chosen] + offset, piece)
                raw[chosen, offset : offset + piece] = part.view(np.uint8).reshape(-1, piece)
        return raw.view(WORDS[size]).reshape(-1)

    def commit(self, group: Group, site: Site) -> None:
        """Executes cp.async.commit_group."""
        if self.observers:
            event = AsyncGroupEvent(site, "commit", group.threads, 0, self.tick())
            for observer in self.observers:
                observer.async_group(event)
        group.committed.append(group.open)
        group.open = []

    def wait_async(self, group: Group, site: Site, allowed: int) -> None:
        """Executes cp.async.wait_group, or wait_all if ``allowed`` is -1: the data land now, which
        is the latest possible time."""
        if self.observers:
            event = AsyncGroupEvent(site, "wait", group.threads, allowed, self.tick())
            for observer in self.observers:
                observer.async_group(event)
        if allowed < 0:
            done, group.committed = [*group.committed, group.open], []
            group.open = []
        else:
            cut = max(0, len(group.committed) - allowed)
            done, group.committed = group.committed[:cut], group.committed[cut:]
        for copy in (copy for copies in done for copy in copies):
            self.shared.views[copy.size][copy.cells] = copy.words
            if self.observers and copy.threads.size:
                threads = copy.threads + self.geometry.first_thread
                addresses = copy.addresses.astype(np.int64)
                landing = AsyncLanding(
                    site, copy.issued, threads, addresses, copy.size, self.tick()
                )
                for observer in self.observers:
                    observer.async_landing(landing)


def _turns(cells: np.ndarray) -> list[np.ndarray]:
    """Splits indices into rounds.

    A round contains each cell at most once, and the indices of one cell keep their order.
    """
    order = np.argsort(cells, kind="stable")
    found = cells[order]
    begins = np.flatnonzero(np.concatenate(([True], found[1:] != found[:-1])))
    if begins.size == cells.size:
        return [np.arange(cells.size)]
    counts = np.diff(np.append(begins, cells.size))
    rank = np.arange(cells.size) - np.repeat(begins, counts)
    return [order[rank == turn] for turn in range(int(counts.max()))]


def _spread(value: Any, threads: int) -> np.ndarray:
    """Returns one value per thread; a uniform value is broadcast."""
    return value if value.ndim else np.broadcast_to(value, (threads,))
