"""The interface for generated code: memories, barriers and forks of a wave, and data exchange
between lanes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.interface import (
    BarrierEvent,
    GridAllow,
    GridWait,
    MemoryFence,
    Misuse,
    Observer,
    ProxyFence,
    Site,
    WarpSync,
)
from ptxlab.machine.barriers import BarrierWait, ClusterBarrier, NamedBarriers
from ptxlab.machine.bulk_copies import BulkCopies
from ptxlab.machine.divergence import UNDEFINED, Fork, Split
from ptxlab.machine.geometry import WARP, Geometry
from ptxlab.machine.group import Group
from ptxlab.machine.mbarriers import Mbarriers
from ptxlab.machine.memory import GlobalMemory
from ptxlab.machine.memory_waits import MemoryWait
from ptxlab.machine.numeric import select
from ptxlab.machine.polls import Poll
from ptxlab.machine.random_schedule import RandomSchedule
from ptxlab.machine.register_pool import RegisterPool
from ptxlab.machine.scheduler import Scheduler
from ptxlab.machine.tensor_cores import TensorCore
from ptxlab.machine.waits import Wait
from ptxlab.machine.warpgroup_mma import WgmmaPipe
from ptxlab.machine.wave_memory import WaveMemory

u4 = np.uint32

#: After this many backward jumps a group lets other groups run; otherwise a group in a spin loop
#: would starve the groups for which it waits.
_TURN = 64


class Wave(WaveMemory):
    """CTAs that run together."""

    def __init__(
        self,
        geometry: Geometry,
        memory: GlobalMemory,
        shared_bytes: int,
        local_bytes: int,
        observers: Sequence[Observer],
    ) -> None:
        super().__init__(geometry, memory, shared_bytes, local_bytes, observers)
        self.scheduler: Scheduler
        self.barriers = NamedBarriers(geometry, self._released)
        self.cluster_barrier = ClusterBarrier(self)
        self.mbarriers = Mbarriers(self)
        self.bulk = BulkCopies(self, self.mbarriers)
        self.wgmma = WgmmaPipe(self)
        self.registers = RegisterPool(self)
        #: The tensor cores whose rounding mma and wgmma follow; None: float32 sums in any order.
        self.tensor_core: TensorCore | None = None
        #: The number of CTAs of the launch that start after this wave.
        self.ctas_to_come = 0
        #: The number of backward jumps that remain before the launch counts as an endless loop.
        self.loops_left = 0
        #: How often each node was entered by warps, and by threads; all waves of a launch share the
        #: counts.
        self.counts: list[int] = []
        self.thread_counts: list[int] = []
        #: The instruction of each line of generated code.
        self.line_sites: dict[int, Site] = {}
        self.parameters: dict[str, np.ndarray] = {}
        self.parameter_address = np.uint64(0)
        self.symbols: dict[str, np.uint64] = {}

    # Barriers, exits, forks

    def barrier(
        self, group: Group, site: Site, number: Any, expected: Any, blocks: bool, vote: Any = None
    ) -> BarrierWait | None:
        """Executes bar.sync, or bar.arrive if ``blocks`` is false.

        Returns None if the group may continue without waiting.

        For bar.red, ``vote`` is the predicate of each thread.
        """
        count = None if expected is None else _uniform(expected, "barrier thread count")
        if self.observers:
            wanted = self.geometry.threads_per_cta if count is None else count
            for which, index in _by_value(number, group.index):
                self._notify_barrier(site, "arrive", which, wanted, index)
        elif (
            count is None
            and vote is None
            and group.n == self.barriers.live_total
            and np.ndim(number) == 0
        ):
            return None
        return self.barriers.arrive(group, site, number, count, blocks=blocks, vote=vote)

    def _released(self, site: Site, number: int, expected: int, index: np.ndarray) -> None:
        """Called when a barrier opens."""
        self.scheduler.notify()
        if self.observers:
            self._notify_barrier(site, "release", number, expected, index)

    def _notify_barrier(
        self, site: Site, kind: str, number: int, expected: int, index: np.ndarray
    ) -> None:
        threads = index + self.geometry.first_thread
        event = BarrierEvent(site, kind, number, expected, threads, self.tick())
        for observer in self.observers:
            observer.barrier(event)

    def warp_sync(self, group: Group, site: Site, members: Any) -> None:
        """Executes bar.warp.sync."""
        group.require_members("bar.warp.sync", members)
        if self.observers:
            event = WarpSync(site, group.threads, self.tick())
            for observer in self.observers:
                observer.warp_sync(event)

    def exited(self, group: Group) -> None:
        """Called when all threads of a group have returned."""
        self.barriers.exited(group)
        self.cluster_barrier.exited(group)

    def fork(
        self,
        group: Group,
        site: Site | None,
        taken: np.ndarray,
        target: int,
        target_values: tuple[Any, ...],
        following: int,
        following_values: tuple[Any, ...],
        stop: int,
    ) -> Fork:
        """Forks a group at a divergent branch: the threads in ``taken`` go to ``target``, the
        others to ``following``. ``site`` is the branch."""
        fork = Fork(group, stop, site)
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
        again: int,
        values_again: tuple[Any, ...],
        wait: Wait | None,
    ) -> Split:
        """Splits a group at a wait, where only the threads in ``passed`` may continue.

        The others keep waiting. If ``wait`` is None they run node ``again``, which contains the
        wait.
        """
        return Split(group, passed, (following, values), (again, values_again), wait)

    def looped(self) -> bool:
        """Counts a backward jump. Returns whether the group should let other groups run now."""
        self.loops_left -= 1
        if self.loops_left < 0:
            raise EmulatorError("endless loop: the limit on backward jumps is reached")
        random = self.scheduler.random
        return self.loops_left % _TURN == 0 or (random is not None and random.random() < 0.5)

    def interrupted(self) -> bool:
        """Whether a group that reaches a wait lets other groups run before it tests the barrier."""
        random = self.scheduler.random
        return random is not None and random.interrupts_a_wait()

    def trapped(self, group: Group) -> None:
        """Executes trap."""
        raise EmulatorError(f"trap reached by thread {int(group.threads[0])}")

    def require_float_sums(self, what: str) -> None:
        """Raises EmulatorError if an instruction without float32 sums is executed with exact_mma.

        It is not known how tensor cores round such sums.
        """
        if self.tensor_core is not None:
            raise EmulatorError(f"{what} has no exact_mma; use .f32 sums, or leave exact_mma out")

    def called(self, group: Group, name: str) -> None:
        """Raises EmulatorError when a function without a body is called, such as assert, printf or
        malloc."""
        what = (
            "an assertion failed" if name == "__assertfail" else "only those it defines can be run"
        )
        raise EmulatorError(
            f"thread {int(group.threads[0])} calls {name}, which the PTX only declares: {what}"
        )

    def written(self, value: Any, register: str) -> Any:
        """Returns the value of a register that may be unwritten at this point; raises an error if
        it is."""
        if value is UNDEFINED:
            raise EmulatorError(f"register {register} is read before it is written")
        return value

    def first_select(self, predicate: Any, value: Any, old: Any) -> Any:
        """Makes a guarded write to a register that may be unwritten.

        Threads that the guard masks get all ones.
        """
        return select(predicate, value, self.or_poison(old, value.dtype))

    def or_poison(self, value: Any, held: Any) -> Any:
        """Returns ``value`` if it is defined; otherwise all ones of the type ``held``, or false for
        a predicate."""
        if value is not UNDEFINED:
            return value
        kind = np.dtype(np.bool_ if held == "b1" else held)
        if kind == np.bool_:
            return np.bool_(False)
        return np.full(kind.itemsize, 0xFF, np.uint8).view(kind)[0]

    # Rules

    def misuse(
        self, kind: str, site: Site, threads: np.ndarray, message: str, address: int = 0
    ) -> None:
        """Reports a broken rule: as a finding if an observer handles misuse, otherwise as an
        error."""
        takers = [observer for observer in self.observers if observer.handles_misuse]
        if not takers:
            raise EmulatorError(f"{kind}: {message}")
        event = Misuse(kind, site, message, threads, address, self.tick())
        for observer in takers:
            observer.misuse(event)

    def current_site(self) -> Site | None:
        """Returns the instruction that generated code is executing; used only for reports."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename.startswith("<emulated "):
                return self.line_sites.get(frame.f_lineno)
        return None

    def proxy_fence(self, group: Group, site: Site, mask: Any) -> None:
        """Executes fence.proxy.async or fence.mbarrier_init."""
        threads = group.threads
        if mask is not None:
            threads = threads[np.broadcast_to(mask, (group.n,))]
        event = ProxyFence(site, threads, self.tick())
        for observer in self.observers:
            observer.proxy_fence(event)

    def memory_fence(self, group: Group, site: Site, scope: str, mask: Any) -> None:
        """Executes fence.acq_rel, fence.sc or membar."""
        threads = group.threads[group.active(mask)]
        event = MemoryFence(site, threads, scope, self.tick())
        for observer in self.observers:
            observer.memory_fence(event)

    def grid_wait(self, group: Group, site: Site, mask: Any) -> None:
        """Executes griddepcontrol.wait."""
        event = GridWait(site, group.threads[group.active(mask)], self.tick())
        for observer in self.observers:
            observer.grid_wait(event)

    def grid_allow(self, group: Group, site: Site, mask: Any) -> None:
        """Executes griddepcontrol.launch_dependents."""
        event = GridAllow(site, group.threads[group.active(mask)], self.tick())
        for observer in self.observers:
            observer.grid_allow(event)

    # Polling loops

    def poll(
        self,
        group: Group,
        site: Site,
        space: str,
        addresses: Any,
        size: int,
        count: int,
        words: Any,
        mask: Any,
    ) -> None:
        """Records the words that a load in a polling loop has read: ``count`` words of ``size``
        bytes per thread."""
        if space == "generic":
            space, addresses = self.resolve(addresses)
        if space == "global":
            positions = group.active(mask)
            where = np.broadcast_to(addresses, (group.n,))[positions]
            found = np.broadcast_to(words, (group.n,))[positions]
            group.polls[site.index] = Poll.of(site, positions, where, found, size, count)

    def forget(self, group: Group, loads: Sequence[int]) -> None:
        """Begins an iteration of a polling loop: forgets what its loads have read before."""
        for load in loads:
            group.polls.pop(load, None)

    def unchanged(self, group: Group, loads: Sequence[int]) -> MemoryWait | None:
        """Returns the wait of a polling loop for a change in the words that it has read.

        ``loads`` are the loop's loads. Returns None if they have read no global memory.
        """
        polls = [group.polls[load] for load in loads if load in group.polls]
        polls = [poll for poll in polls if poll.positions.size]
        return MemoryWait(group, self.memory, polls, self.ctas_to_come) if polls else None

    def deliver(self, random: RandomSchedule | None) -> bool:
        """Lets one asynchronous transfer arrive; returns whether there was one."""
        return self.bulk.deliver(random)

    def end(self) -> None:
        """Called when all threads have exited."""
        self.bulk.end()
        self.registers.end()

    # Lanes

    def shuffle(
        self, group: Group, mode: str, value: Any, b: Any, c: Any, members: Any
    ) -> tuple[Any, Any]:
        """Executes shfl.sync; returns (the value of the source lane, whether the source lane is in
        range).

        If the source lane is outside the group, the value is all ones.
        """
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
        """Executes vote.sync; ``mode`` is all, any, uni or ballot."""
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

    def match(self, group: Group, value: Any, members: Any) -> np.ndarray:
        """Executes match.sync: returns, for each thread, the mask of the lanes of its warp that
        have the same value; only lanes in this group count."""
        group.require_members("match.sync", members)
        pairs = np.stack([group.warp.astype(np.uint64), np.broadcast_to(value, (group.n,))])
        _, same = np.unique(pairs, axis=1, return_inverse=True)
        same = same.reshape(-1)
        lane = group.index % self.geometry.threads_per_cta % WARP
        masks: np.ndarray = np.bincount(same, weights=np.exp2(lane))[same].astype(u4)
        return masks

    def elect(self, group: Group, members: Any) -> Any:
        """Executes elect.sync: returns, for each thread, the lowest lane of its warp that is a
        member and in this group."""
        group.require_members("elect.sync", members)
        mask = (group.ballot(np.bool_(True)) & members).astype(np.int64)
        lowest = mask & -mask
        return np.log2(lowest.astype(np.float64)).astype(u4)

    def reduce(self, group: Group, operation: Any, value: Any, members: Any) -> Any:
        """Executes redux.sync over the lanes of each warp that are in this group."""
        group.require_members("redux.sync", members)
        value = np.broadcast_to(value, (group.n,))
        starts = np.flatnonzero(np.diff(group.warp, prepend=-1))
        totals = operation.reduceat(value, starts, dtype=value.dtype)
        return np.repeat(totals, np.diff(np.append(starts, group.n)))


def taken(predicate: Any) -> int:
    """Returns 1 if all threads take a branch, 0 if none does, and -1 if some do."""
    if predicate.ndim == 0:
        return 1 if predicate else 0
    count = np.count_nonzero(predicate)
    if count == 0:
        return 0
    return 1 if count == predicate.size else -1


def _uniform(value: Any, what: str) -> int:
    if np.ndim(value) == 0:
        return int(value)
    if (value != value[0]).any():
        raise EmulatorError(f"{what} differs between threads that arrive together")
    return int(value[0])


def _by_value(value: Any, index: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Returns each distinct value with the threads of the wave that have this value."""
    if np.ndim(value) == 0:
        return [(int(value), index)]
    return [(int(one), index[value == one]) for one in np.unique(value)]
