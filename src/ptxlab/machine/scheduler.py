"""The scheduler: runs the groups of a wave as coroutines, with forks, joins, waits and deadlock
reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab.errors import EmulatorError
from ptxlab.machine.divergence import Fork, Part, Split, Values, slice_values
from ptxlab.machine.geometry import WARPGROUP, Geometry
from ptxlab.machine.group import Group
from ptxlab.machine.random_schedule import RandomSchedule
from ptxlab.machine.waits import REFUSED, Wait, describe

Coroutine = Generator[Any, Any, Any]


@dataclass(eq=False)
class _Task:
    """A coroutine and its place in the tree of forks.

    While its fork runs, the task itself does not run.
    """

    coroutine: Coroutine
    group: Group
    parent: _Task | None = None
    part: Part | None = None
    fork: Fork | None = None
    running_parts: int = 0
    wait: Wait | None = None
    #: The number of events that had happened when this task's wait was last refused.
    refused: int = -1


#: If this many consecutive steps did nothing but spin, threads are released from joins.
_PATIENCE = 16


#: In each step of a random schedule, an event happens early with the probability 1 / _SURPRISE.
_SURPRISE = 6
#: A random schedule chooses another laggard after one of these numbers of steps.
_LAGS = (20, 60, 200)


def _warpgroup(task: _Task) -> int:
    return int(task.group.threads[0]) // WARPGROUP


class Scheduler:
    """Runs the groups of a wave cooperatively.

    ``start`` creates the coroutine of a group from (group, node, stop, live registers). ``deliver``
    lets one asynchronous transfer arrive and returns whether there was one. With a random generator
    as argument, it picks a random transfer, otherwise the oldest.

    A coroutine yields one of four requests. A Fork: the coroutine continues after the parts of the
    fork have run. A Wait: it continues when the wait has ended. A Split: two other coroutines
    replace it. None: it spins in a loop and lets other groups run.

    Without ``random`` the schedule is fixed: groups run in rotation, and an asynchronous transfer
    arrives only when no group can run. With ``random``, groups run, transfers arrive and waits are
    refused in random order. At any time one warpgroup is the laggard, which runs only when no other
    warpgroup can. Some mistakes show only if one warpgroup gets far ahead of another, which never
    happens in rotation.
    """

    def __init__(
        self,
        geometry: Geometry,
        start: Callable[[Group, int, int, Any], Coroutine],
        deliver: Callable[[RandomSchedule | None], bool],
        random: RandomSchedule | None = None,
    ) -> None:
        self.geometry, self.start, self.deliver, self.random = geometry, start, deliver, random
        self.exit = -1
        self.waiting: list[_Task] = []
        self.ready: deque[tuple[_Task, Any]] = deque()
        self.fruitless = 0
        #: The number of events so far that could end a wait, and whether some of these events have
        #: not been processed yet.
        self.news_count = 0
        self.news = False
        #: The laggard of a random schedule, and for how many more steps it stays the laggard.
        self.laggard = -1
        self.lag = 0

    def notify(self) -> None:
        """Records an event for which groups may be waiting."""
        self.news_count += 1
        self.news = True

    def run(self, groups: Sequence[Group], exit_node: int) -> None:
        """Runs the groups from the first node until all threads have exited."""
        self.exit = exit_node
        for group in groups:
            self.ready.append((_Task(self.start(group, 0, exit_node, None), group), None))
        while self.ready or self.waiting:
            if self.random is not None:
                self._random_event(self.random)
            if self.news:
                self._wake()
            if not self.ready and not self._unstick():
                waits = [task.wait for task in self.waiting if task.wait is not None]
                raise EmulatorError(f"deadlock: {describe(waits, self.geometry)}")
            if self.fruitless > _PATIENCE + 2 * len(self.ready):
                self.fruitless = 0
                self._unstick()
            if self.ready:
                if self.random is not None:
                    self._shuffle(self.random)
                self._step(*self.ready.popleft())

    def _shuffle(self, random: RandomSchedule) -> None:
        """Moves a random task to the front.

        A task of the laggard is chosen only if no other task is ready.
        """
        ready = self.ready
        if self.lag == 0:
            self.lag = random.choice(_LAGS)
            self.laggard = _warpgroup(random.choice(ready)[0])
        self.lag -= 1
        ready.rotate(random.randrange(len(ready)))
        for _ in range(len(ready) - 1):
            if _warpgroup(ready[0][0]) != self.laggard:
                break
            ready.rotate()

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
        elif isinstance(request, Split):
            self._split(task, request)
        elif isinstance(request, Wait):
            task.wait = request
            self.waiting.append(task)
        else:
            raise EmulatorError(f"unknown request of a coroutine: {request!r}")

    def _fork(self, task: _Task, fork: Fork) -> None:
        task.fork = fork
        for part in fork.parts:
            if part.runs:
                coroutine = self.start(part.group, part.start, fork.stop, part.values)
                self._launch(_Task(coroutine, part.group, task, part))

    def _split(self, task: _Task, split: Split) -> None:
        """Replaces a task by two tasks, which take its place in the parent fork."""
        task.coroutine.close()
        above, part = task.parent, task.part
        stop, fork = self.exit, None
        if above is not None and part is not None and above.fork is not None:
            fork = above.fork
            stop = fork.stop
            fork.parts.remove(part)
            above.running_parts -= 1
        groups = split.group.split(split.passed)
        sides = (
            (split.passed, *split.go, None),
            (~split.passed, *split.stay, split.wait),
        )
        for group, (mask, start, values, wait) in zip(groups, sides, strict=True):
            sliced = slice_values(values, np.flatnonzero(mask))
            piece = None
            if fork is not None and part is not None:
                piece = Part(group, part.positions[mask], start, sliced)
                fork.parts.append(piece)
            if wait is None:
                coroutine = self.start(group, start, stop, sliced)
            else:
                wait = wait.part(group, mask)
                coroutine = _primed(self._held(group, start, stop, sliced, wait))
            self._launch(_Task(coroutine, group, above, piece, wait=wait))

    def _held(self, group: Group, start: int, stop: int, values: Values, wait: Wait) -> Coroutine:
        """Runs threads after a wait; if only some of them may continue, the group is split."""
        passed = yield
        if passed is not None:
            yield Split(group, passed, (start, values), (start, values), wait)
        return (yield from self.start(group, start, stop, values))

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

    # When no group can run

    def _unstick(self) -> bool:
        """Makes progress when no group can run: lets an asynchronous transfer arrive, continues
        part of a group, releases threads that wait at a join, or lets a wait give up."""
        if self.deliver(None):
            self._wake()
            return True
        return self._pass_partly() or self._give_up_a_join() or self._refuse()

    def _random_event(self, random: RandomSchedule) -> None:
        """Lets a transfer arrive, part of a group continue, or a wait give up early, each with a
        small probability."""
        if random.randrange(_SURPRISE) == 0:
            self.deliver(random)
        if random.randrange(_SURPRISE) == 0:
            self._pass_partly()
        if random.randrange(_SURPRISE) == 0 and self.waiting:
            task = random.choice(self.waiting)
            if task.wait is not None and task.wait.refusable:
                self._resume(task, REFUSED)

    def _resume(self, task: _Task, message: Any) -> None:
        self.waiting.remove(task)
        task.wait = None
        self.ready.append((task, message))

    def _pass_partly(self) -> bool:
        """Lets the threads of a waiting group that may continue do so; if others must wait, splits
        the group."""
        for task in self.waiting:
            wait = task.wait
            if wait is not None:
                passed = wait.passed()
                if passed.any():
                    whole = bool(passed.all())
                    wait.grant(None if whole else passed)
                    self._resume(task, None if whole else passed)
                    return True
        return False

    def _refuse(self) -> bool:
        """Makes a wait that is allowed to give up return false. The same wait is refused again only
        after another event."""
        for task in self.waiting:
            if task.wait is not None and task.wait.refusable and task.refused != self.news_count:
                task.refused = self.news_count
                self._resume(task, REFUSED)
                return True
        return False

    def _give_up_a_join(self) -> bool:
        """Releases warps from a join at which they wait for other warps that cannot continue."""
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
        """Replaces a task that waits for a fork by two tasks: one for the threads in ``mask``, one
        for the rest."""
        current, stop = task.coroutine.send(True)
        task.coroutine.close()
        go_group, values, rest_fork = fork.release(mask, current)
        above, part = task.parent, task.part
        go_part = rest_part = None
        if above is not None and part is not None and above.fork is not None:
            above.fork.parts.remove(part)
            go_part = Part(go_group, part.positions[mask], fork.stop, None)
            rest_part = Part(rest_fork.group, part.positions[~mask], fork.stop, None)
            above.fork.parts += [go_part, rest_part]
        rest_current = slice_values(current, np.flatnonzero(~mask))
        task.coroutine = _primed(self._after(rest_fork, stop, rest_current))
        task.group, task.part, task.fork = rest_fork.group, rest_part, rest_fork
        self._launch(_Task(self.start(go_group, fork.stop, stop, values), go_group, above, go_part))

    def _after(self, fork: Fork, stop: int, current: Values) -> Coroutine:
        """Continues after a join from which some threads were released.

        More threads may be released later.
        """
        if (yield):
            yield current, stop
        values = fork.join(range(len(current)), current)
        return (yield from self.start(fork.group, fork.stop, stop, values))

    # Waking

    def _wake(self) -> None:
        """Resumes the tasks whose waits have ended."""
        self.news = False
        still = []
        for task in self.waiting:
            wait = task.wait
            if wait is None:
                continue
            if wait.passed().all():
                wait.grant()
                task.wait = None
                self.ready.append((task, None))
            else:
                still.append(task)
        self.waiting = still


def _primed(coroutine: Coroutine) -> Coroutine:
    next(coroutine)
    return coroutine
