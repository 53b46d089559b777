"""Runs the groups of a wave as coroutines: forks, joins, CTA barriers, deadlock reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsmith.emulator.group import Fork, Geometry, Group
from flashsmith.emulator.interface import Site
from flashsmith.errors import EmulatorError

Coroutine = Generator[Any, Any, Any]


@dataclass(eq=False)
class Wait:
    """A group that stands at a CTA barrier until its CTAs' barriers open.

    ``targets`` holds, per CTA of the wave, the generation that must have been reached for the group
    to go on (0 for CTAs it has no threads of).
    """

    group: Group
    site: Site
    barrier: int
    targets: np.ndarray

    def passed(self, generations: np.ndarray) -> np.ndarray:
        """Per thread of the group, whether its CTA's barrier has opened."""
        return (generations >= self.targets)[self.group.cta]


@dataclass(eq=False)
class Barrier:
    """One numbered barrier of every CTA of a wave."""

    arrived: np.ndarray
    expected: np.ndarray
    generations: np.ndarray
    whole_cta: bool = True
    #: Wave thread numbers of those who arrived since their CTA's barrier last opened.
    arrivals: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class _Task:
    coroutine: Coroutine
    group: Group
    parent: _Task | None = None
    slot: int = 0
    fork: Fork | None = None
    running_parts: int = 0
    wait: Wait | None = None


class Scheduler:
    """Cooperative scheduling of a wave's groups.

    ``start`` makes the coroutine of a group: (group, node, stop, live registers). ``on_release`` is
    told (site, barrier number, expected count, wave threads that took part) when barriers open.
    """

    def __init__(
        self,
        geometry: Geometry,
        start: Callable[[Group, int, int, Any], Coroutine],
        on_release: Callable[[Site, int, int, np.ndarray], None],
    ) -> None:
        self.geometry, self.start, self.on_release = geometry, start, on_release
        self.live = np.full(geometry.ctas, geometry.threads_per_cta, np.int64)
        self.live_total = geometry.threads
        self.barriers: dict[int, Barrier] = {}
        self.waiting: list[_Task] = []
        self.ready: deque[tuple[_Task, Any]] = deque()

    def run(self, group: Group, stop: int) -> None:
        """Run everything from the first node until all threads have exited."""
        self.ready.append((_Task(self.start(group, 0, stop, None), group), None))
        while self.ready or self.waiting:
            if not self.ready:
                self._break_tie()
            task, message = self.ready.popleft()
            self._step(task, message)

    def _step(self, task: _Task, message: Any) -> None:
        try:
            request = task.coroutine.send(message)
        except StopIteration as finished:
            self._finish(task, finished.value)
            return
        if isinstance(request, Fork):
            self._fork(task, request)
        elif isinstance(request, Wait):
            task.wait = request
            self.waiting.append(task)
            self._wake()
        else:
            raise EmulatorError(f"a coroutine asked for {request!r}")

    def _fork(self, task: _Task, fork: Fork) -> None:
        task.fork = fork
        for slot, part in enumerate(fork.parts):
            if fork.runs[slot]:
                coroutine = self.start(part, fork.starts[slot], fork.stop, fork.values[slot])
                child = _Task(coroutine, part, task, slot)
                task.running_parts += 1
                wait = fork.waits[slot]
                if wait is None:
                    self.ready.append((child, None))
                else:
                    child.wait = wait
                    self.waiting.append(child)

    def _finish(self, task: _Task, value: Any) -> None:
        parent = task.parent
        if parent is None or parent.fork is None:
            return
        parent.fork.values[task.slot] = value
        parent.running_parts -= 1
        if parent.running_parts == 0:
            parent.fork = None
            self.ready.append((parent, None))

    # Exits and barriers

    def exited(self, group: Group) -> None:
        """Threads are gone; barriers that wait for all threads of a CTA no longer wait for them."""
        self.live_total -= group.n
        self.live -= np.bincount(group.cta, minlength=self.geometry.ctas)
        for number, barrier in self.barriers.items():
            if barrier.whole_cta and barrier.arrived.any():
                barrier.expected = np.where(barrier.arrived > 0, self.live, barrier.expected)
                self._open(number, barrier, None)
        self._wake()

    def arrive(
        self, group: Group, site: Site, number: int, expected: int | None, *, blocks: bool
    ) -> Wait | None:
        """A group reaches barrier ``number``; a Wait when it cannot pass at once.

        ``expected`` is how many threads of each CTA take part, None for all that have not exited.
        """
        barrier = self.barriers.get(number)
        if barrier is None:
            zeros = np.zeros(self.geometry.ctas, np.int64)
            barrier = self.barriers[number] = Barrier(zeros, zeros, zeros)
        counts = np.bincount(group.cta, minlength=self.geometry.ctas)
        here = counts > 0
        wanted = self.live if expected is None else np.full_like(self.live, expected)
        mixed = here & (barrier.arrived > 0) & (barrier.expected != wanted)
        if mixed.any():
            cta = int(np.flatnonzero(mixed)[0])
            raise EmulatorError(
                f"barrier {number} of CTA {cta + self.geometry.first_cta}: one thread expects "
                f"{int(barrier.expected[cta])} threads, another {int(wanted[cta])}"
            )
        targets = np.where(here, barrier.generations + 1, 0)
        barrier.whole_cta = expected is None
        barrier.expected = np.where(here, wanted, barrier.expected)
        barrier.arrived = barrier.arrived + counts
        barrier.arrivals.append(group.index)
        self._open(number, barrier, site)
        if not blocks or (barrier.generations >= targets).all():
            self._wake()
            return None
        return Wait(group, site, number, targets)

    def _open(self, number: int, barrier: Barrier, site: Site | None) -> None:
        full = (barrier.arrived > 0) & (barrier.arrived >= barrier.expected)
        if not full.any():
            return
        over = full & (barrier.arrived > barrier.expected)
        if over.any():
            cta = int(np.flatnonzero(over)[0])
            raise EmulatorError(
                f"barrier {number} of CTA {cta + self.geometry.first_cta}: "
                f"{int(barrier.arrived[cta])} threads arrived where {int(barrier.expected[cta])} "
                f"were expected"
            )
        arrivals = np.concatenate(barrier.arrivals)
        leaves = full[arrivals // self.geometry.threads_per_cta]
        expected = int(barrier.expected[full][0])
        self.on_release(site or self._site_of(number), number, expected, arrivals[leaves])
        barrier.arrivals = [arrivals[~leaves]]
        barrier.generations = barrier.generations + full
        barrier.arrived = np.where(full, 0, barrier.arrived)

    def _site_of(self, number: int) -> Site:
        for task in self.waiting:
            if task.wait is not None and task.wait.barrier == number:
                return task.wait.site
        return Site(-1, "exit", 0, "")

    def _wake(self) -> None:
        still = []
        for task in self.waiting:
            wait = task.wait
            if wait is None:
                continue
            if (self.barriers[wait.barrier].generations >= wait.targets).all():
                task.wait = None
                self.ready.append((task, None))
            else:
                still.append(task)
        self.waiting = still

    def _break_tie(self) -> None:
        """No group can run whole: let threads of open CTAs go on, or report a deadlock."""
        for task in self.waiting:
            wait = task.wait
            if wait is not None:
                passed = wait.passed(self.barriers[wait.barrier].generations)
                if passed.any():
                    self.waiting.remove(task)
                    self.ready.append((task, passed))
                    return
        raise EmulatorError(f"deadlock: {self._who_waits()}")

    def _who_waits(self) -> str:
        lines = []
        for task in self.waiting:
            wait = task.wait
            if wait is None:
                continue
            barrier = self.barriers[wait.barrier]
            ctas = wait.group.cta
            cta = int(ctas[0])
            tids = (wait.group.index % self.geometry.threads_per_cta)[ctas == cta]
            others = int(np.unique(ctas).size) - 1
            lines.append(
                f"CTA {cta + self.geometry.first_cta} threads {_ranges(tids)} at {wait.site} wait "
                f"for barrier {wait.barrier} ({int(barrier.arrived[cta])} of "
                f"{int(barrier.expected[cta])} threads have arrived)"
                + (f" and likewise in {others} more CTAs" if others else "")
            )
        return "; ".join(lines)


def _ranges(numbers: np.ndarray) -> str:
    """``0-31, 64-95`` for ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    texts = []
    for run in np.split(numbers, breaks)[:8]:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(texts) + (", ..." if len(breaks) >= 8 else "")
