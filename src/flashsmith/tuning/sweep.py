"""Sweep: the races for many problems on GPUs of one kind; run_sweeps() runs several sweeps."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashsmith.benchmark.measurement import now
from flashsmith.errors import LaunchError
from flashsmith.families import Problem
from flashsmith.tuning.compiling import CompileQueue
from flashsmith.tuning.executor import LOCAL_GPU, Executor, WorkerCall, WorkerGpu
from flashsmith.tuning.journal import JournalPart
from flashsmith.tuning.race import DEFAULT_HALVING, Halving, Race, RaceState, Task, follow
from flashsmith.tuning.runner import BuildResult, LibraryGoneError, Runner
from flashsmith.tuning.space import search_space as search_space  # documented here
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import (
    CHECK,
    DEFAULT_MAX_SPILL,
    PREPARE,
    PROVE,
    Build,
    Record,
    Trials,
)
from flashsmith.tuning.worker import Failure, WorkerResult

# The share of the budget that the search may use. The rest is for the finals, whose times are
# entered in the table.
_SEARCH_SHARE = 0.75
# The number of measurements that a GPU makes on one problem before it switches to another one,
# since the tensors may have to be made again after a switch.
_IN_A_ROW = 32
# The number of failures in a row to start the measuring process of a GPU after which the GPU is no
# longer used, since no kernel can be the cause.
_STARTUP_ATTEMPTS = 3
# The FLOP per second below which a kernel counts as hanging.
_SLOWEST_FLOP_PER_SECOND = 1e12
_REFRESH_SECONDS = 0.25
# The maximum number of libraries that a process loads. Each library is linked with its own CUDA
# runtime, and a process can hold only a limited number of CUDA runtimes.
MAX_LIBRARIES = 300


@dataclass(frozen=True)
class Settings:
    """The settings of a sweep.

    budget: the seconds for all problems together.
    max_spill: how many spilled bytes per thread are allowed.
    refinements: how often the neighbours of the best kernels are tried.
    jobs: how many processes compile.
    patience: seconds that a request to the bench may take longer than estimated.
    compile_patience: seconds in which a batch of kernels must be compiled.
    """

    halving: Halving = DEFAULT_HALVING
    budget: float = math.inf
    max_spill: int = DEFAULT_MAX_SPILL
    refinements: int = 0
    jobs: int = 1
    patience: float = 60.0
    compile_patience: float = 600.0


@dataclass
class _GpuInUse:
    """A GPU in use: its current call, with the purpose and the start time of the call.

    It also has the libraries that the GPU's measuring process has loaded, and how often in a row
    this process failed to start.
    """

    gpu: WorkerGpu
    call: WorkerCall | None = None
    task: Task | None = None
    began: float = 0.0
    opened: set[str] = field(default_factory=set)
    failed_starts: int = 0
    last_problem: Problem | None = None


class Sweep:
    """Runs races on GPUs of one kind.

    A run continues from the records in the journal until everything is measured or the budget is
    spent.

    `trials` has all results: the records of the journal, and the records that this run adds. The
    trials determine the states of the races. Apart from `trials`, a run keeps track only of its
    calls, of the time that each problem has taken, and of the searches that the budget has ended. A
    problem is measured on only one GPU, unless that GPU fails. `on_finished` is called with each
    race when it is over. `clock` measures the budget, in seconds.
    """

    def __init__(
        self,
        races: Sequence[Race],
        runner: Runner,
        journal: JournalPart,
        settings: Settings,
        progress: SweepProgress,
        executor: Executor,
        gpus: Sequence[WorkerGpu] | None = None,
        on_finished: Callable[[RaceState], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trials = Trials(runner.device, settings.max_spill, journal.records)
        self.races = {race.problem: race for race in races}
        self.runner, self.settings = runner, settings
        self.progress = progress
        self._journal = journal
        self._unsaved: list[Record] = []
        self._on_finished = on_finished
        self._clock = clock
        # State of the clock.
        self._seconds: defaultdict[Problem, float] = defaultdict(float)
        self._early: set[Problem] = set()
        self._closed: set[Problem] = set()
        self._began = self._clock()
        # State of the calls.
        self._executor = executor
        self._compiling = CompileQueue(
            runner.compiler, executor, settings.jobs, settings.compile_patience
        )
        gpus = (WorkerGpu(LOCAL_GPU, runner.origin),) if gpus is None else gpus
        self._benches = {gpu.name: _GpuInUse(gpu) for gpu in gpus}
        self._gpu_of: dict[Problem, str] = {}
        self._searching = True
        self._asked_for: set[Build] = set()
        self._libraries: dict[Build, str] = {}
        self._recompiled: set[Build] = set()
        self._prepared: set[Problem] = set()
        # Caches: the state of each race with the inputs from which the state was computed, and the
        # states at the last call to _look().
        self._states: dict[Problem, tuple[RaceState, tuple[object, ...]]] = {}
        self._seen: dict[Problem, RaceState] = {}

    # ---- the states of the races ----

    @property
    def states(self) -> list[RaceState]:
        """The states of the races, in their order."""
        return [self._state(race) for race in self.races.values()]

    def _state(self, race: Race) -> RaceState:
        inputs = self._inputs_of(race)
        state, before = self._states.get(race.problem, (None, None))
        if state is None or before != inputs:
            reference = self._state(race.reference) if race.reference is not None else None
            _, early, closed, _ = inputs
            state = follow(race, self.trials, reference, early=early, closed=closed)
            self._states[race.problem] = state, inputs
        return state

    def _inputs_of(self, race: Race) -> tuple[int, bool, bool, tuple[object, ...]]:
        """A value that changes whenever the state of the race may change."""
        problem, reference = race.problem, race.reference
        return (
            self.trials.versions[problem],
            problem in self._early,
            problem in self._closed,
            self._inputs_of(reference) if reference is not None else (),
        )

    def _note(self, record: Record) -> None:
        """Adds a result to the trials. The caller must call `save` later."""
        self._unsaved.append(record)
        if dropped := self.trials.add(record):
            (build,), (status, reason) = record.builds, dropped
            self.progress.say(
                f"culled {build}: {reason}" if status == "culled" else f"{status}: {build} {reason}"
            )

    def save(self) -> None:
        """Writes the new records to disk.

        `_note` leaves this to `save`, so that no GPU waits for the disk.

        Raises ArgumentError if the disk is full.
        """
        records, self._unsaved = self._unsaved, []
        self._journal.add(records)

    # ---- the loop ----

    def stop(self) -> None:
        """Drops all compilations."""
        self._compiling.stop()

    def advance(self) -> bool:
        """Submits the next calls for GPUs and compilers. Returns False if the sweep is over.

        When the time is up, calls that are already running on a GPU may finish.

        Raises LaunchError if no GPU is left.
        """
        if not self._benches:
            raise LaunchError(f"no {self.runner.device.name} is left to measure on")
        share = _SEARCH_SHARE if self._searching else 1.0
        until = self._began + share * self.settings.budget
        over = self._clock() >= until
        for bench in self._benches.values():
            if bench.call is None and not over:
                task = self._next_of_search(bench) if self._searching else None
                if not self._searching:
                    task = self._next_of_finals(bench, until)
                if task is not None:
                    self._start(bench, task)
        # The records are saved after the GPUs have new calls, so that no GPU waits for the disk.
        self.save()
        self._look()
        if not over:
            self._compiling.dispatch()
        if any(bench.call for bench in self._benches.values()):
            return True
        if self._compiling.busy and not over:
            return True
        if not self._searching:
            return False
        self._compiling.stop()
        self._closed.update(state.problem for state in self.states if not state.searched)
        self._searching = False
        return self.advance()

    def take(self, call: WorkerCall, outcome: WorkerResult) -> bool:
        """Adds the result of a call. Returns False if the call belongs to another sweep.

        Raises LaunchError if the GPU is lost for good, and CompileError if nothing can be compiled.
        """
        compiled = self._compiling.take(call, outcome)
        for build, one in compiled or ():
            self._compiled(build, one)
        if compiled is not None:
            return True
        bench = self._benches.get(call.gpu)
        if bench is None or bench.call is not call:
            return False
        task, bench.call, bench.task = bench.task, None, None
        assert task is not None
        self._take(bench, task, outcome)
        return True

    def _look(self) -> None:
        """For each race whose state has changed, queues the kernels that the race needs, and
        reports the race if it is over."""
        wanted: dict[Build, None] = {}
        for state in self.states:
            before = self._seen.get(state.problem)
            if state is not before:
                self._seen[state.problem] = state
                wanted.update(dict.fromkeys(state.wanted if self._searching else ()))
                if state.finished and not (before is not None and before.finished):
                    self._on_finished(state)
        new = [build for build in wanted if build not in self._asked_for]
        self._asked_for.update(new)
        self._compiling.add(new)

    def _next_of_search(self, bench: _GpuInUse) -> Task | None:
        """Returns the next task of a search for a GPU, or None.

        With a budget, every problem gets an equal share of it. Problems with fewer measurements
        come first, and problems that have used up their share come last. Without a budget, problems
        are tuned in order, and a GPU completes one problem, including its final, before it begins
        the next. This way, the tensors of a problem are made only once, and some problems are
        complete even if the sweep is stopped.
        """
        ends_first = math.isinf(self.settings.budget)
        states = [s for s in self._in_order_of_search() if self._may_measure(bench, s.problem)]
        if ends_first:
            states.sort(key=lambda state: state.problem not in self._gpu_of)
        for state in states:
            task = state.search_task(self._libraries)
            if task is None and ends_first and state.searched and state.problem in self._gpu_of:
                task = state.final_task(self._libraries, math.inf)
            if task is not None:
                return task
        return None

    def _may_measure(self, bench: _GpuInUse, problem: Problem) -> bool:
        return self._gpu_of.get(problem, bench.gpu.name) == bench.gpu.name

    def _in_order_of_search(self) -> list[RaceState]:
        states, time = self.states, _SEARCH_SHARE * self.settings.budget
        if math.isinf(time):
            return states
        share = time * len(self._benches) / max(1, len(self.races))
        waiting = [state.problem for state in states if state.waiting]
        # The problems that wait for their references begin as late as possible, but early enough
        # for each of them to use its share of the budget.
        needed = share * len(waiting) / len(self._benches)
        if waiting and self._clock() >= self._began + time - needed:
            self._early.update(waiting)
            states = self.states

        def order(state: RaceState) -> tuple[float, int]:
            seconds = self._seconds[state.problem]
            return seconds if seconds > share else 0.0, state.measurements // _IN_A_ROW

        return sorted(states, key=order)

    def _next_of_finals(self, bench: _GpuInUse, deadline: float) -> Task | None:
        unfinished = [state.race for state in self.states if not state.finished]
        mine = [race for race in unfinished if self._may_measure(bench, race.problem)]
        # The races that have not been begun on any GPU are divided among all GPUs.
        free = sum(race.problem not in self._gpu_of for race in mine)
        number = len(mine) - free + -(-free // len(self._benches))
        for place, race in enumerate(mine):
            # If a finalist failed its thorough check, the search may have to continue.
            task = self._state(race).search_task(self._libraries)
            if task is None and not self._state(race).searched:
                self._closed.add(race.problem)
            share = (deadline - self._clock()) / max(1, number - place)
            if task := task or self._state(race).final_task(self._libraries, share):
                return task
        return None

    # ---- calls ----

    def _start(self, bench: _GpuInUse, task: Task) -> None:
        bench.task, bench.began = task, self._clock()
        problem = bench.last_problem = task.problem
        self._gpu_of[problem] = bench.gpu.name
        launches = (task.least + 5) * len(task.builds)
        seconds = self.settings.patience + launches * (
            problem.attn_flop() / _SLOWEST_FLOP_PER_SECOND
        )
        kernels = [(build, self._libraries[build]) for build in task.builds]
        libraries = frozenset(library for _, library in kernels)
        bench.opened.update(libraries)
        fresh = len(bench.opened) > MAX_LIBRARIES
        if fresh:
            bench.opened = set(libraries)
        method, arguments = self._request(task, kernels)
        bench.call = WorkerCall(
            method, arguments, seconds, gpu=bench.gpu.name, libraries=libraries, fresh=fresh
        )
        self._executor.submit(bench.call)

    def _request(self, task: Task, kernels: list[tuple[Build, str]]) -> tuple[str, tuple[Any, ...]]:
        """The method of the bench to call, with its arguments."""
        if task.problem not in self._prepared:
            return "prepare", (task.problem,)
        if task.stage in (PROVE, CHECK):
            return "prove", (task.problem, *kernels[0], task.stage == CHECK)
        return "time", (task.problem, kernels, task.least, task.ms, task.steady)

    def _take(self, bench: _GpuInUse, task: Task, outcome: WorkerResult) -> None:
        self._seconds[task.problem] += self._clock() - bench.began
        if outcome.failure is not None:
            self._take_failure(bench, task, outcome.failure)
            return
        bench.failed_starts = 0
        about = task.stage, task.problem, task.builds
        if task.problem not in self._prepared:
            self._prepared.add(task.problem)
        elif task.stage in (PROVE, CHECK):
            self._note(Record(*about, proof=outcome.value))
        else:
            origin = {**bench.gpu.origin, "time": now()}
            self._note(Record(*about, samples=tuple(outcome.value), origin=origin))

    def _take_failure(self, bench: _GpuInUse, task: Task, failure: Failure) -> None:
        problem = task.problem
        if failure.kind == "startup" or failure.kind == "lost":
            self._take_missing(bench, failure)
            return
        about: tuple[str, Problem, tuple[Build, ...]] = (task.stage, problem, task.builds)
        if problem not in self._prepared:
            self.progress.say(f"{problem}: left out, its tensors cannot be made: {failure.reason}")
            about = PREPARE, problem, ()
        elif failure.raised == LibraryGoneError.__name__ and self._compile_again(task):
            return
        self._note(Record(*about, failure=(failure.kind, failure.reason)))

    def _take_missing(self, bench: _GpuInUse, failure: Failure) -> None:
        """Reassigns the problems of a GPU that does not respond to the other GPUs.

        After repeated failures the GPU is not used any more. If no other GPU is left, the sweep
        ends.
        """
        name = bench.gpu.name
        self._gpu_of = {p: gpu for p, gpu in self._gpu_of.items() if gpu != name}
        bench.opened.clear()
        bench.failed_starts += 1
        if bench.failed_starts < _STARTUP_ATTEMPTS:
            return
        if len(self._benches) == 1:
            raise LaunchError(
                f"the measuring process did not start {_STARTUP_ATTEMPTS} times in a row; the "
                f"last time: {failure.reason}\nThe results so far are kept; run again to continue"
            )
        del self._benches[name]
        self.progress.say(f"{name}: given up, {failure.reason}; the other GPUs continue without it")

    def _compile_again(self, task: Task) -> bool:
        """Recompiles the libraries that a task needs, including their other kernels.

        Returns False if the libraries have disappeared for the second time.
        """
        if self._recompiled.issuperset(task.builds):
            return False
        gone = {self._libraries[build] for build in task.builds}
        lost = [build for build, library in self._libraries.items() if library in gone]
        for build in lost:
            del self._libraries[build]
        self._recompiled.update(lost)
        self._compiling.add(lost)
        return True

    def _compiled(self, build: Build, compiled: BuildResult) -> None:
        if compiled.facts is not None:
            self._libraries[build] = compiled.library
        self._note(compiled.record(build))

    # ---- reporting ----

    @property
    def work(self) -> tuple[float, float]:
        """The work that the races have done so far and their total work, in the same unit."""
        done, total = zip(*(state.work for state in self.states), strict=True)
        return math.fsum(done), math.fsum(total)

    @property
    def doing(self) -> dict[str, str]:
        """For each GPU, the problem that it is measuring and the best kernel for this problem so
        far."""
        return {name: self._doing(bench.last_problem) for name, bench in self._benches.items()}

    def _doing(self, problem: Problem | None) -> str:
        if problem is None:
            return "compiling"
        state = self._state(self.races[problem])
        if not state.ranked:
            return f"{problem}: proving"
        best = state.ranked[0]
        return f"{problem}: best so far {best.name}, {state.tflops(best):.0f} TFLOP/s"


def run_sweeps(sweeps: Sequence[Sweep], executor: Executor, progress: SweepProgress) -> None:
    """Runs all sweeps at the same time.

    Each first searches and then has its finals. A sweep that has spent its budget ends early. The
    executor is always closed at the end, also after an exception.

    Raises CompileError if nothing can be compiled. Raises LaunchError, after the other sweeps are
    over, if a sweep has lost all its GPUs.
    """
    running, failed = list(sweeps), list[LaunchError]()
    began = shown = time.monotonic()
    done_before = sum(sweep.work[0] for sweep in sweeps)

    @contextlib.contextmanager
    def failing(sweep: Sweep) -> Iterator[None]:
        """Ends a sweep that has no GPU left; other sweeps continue."""
        try:
            yield
        except LaunchError as error:
            failed.append(error)
            running.remove(sweep)
            sweep.stop()

    def show() -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _REFRESH_SECONDS:
            return
        shown = now
        done, total = map(math.fsum, zip(*(sweep.work for sweep in sweeps), strict=True))
        pace = (done - done_before) / max(now - began, 1e-3)
        left = (total - done) / pace if pace > 0 else math.inf
        left = min(left, sweeps[0].settings.budget - (now - began))
        doing = {name: what for sweep in running for name, what in sweep.doing.items()}
        progress.update(done / total if total else 1.0, left, doing)

    try:
        while True:
            for sweep in list(running):
                with failing(sweep):
                    if not sweep.advance():
                        running.remove(sweep)
            show()
            if not running:
                break
            over = executor.next_result(_REFRESH_SECONDS)
            while over is not None:
                for sweep in list(running):
                    with failing(sweep):
                        if sweep.take(*over):
                            break
                over = executor.next_result(0.0)
    finally:
        try:
            for sweep in sweeps:
                sweep.save()
        finally:
            executor.close()
    if failed:
        raise failed[0]
