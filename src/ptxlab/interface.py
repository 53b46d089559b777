"""The emulator's interface: events, the observer protocol, findings, the result.

Terms that all events use:
- thread: its flat number in the launch, ``cta * threads_per_cta + tid``.
- cta: its flat number in the grid, ``x + grid_x * (y + grid_y * z)``.
- tid: a thread's flat number within its CTA; 32 consecutive tids are a warp.
- clock: a count that grows with every event of a launch. Events of one thread are in program order.
  Between events of different threads, clocks only show the order in which the emulator ran the
  threads.
- site: the instruction, with its PTX line and CUDA source line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.ptx.syntax import Instruction


@dataclass(frozen=True, slots=True)
class Site:
    """The location of an instruction. ``source`` is ``file:line`` or empty without line info.

    ``caller`` is the line from which the function in ``source`` was called and inlined, or empty.
    If that line is not in the kernel itself, the kernel's line follows it.
    """

    index: int
    mnemonic: str
    ptx_line: int
    source: str
    caller: str = ""

    @staticmethod
    def of(instruction: Instruction) -> Site:
        """Returns the site of a parsed instruction."""
        location = instruction.location
        caller = ""
        if location is not None and location.inlined_at is not None:
            caller, kernel = str(location.inlined_at), str(location.outermost)
            caller += "" if caller == kernel else f", from {kernel}"
        return Site(
            instruction.index,
            instruction.mnemonic,
            instruction.ptx_line,
            instruction.source,
            caller,
        )

    def __str__(self) -> str:
        caller = f" called from {self.caller}" if self.caller else ""
        where = f"{self.source}{caller}, " if self.source else ""
        return f"{where}PTX line {self.ptx_line}: {self.mnemonic}"


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """The accesses of one instruction, one for each active thread.

    - ``space``: ``shared``, ``global`` or ``local``.
    - ``kind``: ``read``, ``write``, ``atomic``, ``async_read`` (the source of a cp.async, at its
      issue) or ``async_write`` (its destination, at its issue: the data have not arrived yet). For
      global memory, a bulk store is an ``async_write`` and a bulk reduction an ``async_atomic``,
      both at their issue. The ``engine`` writes the data before a thread's wait for it returns.
    - ``addresses``: byte addresses, int64. In shared memory they count from 0 within the CTA's
      memory. In local memory they count from 0 within the thread's memory. In global memory they
      are host addresses.
    - ``sizes``: bytes per thread; an int, or an int64 array if threads differ.
    - ``shape``: ``plain`` is one contiguous range of bytes per thread. ``matrix`` is ldmatrix or
      stmatrix: each entry is one 16-byte row, at the address that this thread gives; the row's data
      belong to the whole warp. A phase consists of eight rows. For x1 and x2, only the lanes whose
      addresses are used are listed. ``tile`` is a bulk copy: the entries are the rows of its box,
      and one thread has issued all of them.
    - ``ctas``: for each thread, the flat number of the CTA that owns the shared memory; None: the
      thread's own CTA.
    - ``order``, for global memory: ``relaxed`` (also for a volatile access), ``acquire``,
      ``release``, ``acq_rel``, or empty for a weak access.
    - ``scope``: ``cta``, ``cluster``, ``gpu`` or ``sys``. Atomics are listed in the order in which
      they are executed.

    The event is sent before the access is executed. A bad address is an error unless an observer
    handles it.
    """

    site: Site
    space: str
    kind: str
    threads: np.ndarray
    addresses: np.ndarray
    sizes: int | np.ndarray
    shape: str
    clock: int
    ctas: np.ndarray | None = None
    engine: Engine | None = None
    order: str = ""
    scope: str = ""


@dataclass(frozen=True, slots=True)
class AsyncGroupEvent:
    """cp.async.commit_group (``kind`` "commit"), or a wait ("wait") after which ``allowed`` groups
    may be pending.

    For cp.async.wait_all ``allowed`` is -1; this also waits for copies that are not committed.
    """

    site: Site
    kind: str
    threads: np.ndarray
    allowed: int
    clock: int


@dataclass(frozen=True, slots=True)
class AsyncLanding:
    """The data of a cp.async became visible to the issuing threads; ``issued`` is the site of the
    copy."""

    site: Site
    issued: Site
    threads: np.ndarray
    addresses: np.ndarray
    sizes: int | np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class BarrierEvent:
    """An event of a CTA barrier: threads arrive (``kind`` "arrive"), or the barrier opens for them
    ("release").

    ``barrier`` is the barrier's number, ``expected`` the number of threads per CTA that take part.
    A release names all threads that took part. They may be of several CTAs, whose barriers opened
    together. Each of these threads had an arrive event before.
    """

    site: Site
    kind: str
    barrier: int
    expected: int
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class WarpSync:
    """bar.warp.sync: orders the memory accesses of the named threads of one warp."""

    site: Site
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class Engine:
    """A unit that works asynchronously from the threads, in the async proxy.

    ``kind`` and ``number`` identify it within ``cta`` (flat):
    - ``mbarrier`` and its address: bulk copies that complete on it.
    - ``warpgroup`` and its number: wgmma.
    - ``bulk`` and a warp: the shared-memory reads of bulk copies in bulk groups.
    - ``bulk write`` and a warp: the global-memory writes of bulk copies in bulk groups.
    """

    kind: str
    cta: int
    number: int

    def __str__(self) -> str:
        if self.kind == "warpgroup":
            return f"the wgmma of CTA {self.cta} warpgroup {self.number}"
        if self.kind in ("bulk", "bulk write"):
            return f"the bulk copies of CTA {self.cta} warp {self.number}"
        return f"the bulk copies for the mbarrier at {self.number} of CTA {self.cta}"


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """The issue of an engine's read (``kind`` "read") or write of one CTA's shared memory.

    All of ``threads`` issued the access together. ``cta`` (flat) owns the memory. ``addresses`` are
    the start addresses of parts of ``size`` bytes each. The access happens at any time between this
    event and EngineDone.
    """

    site: Site
    engine: Engine
    kind: str
    threads: np.ndarray
    cta: int
    addresses: np.ndarray
    size: int
    clock: int


@dataclass(frozen=True, slots=True)
class EngineLanding:
    """The data of a write, which was issued to an engine at clock ``issued``, have reached
    memory."""

    engine: Engine
    issued_at: Site
    cta: int
    addresses: np.ndarray
    size: int
    issued: int
    clock: int


@dataclass(frozen=True, slots=True)
class EngineDone:
    """The ``threads`` have waited for all work that an engine was given up to clock ``issued``."""

    site: Site
    engine: Engine
    threads: np.ndarray
    issued: int
    clock: int


@dataclass(frozen=True, slots=True)
class MbarrierEvent:
    """An event of the mbarriers at one address in one or several CTAs.

    ``ctas`` (flat) has one CTA for each thread.

    ``kind``:
    - "init" and "arrive";
    - "copy": a bulk copy is issued that will complete on the mbarrier;
    - "complete": a phase is over in ``ctas``. This event has no threads. For each CTA, ``landed``
      is the clock up to which bulk copies have arrived;
    - "wait": threads have observed the end of a phase.
    """

    site: Site
    kind: str
    threads: np.ndarray
    ctas: np.ndarray
    address: int
    clock: int
    landed: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class ClusterBarrierEvent:
    """barrier.cluster: "arrive", "relaxed" (an arrival that orders nothing) or "wait" (passed)."""

    site: Site
    kind: str
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class ProxyFence:
    """A proxy fence: the work that the threads have done or are ordered after becomes visible to
    engines."""

    site: Site
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class MemoryFence:
    """fence.acq_rel, fence.sc or membar of a ``scope`` (cta, cluster, gpu, sys)."""

    site: Site
    threads: np.ndarray
    scope: str
    clock: int


@dataclass(frozen=True, slots=True)
class GridWait:
    """griddepcontrol.wait: the previous launch has finished, and its writes are visible."""

    site: Site
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class GridAllow:
    """griddepcontrol.launch_dependents: the next launch may begin as soon as every CTA has executed
    this instruction or exited."""

    site: Site
    threads: np.ndarray
    clock: int


@dataclass(frozen=True, slots=True)
class Misuse:
    """An instruction breaks a rule of PTX; ``kind`` is the kind of the finding."""

    kind: str
    site: Site
    message: str
    threads: np.ndarray
    address: int
    clock: int


@dataclass(frozen=True)
class Clusters:
    """The clusters of a grid. CTAs are flat numbers, ``x + grid_x * (y + grid_y * z)``."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]

    @property
    def size(self) -> int:
        """The number of CTAs in a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def rank(self, cta: Any) -> Any:
        """Returns the rank of each CTA (an int or an array) in its cluster."""
        if self.size == 1:
            return cta * 0
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        return cta % gx % cx + cx * (cta // gx % gy % cy + cy * (cta // gx // gy % cz))

    def number(self, cta: Any) -> Any:
        """Returns the flat number of each CTA's cluster."""
        if self.size == 1:
            return cta
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        row = cta // gx % gy // cy + gy // cy * (cta // gx // gy // cz)
        return cta % gx // cx + gx // cx * row

    def peer(self, cta: Any, rank: Any) -> Any:
        """Returns the CTA that has this rank in the cluster of ``cta``; both are ints or arrays."""
        if self.size == 1:
            return cta + rank * 0
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        x = cta % gx // cx * cx + rank % cx
        y = cta // gx % gy // cy * cy + rank // cx % cy
        z = cta // gx // gy // cz * cz + rank // cx // cy
        return x + gx * (y + gy * z)


@dataclass(frozen=True)
class Launch:
    """A launch. Each CTA has ``shared_bytes`` of shared memory, which begins with static variables.

    ``programmatic``: the launch may begin before the previous launch has finished.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    static_shared_bytes: int
    shared_bytes: int
    memory: GlobalMemoryView
    programmatic: bool = False

    @property
    def cta_count(self) -> int:
        """The number of CTAs in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads_per_cta(self) -> int:
        """Threads of one CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def clusters(self) -> Clusters:
        """The clusters of the grid."""
        return Clusters(self.grid, self.cluster)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A registered range of host memory: half-open ``[begin, end)``, in bytes."""

    name: str
    begin: int
    end: int
    writable: bool


class GlobalMemoryView(ABC):
    """The ranges of global memory, the only part of it that observers can read."""

    @abstractmethod
    def ranges(self) -> Sequence[MemoryRange]:
        """Returns the registered ranges, ordered by address."""


class Observer:
    """Receives the events of one launch after another.

    Subclasses override the methods that they need.

    Without observers a launch sends no events, so they cost nothing. An observer appends what it
    finds to ``findings``; a finding never stops the launch.
    """

    #: Whether this observer reports bad addresses itself. If so, the emulator masks the access
    #: instead of raising EmulatorError: a read gives zero, and a write is dropped.
    handles_bad_access: bool = False

    #: Whether this observer reports instructions that break a rule. If so, the emulator continues
    #: as well as it can instead of raising EmulatorError.
    handles_misuse: bool = False

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def begin(self, launch: Launch) -> None:
        """Called once before the first instruction."""

    def wave(self, first_cta: int, cta_count: int) -> None:
        """Called when CTAs ``first_cta .. first_cta + cta_count - 1`` start; no other CTA is
        live."""

    def memory(self, event: MemoryAccess) -> None:
        """Called for a load, a store, an atomic, or the issue of an asynchronous copy."""

    def async_group(self, event: AsyncGroupEvent) -> None:
        """Called for a commit or wait of cp.async, before the landings that the wait causes."""

    def async_landing(self, event: AsyncLanding) -> None:
        """Called when the data of a cp.async land in shared memory."""

    def barrier(self, event: BarrierEvent) -> None:
        """Called when threads arrive at a CTA barrier, or the barrier opens."""

    def warp_sync(self, event: WarpSync) -> None:
        """Called for bar.warp.sync."""

    def engine_access(self, event: EngineAccess) -> None:
        """Called when a wgmma or bulk copy that will read or write shared memory is issued."""

    def engine_landing(self, event: EngineLanding) -> None:
        """Called when the data of a bulk copy have arrived in shared memory."""

    def engine_done(self, event: EngineDone) -> None:
        """Called for wgmma.wait_group, or cp.async.bulk.wait_group."""

    def mbarrier(self, event: MbarrierEvent) -> None:
        """Called for an operation of an mbarrier."""

    def cluster_barrier(self, event: ClusterBarrierEvent) -> None:
        """Called for barrier.cluster."""

    def proxy_fence(self, event: ProxyFence) -> None:
        """Called for fence.proxy.async and fence.mbarrier_init."""

    def memory_fence(self, event: MemoryFence) -> None:
        """Called for fence.acq_rel, fence.sc and membar."""

    def grid_wait(self, event: GridWait) -> None:
        """Called for griddepcontrol.wait."""

    def grid_allow(self, event: GridAllow) -> None:
        """Called for griddepcontrol.launch_dependents."""

    def misuse(self, event: Misuse) -> None:
        """Called when an instruction breaks a rule."""

    def end(self) -> None:
        """Called once after the last instruction; not called after an EmulatorError."""


@dataclass(frozen=True)
class Finding:
    """A mistake that a check found.

    ``source`` is ``file:line`` of the CUDA source (empty without line info). ``threads`` are some
    of the threads involved (flat numbers), ``address`` is one of the byte addresses, and ``count``
    is the number of occurrences.
    """

    kind: str
    message: str
    source: str
    ptx_line: int
    threads: tuple[int, ...] = ()
    address: int | None = None
    count: int = 1

    def __str__(self) -> str:
        where = self.source or f"PTX line {self.ptx_line}"
        return f"{where}: {self.kind}: {self.message}"


@dataclass
class EmulationResult:
    """The outcome of one launch, or of all launches of a plan.

    ``instructions`` maps each mnemonic to the number of warps that executed it.
    ``thread_instructions`` maps each mnemonic to the number of active threads in these warps.
    Threads that a guard masks count as active.
    """

    instructions: dict[str, int] = field(default_factory=dict)
    thread_instructions: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: EmulationResult) -> None:
        """Adds another launch's instruction counts to this one's."""
        for ours, theirs in (
            (self.instructions, other.instructions),
            (self.thread_instructions, other.thread_instructions),
        ):
            for mnemonic, times in theirs.items():
                ours[mnemonic] = ours.get(mnemonic, 0) + times

    @property
    def warp_instructions(self) -> int:
        """The sum of all warp instructions."""
        return sum(self.instructions.values())
