"""What generated code calls: memories of a wave of CTAs, asynchronous copies, barriers, votes.

Observers are served here too. In code translated without observers ``see`` is never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsmith.emulator.fork import UNDEFINED, Fork
from flashsmith.emulator.fragments import matrix_rows_to_registers, registers_to_matrix_rows
from flashsmith.emulator.geometry import WARP, Geometry
from flashsmith.emulator.group import AsyncCopy, Group
from flashsmith.emulator.interface import (
    AsyncGroupEvent,
    AsyncLanding,
    BarrierEvent,
    MemoryAccess,
    Observer,
    Site,
    WarpSync,
)
from flashsmith.emulator.memory import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    WORDS,
    BankedMemory,
    GlobalMemory,
    generic_space,
)
from flashsmith.emulator.numeric import select
from flashsmith.emulator.scheduler import Scheduler, Wait
from flashsmith.errors import EmulatorError

u4 = np.uint32

#: Backward jumps between two turns of other groups: spin loops must not starve those they wait for.
_TURN = 64


@dataclass(frozen=True, slots=True)
class RowBase:
    """Places of 16-byte rows in shared memory, their byte addresses, and all those or-ed."""

    places: np.ndarray
    addresses: np.ndarray
    bits: int


class Wave:
    """CTAs that run together, with everything they touch."""

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
        self.scheduler: Scheduler
        #: Backward jumps left before a launch counts as endless.
        self.loops_left = 0
        self.counts: list[int] = []
        self.thread_counts: list[int] = []
        self.parameters: dict[str, np.ndarray] = {}
        self.parameter_address = np.uint64(0)
        self.symbols: dict[str, np.uint64] = {}

    # Observation

    def tick(self) -> int:
        """The next event's clock."""
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
    ) -> Any:
        """Show an access to the observers; the mask under which it may then happen.

        For the shape "matrix" ``sizes`` is how many lanes of a warp give row addresses.
        """
        places = _places(group, mask)
        flat = np.broadcast_to(addresses, (group.n,)).astype(np.int64)[places]
        sizes = sizes if np.ndim(sizes) == 0 else np.asarray(sizes)[places].astype(np.int64)
        if space == "generic":
            space, flat = self.resolve(flat)
        if shape == "matrix":
            lanes = group.index[places] % WARP < sizes
            places, flat, sizes = places[lanes], flat[lanes], 16
        if flat.size == 0:
            return mask
        threads = group.index[places] + self.geometry.first_thread
        event = MemoryAccess(site, space, kind, threads, flat, sizes, shape, self.tick())
        for observer in self.observers:
            observer.memory(event)
        if not self.masks_bad_access:
            return mask
        good = self._good(space, flat, sizes, write=kind in ("write", "atomic"))
        if good.all():
            return mask
        allowed = np.ones(group.n, np.bool_) if mask is None else np.broadcast_to(mask, group.n)
        allowed = allowed.copy()
        allowed[places[~good]] = False
        return allowed

    def _good(self, space: str, addresses: np.ndarray, sizes: Any, *, write: bool) -> np.ndarray:
        if space == "global":
            inside = self.memory.inside(addresses, sizes, write=write)
        else:
            bank = self.shared if space == "shared" else self.local
            inside = bank.inside(addresses, sizes)
        return inside & (addresses & (np.maximum(sizes, 1) - 1) == 0)

    def resolve(self, addresses: Any) -> tuple[str, Any]:
        """State space and address within it of generic addresses."""
        space = generic_space(addresses)
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0}[space]
        return space, addresses - np.int64(window)

    # Loads and stores. Addresses are unsigned 32-bit or signed 64-bit, arrays or scalars.

    def load(self, group: Group, space: str, addresses: Any, size: int, mask: Any) -> Any:
        """Words of ``size`` bytes: an array over the group, a scalar for a uniform global address.

        Threads that ``mask`` switches off get zeros.
        """
        if mask is None:
            return self._load(group, space, addresses, size, None)
        places = _places(group, mask)
        out = np.zeros(group.n, WORDS[size])
        if places.size:
            chosen = np.broadcast_to(addresses, (group.n,))[places]
            out[places] = self._load(group, space, chosen, size, places)
        return out

    def _load(self, group: Group, space: str, addresses: Any, size: int, places: Any) -> Any:
        if space == "generic":
            space, addresses = self.resolve(addresses)
        if space == "global":
            return self.memory.load(addresses, size)
        bank, base = self._bank(group, space, places)
        bank.check(addresses, size, size)
        return bank.views[size][(base + addresses) >> (size.bit_length() - 1)]

    def store(
        self, group: Group, space: str, addresses: Any, size: int, values: Any, mask: Any
    ) -> None:
        """Write words of ``size`` bytes for the threads that ``mask`` leaves on."""
        places = None
        if mask is not None:
            places = _places(group, mask)
            if not places.size:
                return
            addresses = np.broadcast_to(addresses, (group.n,))[places]
            values = np.broadcast_to(values, (group.n,))[places]
        if space == "generic":
            space, addresses = self.resolve(addresses)
        if space == "global":
            # A uniform address leaves one place: the last thread's value stays in it.
            if np.ndim(addresses) == 0 and np.ndim(values):
                values = values[-1]
            self.memory.store(addresses, size, values)
            return
        bank, base = self._bank(group, space, places)
        bank.check(addresses, size, size)
        bank.views[size][(base + addresses) >> (size.bit_length() - 1)] = values

    def _bank(self, group: Group, space: str, places: Any) -> tuple[BankedMemory, np.ndarray]:
        bank = self.shared if space == "shared" else self.local
        base = group.shared_base if space == "shared" else group.local_base
        return bank, base if places is None else base[places]

    def atomic(
        self, group: Group, space: str, addresses: Any, operation: Any, values: Any, mask: Any
    ) -> np.ndarray:
        """Read-modify-write, one thread after the other; the old values."""
        places = _places(group, mask)
        flat = np.broadcast_to(addresses, (group.n,))
        values = tuple(np.broadcast_to(value, (group.n,)) for value in values)
        dtype = values[0].dtype
        old = np.zeros(group.n, dtype)
        word = WORDS[dtype.itemsize]
        for place in places:
            one = np.array([place])
            keep = np.zeros(group.n, np.bool_)
            keep[place] = True
            current = self._load(group, space, flat[one], dtype.itemsize, one).view(dtype)
            old[place] = current[0]
            new = np.asarray(operation(current, *(value[one] for value in values)), dtype)
            spread = np.broadcast_to(new.view(word), (group.n,))
            self.store(group, space, flat, dtype.itemsize, spread, keep)
        return old

    # Matrices

    def load_matrix(
        self, group: Group, addresses: Any, count: int, transpose: bool, mask: Any
    ) -> np.ndarray:
        """ldmatrix: uint32 registers (count, threads)."""
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
        """Checked 16-byte places of a base address, for matrices at fixed offsets from it."""
        group.require_whole("ldmatrix")
        if addresses.ndim == 0:
            addresses = np.broadcast_to(addresses, (group.n,))
        return RowBase(
            (group.shared_base + addresses) >> 4, addresses, int(np.bitwise_or.reduce(addresses))
        )

    def load_rows(self, group: Group, base: RowBase, offset: int, transpose: bool) -> np.ndarray:
        """ldmatrix.x4 at ``base + offset``: uint32 registers (4, threads)."""
        bits = base.bits
        if offset < 0 or bits + offset + 16 > self.shared.size or (bits | offset) & 15:
            self.shared.check(base.addresses.astype(np.int64) + offset, 16, 16)
        places = base.places + (offset >> 4) if offset else base.places
        return matrix_rows_to_registers(self.shared.views[16].take(places), 4, transpose)

    def store_matrix(
        self, group: Group, addresses: Any, values: Sequence[Any], transpose: bool, mask: Any
    ) -> None:
        """stmatrix of as many matrices as there are registers."""
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
        """cp.async: the data are read now and land at the wait that covers them.

        ``source_size`` (None: all) bytes are read, the rest of the destination becomes zero.
        """
        target, source = _spread(target, group.n), _spread(source, group.n)
        index, base = group.index, group.shared_base
        if mask is not None:
            places = _places(group, mask)
            if not places.size:
                return
            target, source, index, base = (
                target[places],
                source[places],
                index[places],
                base[places],
            )
        self.shared.check(target, size, size)
        if source_size is None:
            words = self.memory.load(source, size)
        else:
            limit = _spread(source_size, group.n).astype(np.int64)
            words = self._short_words(source, size, limit if mask is None else limit[places])
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
        """cp.async.commit_group."""
        if self.observers:
            event = AsyncGroupEvent(site, "commit", group.threads, 0, self.tick())
            for observer in self.observers:
                observer.async_group(event)
        group.committed.append(group.open)
        group.open = []

    def wait_async(self, group: Group, site: Site, allowed: int) -> None:
        """cp.async.wait_group, or with -1 wait_all: the last moment for the data to land."""
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
            self.shared.views[copy.size][copy.places] = copy.words
            if self.observers and copy.threads.size:
                threads = copy.threads + self.geometry.first_thread
                addresses = copy.addresses.astype(np.int64)
                landing = AsyncLanding(
                    site, copy.issued, threads, addresses, copy.size, self.tick()
                )
                for observer in self.observers:
                    observer.async_landing(landing)

    # Barriers, exits, forks

    def barrier(
        self, group: Group, site: Site, number: Any, expected: Any, blocks: bool
    ) -> Wait | None:
        """bar.sync, or bar.arrive when not ``blocks``: None when the group may go on at once."""
        which = _uniform(number, "barrier number")
        count = None if expected is None else _uniform(expected, "barrier thread count")
        if self.observers:
            wanted = self.geometry.threads_per_cta if count is None else count
            self._tell_barrier(site, "arrive", which, wanted, group.index)
        elif count is None and group.n == self.scheduler.live_total:
            return None
        return self.scheduler.arrive(group, site, which, count, blocks=blocks)

    def released(self, site: Site, number: int, expected: int, index: np.ndarray) -> None:
        """The scheduler opened a barrier."""
        if self.observers:
            self._tell_barrier(site, "release", number, expected, index)

    def _tell_barrier(
        self, site: Site, kind: str, number: int, expected: int, index: np.ndarray
    ) -> None:
        threads = index + self.geometry.first_thread
        event = BarrierEvent(site, kind, number, expected, threads, self.tick())
        for observer in self.observers:
            observer.barrier(event)

    def warp_sync(self, group: Group, site: Site, members: Any) -> None:
        """bar.warp.sync."""
        group.require_members("bar.warp.sync", members)
        if self.observers:
            event = WarpSync(site, group.threads, self.tick())
            for observer in self.observers:
                observer.warp_sync(event)

    def exited(self, group: Group) -> None:
        """All threads of a group have returned."""
        self.scheduler.exited(group)

    def fork(
        self,
        group: Group,
        taken: np.ndarray,
        target: int,
        target_values: tuple[Any, ...],
        following: int,
        following_values: tuple[Any, ...],
        stop: int,
    ) -> Fork:
        """A divergent branch: threads where ``taken`` holds go to ``target``, the others on."""
        fork = Fork(group, stop)
        yes, no = group.split(taken)
        fork.add(
            yes, taken, target, target_values, runs=target != stop or stop == self.scheduler.exit
        )
        fork.add(
            no,
            ~taken,
            following,
            following_values,
            runs=following != stop or stop == self.scheduler.exit,
        )
        return fork

    def part(
        self,
        group: Group,
        passed: np.ndarray,
        following: int,
        values: tuple[Any, ...],
        stop: int,
        wait: Wait,
    ) -> Fork:
        """Only the threads in ``passed`` may go on behind a barrier; the others keep waiting."""
        fork = Fork(group, stop)
        go, stay = group.split(passed)
        fork.add(go, passed, following, values)
        still = Wait(stay, wait.site, wait.barrier, wait.targets)
        fork.add(stay, ~passed, following, values, wait=still)
        return fork

    def looped(self) -> bool:
        """A group jumps backwards; whether it should let others have a turn now and then."""
        self.loops_left -= 1
        if self.loops_left < 0:
            raise EmulatorError("endless loop: the limit on backward jumps is used up")
        return self.loops_left % _TURN == 0

    def trapped(self, group: Group) -> None:
        """trap."""
        raise EmulatorError(f"trap reached by thread {int(group.threads[0])}")

    def called(self, group: Group, name: str) -> None:
        """A call: only assertions and printf leave one in a kernel."""
        raise EmulatorError(
            f"thread {int(group.threads[0])} calls {name}; device functions are not emulated"
        )

    def written(self, value: Any, register: str) -> Any:
        """Read a register that some path leaves unwritten."""
        if value is UNDEFINED:
            raise EmulatorError(f"register {register} is read before it is written")
        return value

    def first_select(self, predicate: Any, value: Any, old: Any) -> Any:
        """A guarded write to a register that may be unwritten: other threads hold all ones."""
        if old is UNDEFINED:
            raw = np.full(value.dtype.itemsize, 0xFF, np.uint8)
            old = np.bool_(False) if value.dtype == np.bool_ else raw.view(value.dtype)[0]
        return select(predicate, value, old)

    # Lanes

    def shuffle(
        self, group: Group, mode: str, value: Any, b: Any, c: Any, members: Any
    ) -> tuple[Any, Any]:
        """shfl.sync: (value from the other lane, in range). A lane not here gives all ones."""
        group.require_members("shfl.sync", members)
        if b.ndim or c.ndim:
            source, good = group.shuffle_source_varying(mode, b, c)
        else:
            source, good = group.shuffle_source(mode, int(b), int(c))
        if value.ndim == 0:
            value = np.full(group.n, value)
        if group.whole:
            return value.take(source), good
        return np.where(source < 0, u4(0xFFFFFFFF), value[source]), good

    def vote(self, group: Group, mode: str, predicate: Any, members: Any) -> Any:
        """vote.sync in mode all, any, uni or ballot."""
        group.require_members("vote.sync", members)
        mask = group.ballot(predicate)
        if mode == "ballot":
            return mask
        full = group.ballot(np.bool_(True))
        if mode == "any":
            return mask != 0
        if mode == "all":
            return mask == full
        return (mask == 0) | (mask == full)

    def elect(self, group: Group, members: Any) -> Any:
        """elect.sync: per thread, the lowest lane of its warp among the members here."""
        group.require_members("elect.sync", members)
        mask = (group.ballot(np.bool_(True)) & members).astype(np.int64)
        lowest = mask & -mask
        return np.log2(lowest.astype(np.float64)).astype(u4)

    def reduce(self, group: Group, operation: Any, value: Any, members: Any) -> Any:
        """redux.sync over each warp's lanes here."""
        group.require_members("redux.sync", members)
        value = np.broadcast_to(value, (group.n,))
        starts = np.flatnonzero(np.diff(group.warp, prepend=-1))
        totals = operation.reduceat(value, starts, dtype=value.dtype)
        return np.repeat(totals, np.diff(np.append(starts, group.n)))


def taken(predicate: Any) -> int:
    """Whether a branch is taken: 1 by all, 0 by none, -1 by some."""
    if predicate.ndim == 0:
        return 1 if predicate else 0
    count = np.count_nonzero(predicate)
    if count == 0:
        return 0
    return 1 if count == predicate.size else -1


def _places(group: Group, mask: Any) -> np.ndarray:
    if mask is None:
        return np.arange(group.n)
    return np.flatnonzero(np.broadcast_to(mask, (group.n,)))


def _spread(value: Any, threads: int) -> np.ndarray:
    """A value of every thread, a uniform one spread out."""
    return value if value.ndim else np.broadcast_to(value, (threads,))


def _uniform(value: Any, what: str) -> int:
    if np.ndim(value) == 0:
        return int(value)
    if (value != value[0]).any():
        raise EmulatorError(f"{what} differs between threads that arrive together")
    return int(value[0])
