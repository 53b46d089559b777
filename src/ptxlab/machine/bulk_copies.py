"""Bulk copies: asynchronous copies of tensor boxes or plain bytes between global and shared memory.

A load is in flight until the scheduler lets it arrive. A copy to another CTA's shared memory is in
flight as well, and reads its source only when it arrives. A store, or a reduction (fp32 sums in
global memory), stays in the bulk groups of its thread, and is executed as late as PTX allows. At
wait_group.read a store reads shared memory; it writes global memory only at wait_group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import (
    Engine,
    EngineAccess,
    EngineDone,
    EngineLanding,
    MemoryAccess,
    Site,
)
from ptxlab.machine.geometry import WARP
from ptxlab.machine.group import Group
from ptxlab.machine.layouts import PIECE
from ptxlab.machine.mbarriers import Mbarrier, Mbarriers
from ptxlab.machine.memory import BankedMemory, GlobalMemory
from ptxlab.machine.protocols import HoldsMemories
from ptxlab.machine.random_schedule import RandomSchedule
from ptxlab.machine.tensor_maps import TensorMap

_TENSOR_ALIGNMENT = 128
#: In a random schedule, this fraction of the stores write global memory as soon as they have read
#: shared memory.
_WRITTEN_EARLY = 0.5


class Body(Protocol):
    """The data of a copy: the bytes outside shared memory, and their 16-byte pieces in shared
    memory."""

    @property
    def box_bytes(self) -> int: ...
    def pieces(self, address: int) -> np.ndarray: ...
    def read(self, coordinates: Sequence[int]) -> np.ndarray: ...
    def write(self, coordinates: Sequence[int], data: np.ndarray, *, add: bool) -> None: ...
    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, int]: ...


@dataclass(frozen=True)
class PlainRange:
    """Contiguous bytes of global memory. There is one coordinate, the address of the first byte."""

    memory: GlobalMemory
    box_bytes: int

    def pieces(self, address: int) -> np.ndarray:
        """Returns the addresses in shared memory of the 16-byte pieces."""
        return np.arange(address, address + self.box_bytes, PIECE, dtype=np.int64)

    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns the one row of bytes in global memory."""
        return np.array([coordinates[0]], np.int64), self.box_bytes

    def read(self, coordinates: Sequence[int]) -> np.ndarray:
        """Returns the bytes."""
        addresses = coordinates[0] + np.arange(0, self.box_bytes, PIECE, dtype=np.int64)
        words: np.ndarray = self.memory.load(addresses, PIECE)
        return words.view(np.uint8)

    def write(self, coordinates: Sequence[int], data: np.ndarray, *, add: bool) -> None:
        """Writes the bytes, or adds them to global memory as fp32 numbers."""
        addresses = coordinates[0] + np.arange(0, self.box_bytes, PIECE, dtype=np.int64)
        if add:
            old = self.memory.load(addresses, PIECE)
            data = old.view(np.float32) + data.view(np.float32)
        self.memory.store(addresses, PIECE, data.view(np.complex128))


@dataclass(frozen=True)
class Words:
    """Sixteen bytes from a thread's registers."""

    words: tuple[int, ...]
    box_bytes: int = PIECE
    writable: bool = False

    def pieces(self, address: int) -> np.ndarray:
        """Returns the one 16-byte piece in shared memory."""
        return np.array([address], np.int64)

    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns no rows, because registers are not in global memory."""
        return np.zeros(0, np.int64), self.box_bytes

    def read(self, coordinates: Sequence[int]) -> np.ndarray:
        """Returns the bytes."""
        return np.array(self.words, np.uint32).view(np.uint8)

    def write(self, coordinates: Sequence[int], data: np.ndarray, *, add: bool) -> None:
        """Always raises an error, because a bulk copy cannot write registers."""
        raise EmulatorError("a bulk store into registers")


@dataclass(frozen=True)
class OtherShared:
    """Contiguous bytes of a CTA's shared memory.

    There is one coordinate, the address of the first byte in that memory.
    ``base``: where the memory of this CTA begins in the shared memory of the whole wave.
    """

    memory: BankedMemory
    base: int
    box_bytes: int

    def pieces(self, address: int) -> np.ndarray:
        """Returns the addresses in shared memory of the 16-byte pieces."""
        return np.arange(address, address + self.box_bytes, PIECE, dtype=np.int64)

    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns no rows, because shared memory is not in global memory."""
        return np.zeros(0, np.int64), self.box_bytes

    def read(self, coordinates: Sequence[int]) -> np.ndarray:
        """Returns the bytes."""
        pieces = self.memory.views[PIECE]
        words: np.ndarray = pieces[(self.base + self.pieces(coordinates[0])) // PIECE]
        return words.view(np.uint8)

    def write(self, coordinates: Sequence[int], data: np.ndarray, *, add: bool) -> None:
        """Always raises an error, because bulk groups never write to shared memory."""
        raise EmulatorError("a bulk store into shared memory")


@dataclass(eq=False)
class _Load:
    """A copy into the shared memory of one CTA, which completes on an mbarrier of this CTA."""

    site: Site
    body: Body
    coordinates: tuple[int, ...]
    cta: int
    address: int
    barrier: Mbarrier
    clock: int


@dataclass(eq=False)
class _Store:
    """A copy out of one CTA's shared memory.

    ``add``: whether it is a reduction, which adds to global memory.
    ``data``: the bytes read from shared memory; None if they have not been read yet.
    """

    site: Site
    body: Body
    coordinates: tuple[int, ...]
    cta: int
    address: int
    thread: int
    clock: int
    add: bool
    data: np.ndarray | None = None
    written: bool = False


class BulkCopies:
    """All bulk copies of a wave."""

    def __init__(self, wave: HoldsMemories, mbarriers: Mbarriers) -> None:
        self.wave, self.geometry, self.mbarriers = wave, wave.geometry, mbarriers
        self.maps: dict[int, TensorMap] = {}
        #: Loads in flight. The loads that one instruction issues arrive together.
        self.loads: deque[list[_Load]] = deque()
        #: The loads that a hesitant schedule delays as long as anything else can run.
        self.held: list[_Load] | None = None
        #: For each thread of the wave: ``open`` has the stores that are not committed; ``groups``
        #: has, oldest first, the committed groups that may not have read shared memory yet; and
        #: ``read`` has older groups that have read it.
        self.open: dict[int, list[_Store]] = {}
        self.groups: dict[int, list[list[_Store]]] = {}
        self.read: dict[int, list[list[_Store]]] = {}
        mbarriers.oldest_copy = self._oldest

    # Issue

    def load_tensor(
        self,
        group: Group,
        site: Site,
        rank: int,
        target: Any,
        tensor_map: Any,
        coordinates: Sequence[Any],
        barrier: Any,
        mask: Any,
        ctas: Any,
    ) -> None:
        """Executes cp.async.bulk.tensor into shared memory.

        ``ctas`` is a mask of ranks for multicast; None: no multicast.
        """
        together = []
        for position in group.active(mask).tolist():
            body = self._map(_of(tensor_map, position), rank)
            where = tuple(_signed(_of(c, position)) for c in coordinates)
            address = _of(target, position)
            self._check_alignment(group, site, position, address, _TENSOR_ALIGNMENT)
            ranks = None if ctas is None else _of(ctas, position)
            together += self._load(
                group, site, position, body, where, address, _of(barrier, position), ranks
            )
        if together:
            self.loads.append(together)

    def load_range(
        self,
        group: Group,
        site: Site,
        target: Any,
        source: Any,
        size: Any,
        barrier: Any,
        mask: Any,
        ctas: Any,
    ) -> None:
        """Executes cp.async.bulk of plain bytes into shared memory."""
        together = []
        for position in group.active(mask).tolist():
            body = self._range(group, site, position, _of(source, position), _of(size, position))
            address = _of(target, position)
            self._check_alignment(group, site, position, address, PIECE)
            ranks = None if ctas is None else _of(ctas, position)
            together += self._load(
                group,
                site,
                position,
                body,
                (_of(source, position),),
                address,
                _of(barrier, position),
                ranks,
            )
        if together:
            self.loads.append(together)

    def store_words(
        self, group: Group, site: Site, target: Any, words: Sequence[Any], barrier: Any, mask: Any
    ) -> None:
        """Executes st.async of 16 bytes, which arrive like a load and complete on the st.async's
        mbarrier."""
        for position in group.active(mask).tolist():
            body = Words(tuple(_of(word, position) for word in words))
            address = _of(target, position)
            self._check_alignment(group, site, position, address, PIECE)
            together = self._load(
                group, site, position, body, (), address, _of(barrier, position), None
            )
            if together:
                self.loads.append(together)

    def copy_shared(
        self,
        group: Group,
        site: Site,
        target: Any,
        source: Any,
        size: Any,
        barrier: Any,
        mask: Any,
    ) -> None:
        """Executes cp.async.bulk from one CTA's shared memory to the shared memory of another CTA
        in the same cluster."""
        shared, pitch = self.wave.shared, self.geometry.shared_pitch
        for position in group.active(mask).tolist():
            where, bytes_ = _of(source, position), _of(size, position)
            to, at = _of(target, position), _of(barrier, position)
            if bytes_ % PIECE:
                self.wave.misuse(
                    "bulk-alignment", site, group.threads[position : position + 1],
                    f"{bytes_} bytes from shared address {where}: not a multiple of 16", where,
                )  # fmt: skip
                bytes_ -= bytes_ % PIECE
            for address in (where, to):
                self._check_alignment(group, site, position, address, PIECE)
            shared.check(np.array([where, where + bytes_ - PIECE]), PIECE, PIECE)
            body = OtherShared(shared, int(group.cta[position]) * pitch, bytes_)
            together = self._load(group, site, position, body, (where,), to, at, None)
            for load in together:
                self._notify_source(group, site, position, load, where)
            if together:
                self.loads.append(together)

    def _notify_source(
        self, group: Group, site: Site, position: int, load: _Load, source: int
    ) -> None:
        """Notifies observers that a copy between shared memories may read its source until the copy
        arrives."""
        if not self.wave.observers:
            return
        first = self.geometry.first_cta
        engine = Engine("mbarrier", load.cta + first, load.barrier.address)
        event = EngineAccess(
            site, engine, "read", group.threads[position : position + 1],
            int(group.cta[position]) + first, load.body.pieces(source), PIECE, load.clock,
        )  # fmt: skip
        for observer in self.wave.observers:
            observer.engine_access(event)

    def _load(
        self,
        group: Group,
        site: Site,
        position: int,
        body: Body,
        coordinates: tuple[int, ...],
        target: int,
        barrier: int,
        ranks: int | None,
    ) -> list[_Load]:
        own = group.cta[position : position + 1]
        address, owners = self.geometry.owners(own, target)
        at, at_owners = self.geometry.owners(own, barrier)
        if ranks is not None:
            size = self.geometry.clusters.size
            if ranks >> size:
                raise EmulatorError(f"CTA mask {ranks:#x} in a cluster of {size}")
            chosen = np.array([rank for rank in range(size) if ranks >> rank & 1])
            first = self.geometry.first_cta
            owners = self.geometry.clusters.peer(own + first, chosen) - first
            at_owners = owners
        if (owners != at_owners).any():
            raise EmulatorError("a bulk copy and its mbarrier are in different CTAs")
        self.wave.shared.check(np.array([address, address + body.box_bytes - PIECE]), PIECE, 16)
        clock = self.wave.tick()
        self._notify_global(group, site, position, body, coordinates, "async_read", None, clock)
        loads = []
        for owner in (int(cta) for cta in owners):
            mbarrier = self.mbarriers.require(group, site, position, owner, at)
            if mbarrier is None:
                continue
            clock = self.wave.tick()
            load = _Load(site, body, coordinates, owner, address, mbarrier, clock)
            if self.wave.observers:
                engine = Engine("mbarrier", owner + self.geometry.first_cta, at)
                self._notify(group, site, position, engine, "write", load)
            loads.append(load)
        return loads

    def store_tensor(
        self,
        group: Group,
        site: Site,
        rank: int,
        tensor_map: Any,
        coordinates: Sequence[Any],
        source: Any,
        mask: Any,
        *,
        add: bool,
    ) -> None:
        """Executes cp.async.bulk.tensor or cp.reduce.async.bulk.tensor out of shared memory."""
        for position in group.active(mask).tolist():
            body = self._map(_of(tensor_map, position), rank)
            where = tuple(_signed(_of(c, position)) for c in coordinates)
            address = _of(source, position)
            self._check_alignment(group, site, position, address, _TENSOR_ALIGNMENT)
            self._store(group, site, position, body, where, address, add=add)

    def store_range(
        self, group: Group, site: Site, target: Any, source: Any, size: Any, mask: Any, *, add: bool
    ) -> None:
        """Executes cp.async.bulk or cp.reduce.async.bulk of plain bytes out of shared memory."""
        for position in group.active(mask).tolist():
            body = self._range(group, site, position, _of(target, position), _of(size, position))
            address = _of(source, position)
            self._check_alignment(group, site, position, address, PIECE)
            self._store(group, site, position, body, (_of(target, position),), address, add=add)

    def _store(
        self,
        group: Group,
        site: Site,
        position: int,
        body: Body,
        coordinates: tuple[int, ...],
        address: int,
        *,
        add: bool,
    ) -> None:
        self.wave.shared.check(np.array([address, address + body.box_bytes - PIECE]), PIECE, 16)
        thread, cta = int(group.index[position]), int(group.cta[position])
        store = _Store(site, body, coordinates, cta, address, thread, self.wave.tick(), add)
        if self.wave.observers:
            self._notify(group, site, position, self._group_engine(thread, "bulk"), "read", store)
        kind = "async_atomic" if add else "async_write"
        engine = self._group_engine(thread, "bulk write")
        self._notify_global(group, site, position, body, coordinates, kind, engine, store.clock)
        self.open.setdefault(thread, []).append(store)

    # Groups

    def commit(self, group: Group, mask: Any) -> None:
        """Executes cp.async.bulk.commit_group."""
        for position in group.active(mask).tolist():
            thread = int(group.index[position])
            self.groups.setdefault(thread, []).append(self.open.pop(thread, []))

    def wait(self, group: Group, site: Site, allowed: int, mask: Any, *, read: bool) -> None:
        """Executes cp.async.bulk.wait_group: completes all groups except the ``allowed`` newest.

        With ``.read`` these groups only need to have read shared memory.
        """
        for position in group.active(mask).tolist():
            thread = int(group.index[position])
            was_read, groups = self.read.setdefault(thread, []), self.groups.get(thread, [])
            cut = max(0, len(groups) - allowed)
            self.groups[thread] = groups[cut:]
            self._read(group, site, position, groups[:cut])
            was_read += groups[:cut]
            if read:
                continue
            cut = max(0, len(was_read) + len(groups) - cut - allowed)
            self.read[thread] = was_read[cut:]
            stores = [store for done in was_read[:cut] for store in done]
            for store in stores:
                self._write(store)
            self._done(group, site, position, "bulk write", stores)

    def _read(
        self, group: Group, site: Site, position: int, groups: Sequence[Sequence[_Store]]
    ) -> None:
        stores = [store for committed in groups for store in committed]
        random = self.wave.random
        for store in stores:
            self._read_shared(store)
            # From now on, the write may happen at any time up to the wait or the end of the kernel.
            if random is not None and random.random() < _WRITTEN_EARLY:
                self._write(store)
        self._done(group, site, position, "bulk", stores)

    def _done(
        self, group: Group, site: Site, position: int, kind: str, stores: Sequence[_Store]
    ) -> None:
        if not stores or not self.wave.observers:
            return
        engine = self._group_engine(stores[-1].thread, kind)
        threads = group.threads[position : position + 1]
        event = EngineDone(site, engine, threads, stores[-1].clock, self.wave.tick())
        for observer in self.wave.observers:
            observer.engine_done(event)

    def _read_shared(self, store: _Store) -> None:
        pieces = self.wave.shared.views[PIECE]
        base = store.cta * self.geometry.shared_pitch
        data = pieces[(base + store.body.pieces(store.address)) // PIECE]
        store.data = data.view(np.uint8)

    def _write(self, store: _Store) -> None:
        if not store.written:
            assert store.data is not None
            store.body.write(store.coordinates, store.data, add=store.add)
        store.data, store.written = None, True

    # Arrivals

    def deliver(self, random: RandomSchedule | None) -> bool:
        """Without ``random``, lets the loads of the oldest instruction arrive; with ``random``,
        lets one random load arrive. Returns whether any load arrived."""
        if not self.loads:
            return False
        if random is None:
            if self.loads[0] is self.held and len(self.loads) > 1:
                self.loads.rotate(-1)
            if self.loads[0] is self.held:
                self.held = None
            # Loads arrive one by one: a thread that waits for a phase is not ordered after copies
            # that arrive after the end of the phase.
            while self.loads[0]:
                self._arrive(self.loads[0].pop(0))
            self.loads.popleft()
            return True
        if random.hesitant and self.held is None:
            self.held = random.choice(self.loads)
        which = random.randrange(len(self.loads))
        together = self.loads[which]
        if together is self.held:
            return False
        load = together.pop(random.randrange(len(together)))
        if not together:
            del self.loads[which]
        self._arrive(load)
        return True

    def _arrive(self, load: _Load) -> None:
        positions = load.body.pieces(load.address)
        data = load.body.read(load.coordinates).view(np.complex128)
        base = load.cta * self.geometry.shared_pitch
        self.wave.shared.views[PIECE][(base + positions) // PIECE] = data
        if self.wave.observers:
            flat = load.cta + self.geometry.first_cta
            engine = Engine("mbarrier", flat, load.barrier.address)
            event = EngineLanding(
                engine, load.site, flat, positions, PIECE, load.clock, self.wave.tick()
            )
            for observer in self.wave.observers:
                observer.engine_landing(event)
        self.mbarriers.landed(load.site, load.barrier, load.cta, load.body.box_bytes)

    def end(self) -> None:
        """Called when all threads have exited.

        Loads that are still in flight are reported, and then completed. Stores that are still
        pending are written.
        """
        stores = [s for groups in self.groups.values() for group in groups for s in group]
        stores += [s for left in self.open.values() for s in left]
        for store in stores:
            self._read_shared(store)
        writes = [s for groups in self.read.values() for group in groups for s in group]
        if self.wave.random is not None:
            self.wave.random.shuffle(writes)
        for store in (*writes, *stores):
            self._write(store)
        loads = [load for together in self.loads for load in together]
        self.loads.clear()
        for load in loads:
            self._arrive(load)
        left: list[_Load | _Store] = [*stores, *loads]
        for copy in left:
            self.wave.misuse(
                "bulk-unfinished",
                copy.site,
                np.zeros(0, np.int64),
                f"still under way when its threads of CTA {copy.cta + self.geometry.first_cta} "
                "have exited",
                copy.address,
            )

    # Helpers

    def _map(self, address: int, rank: int) -> TensorMap:
        offset = address - int(self.wave.parameter_address)
        found = self.maps.get(offset)
        if found is None:
            known = ", ".join(map(str, sorted(self.maps))) or "none"
            raise EmulatorError(
                f"no tensor map at argument offset {offset}; the launch has these: {known}"
            )
        if found.rank != rank:
            raise EmulatorError(
                f"the tensor map at argument offset {offset} has {found.rank} dimensions"
            )
        return found

    def _range(
        self, group: Group, site: Site, position: int, address: int, size: int
    ) -> PlainRange:
        if size % PIECE or address % PIECE:
            self.wave.misuse(
                "bulk-alignment", site, group.threads[position : position + 1],
                f"{size} bytes at global address {address:#x}: both must be multiples of 16",
                address,
            )  # fmt: skip
        return PlainRange(self.wave.memory, size // PIECE * PIECE)

    def _check_alignment(
        self, group: Group, site: Site, position: int, address: int, alignment: int
    ) -> None:
        if address % alignment:
            self.wave.misuse(
                "bulk-alignment", site, group.threads[position : position + 1],
                f"shared address {address} is not a multiple of {alignment}", address,
            )  # fmt: skip

    def _oldest(self, cta: int, address: int) -> int | None:
        clocks = [
            load.clock
            for together in self.loads
            for load in together
            if load.cta == cta and load.barrier.address == address
        ]
        return min(clocks, default=None)

    def _group_engine(self, thread: int, kind: str) -> Engine:
        cta, tid = divmod(thread, self.geometry.threads_per_cta)
        return Engine(kind, cta + self.geometry.first_cta, tid // WARP)

    def _notify(
        self,
        group: Group,
        site: Site,
        position: int,
        engine: Engine,
        kind: str,
        copy: _Load | _Store,
    ) -> None:
        event = EngineAccess(
            site,
            engine,
            kind,
            group.threads[position : position + 1],
            copy.cta + self.geometry.first_cta,
            copy.body.pieces(copy.address),
            PIECE,
            copy.clock,
        )
        for observer in self.wave.observers:
            observer.engine_access(event)

    def _notify_global(
        self,
        group: Group,
        site: Site,
        position: int,
        body: Body,
        coordinates: tuple[int, ...],
        kind: str,
        engine: Engine | None,
        clock: int,
    ) -> None:
        addresses, size = body.rows(coordinates)
        if not addresses.size:
            return
        if not self.wave.masks_bad_access:
            self.wave.memory.check(addresses, size, write=engine is not None)
        if not self.wave.observers:
            return
        threads = np.repeat(group.threads[position], addresses.size)
        event = MemoryAccess(
            site, "global", kind, threads, addresses, size, "tile", clock, None, engine
        )
        for observer in self.wave.observers:
            observer.memory(event)


def _of(value: Any, position: int) -> int:
    return int(value) if np.ndim(value) == 0 else int(value[position])


def _signed(coordinate: int) -> int:
    return coordinate - (1 << 32) if coordinate >> 31 else coordinate
