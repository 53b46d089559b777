"""A group: threads that share one program counter, and their pending asynchronous copies.

A launch starts with one group of all threads of a wave. A divergent branch forks it into two that
run as coroutines of their own and join at the branch's immediate post-dominator. Nothing assumes
one program counter per grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsmith.emulator.interface import Site
from flashsmith.errors import EmulatorError

WARP = 32
u4 = np.uint32


class Undefined:
    """Content of a register that nothing has written."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED = Undefined()


@dataclass(slots=True)
class AsyncCopy:
    """A cp.async on its way: 16-, 8- or 4-byte words for flat places in shared memory.

    ``whole`` is the copy that this one is a part of; None when it is whole itself.
    """

    issued: Site
    size: int
    threads: np.ndarray
    places: np.ndarray
    addresses: np.ndarray
    words: np.ndarray
    whole: AsyncCopy | None = None

    def part(self, keep: np.ndarray) -> AsyncCopy:
        """The copy of the threads that ``keep`` marks, by wave thread number."""
        return self._at(np.flatnonzero(keep[self.threads]))

    def _at(self, chosen: np.ndarray) -> AsyncCopy:
        return AsyncCopy(
            self.issued,
            self.size,
            self.threads[chosen],
            self.places[chosen],
            self.addresses[chosen],
            self.words[chosen],
            self.whole or self,
        )

    @staticmethod
    def reunite(copies: list[AsyncCopy]) -> list[AsyncCopy]:
        """The same with parts of one copy made one again.

        Else every fork and join under a pending copy would double its parts.
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
    # Some threads' parts have landed meanwhile: the others', in the order of the whole.
    return whole._at(np.flatnonzero(np.isin(whole.threads, threads)))


class Group:
    """Threads at one program counter. ``index`` holds wave thread numbers, ascending (int64)."""

    def __init__(self, grid: Geometry, index: np.ndarray) -> None:
        self.geometry = grid
        self.index = index
        self.n = len(index)
        self.warp = grid.warp(index)
        self.warps = int(np.count_nonzero(np.diff(self.warp, prepend=-1)))
        self.whole = grid.threads_per_cta % WARP == 0 and self.warps * WARP == self.n
        self.cta = index // grid.threads_per_cta
        self.shared_base = self.cta * grid.shared_pitch
        self.local_base = index * grid.local_pitch
        #: cp.async groups that were committed and not waited for, oldest first, and copies not
        #: committed.
        self.committed: list[list[AsyncCopy]] = []
        self.open: list[AsyncCopy] = []
        self._special: dict[str, Any] = {}
        self._shuffles: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}

    @property
    def threads(self) -> np.ndarray:
        """Flat thread numbers in the launch."""
        return self.index + self.geometry.first_thread

    def special(self, name: str) -> Any:
        """A special register: an array over the group, or a NumPy scalar where it is uniform."""
        if name not in self._special:
            self._special[name] = self.geometry.special(name, self.index)
        return self._special[name]

    def require_whole(self, mnemonic: str) -> None:
        """Instructions with ``.aligned`` semantics need all 32 lanes at this place."""
        if not self.whole:
            missing = WARP - self.n % WARP
            raise EmulatorError(
                f"{mnemonic} is executed by part of a warp ({missing} lanes are elsewhere or "
                f"have exited)"
            )

    # Forking and joining

    def split(self, mask: np.ndarray) -> tuple[Group, Group]:
        """Groups of the threads where ``mask`` holds and where it does not, copies included."""
        parts = []
        for chosen in (mask, ~mask):
            part = Group(self.geometry, self.index[chosen])
            if self.committed or self.open:
                keep = np.zeros(self.geometry.threads, np.bool_)
                keep[part.index] = True
                part.committed = [[c.part(keep) for c in copies] for copies in self.committed]
                part.open = [c.part(keep) for c in self.open]
            parts.append(part)
        return parts[0], parts[1]

    def absorb(self, parts: list[Group]) -> None:
        """Take back the copies of parts that come together again.

        Waits count from the newest committed group, so lists of unlike length align at their ends.
        """
        depth = max(len(part.committed) for part in parts)
        self.committed = [[] for _ in range(depth)]
        for part in parts:
            offset = depth - len(part.committed)
            for place, copies in enumerate(part.committed):
                self.committed[offset + place].extend(copies)
        self.committed = [AsyncCopy.reunite(copies) for copies in self.committed]
        self.open = AsyncCopy.reunite([copy for part in parts for copy in part.open])

    # Lanes

    def shuffle_source(self, mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
        """For uniform operands of shfl.sync: (place in the group to read from, in range).

        The place is -1 where the lane to read is not in this group.
        """
        key = (mode, b, c)
        if key not in self._shuffles:
            self._shuffles[key] = self.shuffle_source_varying(mode, u4(b), u4(c))
        return self._shuffles[key]

    def shuffle_source_varying(
        self, mode: str, b: np.ndarray, c: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same with operands of each thread's own (uint32 arrays or scalars)."""
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
        place = np.full(self.geometry.padded_threads, -1, np.int64)
        place[self.index] = np.arange(self.n)
        found = place[self.index - lane + source]
        beyond = tid - lane + source >= self.geometry.threads_per_cta
        return np.where(beyond, -1, found), good

    def ballot(self, predicate: Any) -> np.ndarray:
        """Per thread, the uint32 mask of its warp's lanes here where the predicate holds."""
        lane = self.index % self.geometry.threads_per_cta % WARP
        bits = np.broadcast_to(predicate, (self.n,)).astype(np.float64) * np.exp2(lane)
        return np.bincount(self.warp, weights=bits)[self.warp].astype(u4)

    def require_members(self, mnemonic: str, members: Any) -> None:
        """EmulatorError unless all lanes that a warp instruction names are at this place."""
        if self.whole:
            return
        here = self.ballot(np.bool_(True))
        missing = np.atleast_1d(members) & ~here & self.geometry.existing_lanes(self.index)
        if missing.any():
            raise EmulatorError(
                f"{mnemonic} waits for lanes {int(missing[missing != 0][0]):#010x} (mask), which "
                f"are elsewhere or have exited"
            )


@dataclass(eq=False)
class Geometry:
    """Shape of a wave: which CTAs it holds and how big their memories are."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    first_cta: int
    ctas: int
    dynamic_shared: int
    #: Bytes from one CTA's (thread's) shared (local) memory to the next; the wave sets them.
    shared_pitch: int = 0
    local_pitch: int = 0
    threads_per_cta: int = field(init=False)
    threads: int = field(init=False)
    padded_threads: int = field(init=False)
    first_thread: int = field(init=False)

    def __post_init__(self) -> None:
        x, y, z = self.block
        self.threads_per_cta = x * y * z
        self.threads = self.threads_per_cta * self.ctas
        self.padded_threads = self.threads + WARP
        self.first_thread = self.first_cta * self.threads_per_cta

    def warp(self, index: np.ndarray) -> np.ndarray:
        """Wave-wide warp numbers of wave threads."""
        if self.threads_per_cta % WARP == 0:
            return index // WARP
        per_cta = -(-self.threads_per_cta // WARP)
        cta, tid = np.divmod(index, self.threads_per_cta)
        return cta * per_cta + tid // WARP

    def existing_lanes(self, index: np.ndarray) -> np.ndarray:
        """Per thread, the mask of lanes that its warp has: the last warp of a CTA may be short."""
        tid = index % self.threads_per_cta
        count = np.minimum(self.threads_per_cta - tid // WARP * WARP, WARP)
        return ((np.int64(1) << count) - 1).astype(u4)

    def special(self, name: str, index: np.ndarray) -> Any:
        """Value of a special register for wave threads ``index``."""
        base, _, axis = name[1:].partition(".")
        number = "xyz".find(axis) if axis else -1
        if base in _SHAPES:
            return u4(_SHAPES[base](self)[number])
        if base == "tid":
            return _coordinate(index % self.threads_per_cta, self.block, number)
        cta = index // self.threads_per_cta + self.first_cta
        if base == "ctaid":
            return _coordinate(cta, self.grid, number)
        if base in ("clusterid", "cluster_ctaid"):
            place = _coordinate(cta, self.grid, number)
            size = u4(self.cluster[number])
            return place // size if base == "clusterid" else place % size
        if base == "cluster_ctarank":
            rank = u4(0)
            for axis_number in (2, 1, 0):
                size = u4(self.cluster[axis_number])
                rank = rank * size + _coordinate(cta, self.grid, axis_number) % size
            return rank
        if base in _SCALARS:
            return _SCALARS[base](self)
        lane = (index % self.threads_per_cta) % WARP
        if base == "laneid":
            return lane.astype(u4)
        if base == "warpid":
            return ((index % self.threads_per_cta) // WARP).astype(u4)
        if base == "smid":
            return cta.astype(u4)
        if base.startswith("lanemask_"):
            return _LANE_MASKS[base[-2:]](lane).astype(u4)
        raise EmulatorError(f"special register {name} is not supported")


_SHAPES: dict[str, Callable[[Geometry], tuple[int, int, int]]] = {
    "ntid": lambda g: g.block,
    "nctaid": lambda g: g.grid,
    "cluster_nctaid": lambda g: g.cluster,
    "nclusterid": lambda g: (
        g.grid[0] // g.cluster[0],
        g.grid[1] // g.cluster[1],
        g.grid[2] // g.cluster[2],
    ),
}
_SCALARS: dict[str, Callable[[Geometry], Any]] = {
    "cluster_nctarank": lambda g: u4(g.cluster[0] * g.cluster[1] * g.cluster[2]),
    "is_explicit_cluster": lambda g: np.bool_(g.cluster != (1, 1, 1)),
    "nwarpid": lambda g: u4(-(-g.threads_per_cta // WARP)),
    "nsmid": lambda g: u4(g.grid[0] * g.grid[1] * g.grid[2]),
    "gridid": lambda g: np.uint64(0),
    "dynamic_smem_size": lambda g: u4(g.dynamic_shared),
    "total_smem_size": lambda g: u4(g.shared_pitch),
    # Time stands still: a kernel must not depend on it.
    "clock": lambda g: u4(0),
    "clock64": lambda g: np.uint64(0),
    "globaltimer": lambda g: np.uint64(0),
}
_ONE = np.int64(1)
_ALL = np.int64(0xFFFFFFFF)
_LANE_MASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "eq": lambda lane: _ONE << lane,
    "lt": lambda lane: (_ONE << lane) - 1,
    "le": lambda lane: (_ONE << (lane + 1)) - 1,
    "gt": lambda lane: _ALL & ~((_ONE << (lane + 1)) - 1),
    "ge": lambda lane: _ALL & ~((_ONE << lane) - 1),
}


def _coordinate(flat: np.ndarray, shape: tuple[int, int, int], axis: int) -> Any:
    if shape[axis] == 1:
        return u4(0)
    before = 1
    for extent in shape[:axis]:
        before *= extent
    value = (flat // before) % shape[axis]
    if value[0] == value[-1] and (value == value[0]).all():
        return u4(value[0])
    return value.astype(u4)


def slice_values(values: tuple[Any, ...], places: np.ndarray) -> tuple[Any, ...]:
    """Registers of the threads at ``places``; uniform ones stay scalars."""
    return tuple(v[places] if isinstance(v, np.ndarray) else v for v in values)


class Fork:
    """Two (or more) parts of a group that run on their own, and how they come together again."""

    def __init__(self, group: Group, stop: int) -> None:
        self.group, self.stop = group, stop
        self.parts: list[Group] = []
        self.places: list[np.ndarray] = []
        self.starts: list[int] = []
        self.values: list[tuple[Any, ...] | None] = []
        self.runs: list[bool] = []
        self.waits: list[Any] = []

    def add(
        self,
        part: Group,
        mask: np.ndarray,
        start: int,
        values: tuple[Any, ...],
        *,
        runs: bool = True,
        wait: Any = None,
    ) -> None:
        """One part: it begins at node ``start`` with these live registers of the whole group.

        A part that does not run has nothing to do until the join: the parent's registers are its
        result. ``wait`` is what the scheduler must see happen before the part starts.
        """
        places = np.flatnonzero(mask)
        self.parts.append(part)
        self.places.append(places)
        self.starts.append(start)
        self.runs.append(runs)
        self.waits.append(wait)
        self.values.append(slice_values(values, places) if runs else None)

    def join(self, positions: tuple[int, ...], current: tuple[Any, ...]) -> tuple[Any, ...]:
        """Merge registers: ``positions`` in the join's live-in order, ``current`` old values."""
        self.group.absorb(self.parts)
        return tuple(
            self._merge(position, old) for position, old in zip(positions, current, strict=True)
        )

    def rejoin(self) -> tuple[Any, ...]:
        """Merge everything live at the join, of parts that all ran."""
        width = len(self.values[0] or ())
        return self.join(tuple(range(width)), (UNDEFINED,) * width)

    def _merge(self, position: int, old: Any) -> Any:
        pieces = []
        for number, values in enumerate(self.values):
            if values is not None:
                pieces.append(values[position])
            elif isinstance(old, np.ndarray):
                pieces.append(old[self.places[number]])
            else:
                pieces.append(old)
        defined = [piece for piece in pieces if piece is not UNDEFINED]
        if not defined:
            return UNDEFINED
        first = defined[0]
        if len(defined) == len(pieces) and all(
            piece.ndim == 0 and piece.tobytes() == first.tobytes() for piece in pieces
        ):
            return first
        merged = np.empty(self.group.n, first.dtype)
        merged.view(np.uint8)[:] = 0xFF if first.dtype != np.bool_ else 0
        for places, piece in zip(self.places, pieces, strict=True):
            if piece is not UNDEFINED:
                merged[places] = piece
        return merged
