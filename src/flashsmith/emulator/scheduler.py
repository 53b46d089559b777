"""Runs the groups of a wave as coroutines: forks, joins, CTA barriers, deadlock reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsmith.emulator.fork import Fork, Part, Values
from flashsmith.emulator.geometry import Geometry
from flashsmith.emulator.group import Group
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
    """A coroutine with its place in the tree of forks. While it waits for a fork it has no turn."""

    coroutine: Coroutine
    group: Group
    parent: _Task | None = None
    part: Part | None = None
    fork: Fork | None = None
    running_parts: int = 0
    wait: Wait | None = None


#: Turns in a row that may bring nothing but another round of a spin loop before joins are given up.
_PATIENCE = 16


class Scheduler:
    """Cooperative scheduling of a wave's groups.

    ``start`` makes the coroutine of a group: (group, node, stop, live registers). ``on_release`` is
    told (site, barrier number, expected count, wave threads that took part) when barriers open.

    A coroutine asks for one of these things: a Fork (parts run, then it goes on), a Wait, or None
    (it spins in a loop and lets others have a turn).
    """

    def __init__(
        self,
        geometry: Geometry,
        start: Callable[[Group, int, int, Any], Coroutine],
        on_release: Callable[[Site, int, int, np.ndarray], None],
    ) -> None:
        self.geometry, self.start, self.on_release = geometry, start, on_release
        self.exit = -1
        self.live = np.full(geometry.ctas, geometry.threads_per_cta, np.int64)
        self.live_total = geometry.threads
        self.barriers: dict[int, Barrier] = {}
        self.waiting: list[_Task] = []
        self.ready: deque[tuple[_Task, Any]] = deque()
        self.fruitless = 0

    def run(self, group: Group, exit_node: int) -> None:
        """Run everything from the first node until all threads have exited."""
        self.exit = exit_node
        self.ready.append((_Task(self.start(group, 0, exit_node, None), group), None))
        while self.ready or self.waiting:
            if not self.ready and not self._unstick():
                raise EmulatorError(f"deadlock: {self._who_waits()}")
            if self.fruitless > _PATIENCE + 2 * len(self.ready):
                self.fruitless = 0
                self._unstick()
            task, message = self.ready.popleft()
            self._step(task, message)

    def _step(self, task: _Task, message: Any) -> None:
        try:
            request = task.coroutine.send(message)
        except StopIteration as finished:
            self._finish(task, finished.value)
            return
        if request is None:
            self.fruitless += 1
            self.ready.append((task, None))
            return
        self.fruitless = 0
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
        for part in fork.parts:
            if part.runs:
                coroutine = self.start(part.group, part.start, fork.stop, part.values)
                self._launch(_Task(coroutine, part.group, task, part, wait=part.wait))

    def _launch(self, child: _Task) -> None:
        if child.parent is not None:
            child.parent.running_parts += 1
        if child.wait is None:
            self.ready.append((child, None))
        else:
            self.waiting.append(child)

    def _finish(self, task: _Task, value: Any) -> None:
        self.fruitless = 0
        parent, part = task.parent, task.part
        if parent is None or part is None:
            return
        part.values, part.finished = value, True
        parent.running_parts -= 1
        if parent.running_parts == 0:
            parent.fork = None
            self.ready.append((parent, None))

    # Nothing moves

    def _unstick(self) -> bool:
        """Let threads go on that wait only for company; whether there were any."""
        return self._pass_partly() or self._give_up_a_join()

    def _pass_partly(self) -> bool:
        """Split a group of several CTAs when the barrier is open in some of them."""
        for task in self.waiting:
            wait = task.wait
            if wait is not None:
                passed = wait.passed(self.barriers[wait.barrier].generations)
                if passed.any():
                    self.waiting.remove(task)
                    task.wait = None
                    self.ready.append((task, passed))
                    return True
        return False

    def _give_up_a_join(self) -> bool:
        """Warps that wait at a join for warps that are stuck go on without them."""
        for task in [*self.waiting, *(task for task, _ in self.ready)]:
            above = task.parent
            while above is not None:
                fork = above.fork
                if fork is not None and fork.stop != self.exit:
                    mask = fork.free()
                    if mask.any():
                        self._release(above, fork, mask)
                        return True
                above = above.parent
        return False

    def _release(self, task: _Task, fork: Fork, mask: np.ndarray) -> None:
        """Replace a task that waits for a fork by two: the threads in ``mask``, and the rest."""
        current, stop = task.coroutine.send(True)
        task.coroutine.close()
        children = self._children(task)
        go_group, values, rest_fork = fork.release(mask, current)
        split = Fork(task.group, stop)
        split.add(go_group, mask, fork.stop, ())
        split.add(rest_fork.group, ~mask, fork.stop, ())
        go_part, rest_part = split.parts
        go = _Task(self.start(go_group, fork.stop, stop, values), go_group, task, go_part)
        rest = _Task(
            _primed(self._after(rest_fork, stop, current)),
            rest_fork.group,
            task,
            rest_part,
            rest_fork,
        )
        for child in children:
            child.parent = rest
        rest.running_parts = len(children)
        task.coroutine, task.fork = _primed(_rejoined(split)), split
        task.running_parts = 1  # the rest; _launch counts the one that goes
        self._launch(go)

    def _children(self, task: _Task) -> list[_Task]:
        """Unfinished tasks right below one, whether they run, wait, or have forked again."""
        found: dict[int, _Task] = {}
        for leaf in [*self.waiting, *(ready for ready, _ in self.ready)]:
            below: _Task | None = leaf
            while below is not None and below.parent is not task:
                below = below.parent
            if below is not None:
                found[id(below)] = below
        return list(found.values())

    def _after(self, fork: Fork, stop: int, current: Values) -> Coroutine:
        """Goes on behind a join that some threads have left."""
        yield
        values = fork.join(range(len(current)), current)
        return (yield from self.start(fork.group, fork.stop, stop, values))

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


def _rejoined(fork: Fork) -> Coroutine:
    """Stands in for a coroutine whose threads all run on in a fork's parts."""
    yield
    return fork.rejoin()


def _primed(coroutine: Coroutine) -> Coroutine:
    next(coroutine)
    return coroutine


def _ranges(numbers: np.ndarray) -> str:
    """``0-31, 64-95`` for ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    texts = []
    for run in np.split(numbers, breaks)[:8]:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(texts) + (", ..." if len(breaks) >= 8 else "")
