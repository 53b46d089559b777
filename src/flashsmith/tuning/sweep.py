"""Sweep: races for many problems, run by compile processes and one measuring process."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.progress import TaskProgressColumn, TextColumn

from flashsmith.benchmark.measurement import now
from flashsmith.benchmark.progress import LineReporter
from flashsmith.errors import LaunchError
from flashsmith.families import Problem
from flashsmith.time_left import format_seconds
from flashsmith.tuning.compiling import Compiling
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.race import DEFAULT_HALVING, Halving, Race, RaceState, Task, follow
from flashsmith.tuning.runner import Compiled, LibraryGoneError, Runner
from flashsmith.tuning.space import search_space as search_space  # documented as this module's
from flashsmith.tuning.trial import (
    CHECK,
    DEFAULT_MAX_SPILL,
    PREPARE,
    PROVE,
    Build,
    Record,
    Trials,
)
from flashsmith.tuning.worker import Failure, Outcome, Worker, wait_for_any

# What the search leaves of the budget to the finals, whose figures the table is made of.
_SEARCH_SHARE = 0.75
# Measurements of a problem before another is taken up, which costs making that one's tensors again.
_IN_A_ROW = 32
# A GPU that does not come back so many times in a row is not one kernel's fault.
_STARTUP_ATTEMPTS = 3
# A kernel slower than this counts as hanging.
_SLOWEST_FLOP_PER_SECOND = 1e12
_REFRESH_SECONDS = 0.25
# Between two plain lines that only say how far the sweep is.
_LINE_SECONDS = 15.0
# Each library links a CUDA runtime statically, and a process cannot hold any number of those.
MAX_LIBRARIES = 300


@dataclass(frozen=True)
class Settings:
    """What a sweep is run with.

    budget: seconds for all problems together. max_spill: spilled bytes per thread that are allowed.
    refinements: how many times neighbours of a problem's best are tried. jobs: compile processes.
    patience: seconds that a request to the bench may take beyond what its FLOP explain;
    compile_patience: seconds that a batch of kernels may take to compile.
    """

    halving: Halving = DEFAULT_HALVING
    budget: float = math.inf
    max_spill: int = DEFAULT_MAX_SPILL
    refinements: int = 0
    jobs: int = 1
    patience: float = 60.0
    compile_patience: float = 600.0


class SweepProgress(LineReporter):
    """Reports on standard error how far a sweep is: a bar and the best so far, or lines."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._last_line = time.monotonic()

    def __enter__(self) -> SweepProgress:
        self._begin(TaskProgressColumn(), TextColumn("{task.fields[left]}"), total=1.0, left="")
        return self

    def update(self, share: float, seconds_left: float, what: str) -> None:
        """`share` of the work, 0 to 1, is done; `what` is going on, or the best so far."""
        left = f"{format_seconds(seconds_left)} left" if math.isfinite(seconds_left) else ""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=share, left=left)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(f"[{share:4.0%}] {what}" + (f", {left}" if left else ""))


class Sweep:
    """One run over races, from what the journal knows to the end of the work or of the budget.

    All that is known is in `trials`: the journal's records, to which every result is added. The
    states of the races follow from that. Beside it a run has its processes and its clock: how long
    each problem took, and which searches the budget ended. `on_finished` is called with every race
    as soon as it is over. The budget is counted by `clock`, in seconds.
    """

    def __init__(
        self,
        races: Sequence[Race],
        runner: Runner,
        journal: Journal,
        settings: Settings,
        progress: SweepProgress,
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
        # By the clock.
        self._seconds: defaultdict[Problem, float] = defaultdict(float)
        self._early: set[Problem] = set()
        self._closed: set[Problem] = set()
        self._began = self._shown = self._clock()
        # Processes.
        self._compiling = Compiling(runner.compiler, settings.jobs, settings.compile_patience)
        self._bench = Worker(runner.bench, environment=runner.process_environment)
        self._task: Task | None = None
        self._last_problem: Problem | None = None
        self._task_began = 0.0
        self._asked_for: set[Build] = set()
        self._libraries: dict[Build, str] = {}
        self._recompiled: set[Build] = set()
        self._opened: set[str] = set()  # by the bench's process
        self._prepared: set[Problem] = set()
        self._startups_failed = 0
        # What follows from all that, with what it was worked out from; and as last looked at.
        self._states: dict[Problem, tuple[RaceState, tuple[object, ...]]] = {}
        self._seen: dict[Problem, RaceState] = {}
        self._done_before = self._work_done()[0]

    def run(self) -> None:
        """Searches, then runs the finals; returns early at the end of the budget.

        Raises LaunchError when the GPU does not come back.
        """
        self._began = self._clock()
        budget = self.settings.budget
        try:
            self._loop(self._began + _SEARCH_SHARE * budget, searching=True)
            self._compiling.stop()
            self._closed.update(state.problem for state in self.states if not state.searched)
            self._loop(self._began + budget, searching=False)
        finally:
            self._save()
            self._compiling.stop()
            self._bench.stop()

    # ---- where the races are ----

    @property
    def states(self) -> list[RaceState]:
        """Where the races are by all that is known, in their order."""
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
        """What changes when a race's state does."""
        problem, reference = race.problem, race.reference
        return (
            self.trials.versions[problem],
            problem in self._early,
            problem in self._closed,
            self._inputs_of(reference) if reference is not None else (),
        )

    def _note(self, record: Record) -> None:
        """Adds a result to what is known; `_save` has to follow."""
        self._unsaved.append(record)
        if dropped := self.trials.add(record):
            (build,), (status, reason) = record.builds, dropped
            self.progress.say(
                f"culled {build}: {reason}" if status == "culled" else f"{status}: {build} {reason}"
            )

    def _save(self) -> None:
        """Writes new records to the disk, apart from `_note`, so that the GPU does not wait for it.

        Raises ArgumentError when the disk is full.
        """
        records, self._unsaved = self._unsaved, []
        self._journal.add(records)

    # ---- the loop ----

    def _loop(self, until: float, *, searching: bool) -> None:
        """Keeps all processes busy until there is nothing left to do, or it is `until`; what the
        bench is at then is waited for."""
        while True:
            over = self._clock() >= until
            if self._task is None and not over:
                self._start(self._next_of_search() if searching else self._next_of_finals(until))
            # On disk only now: the bench need not wait for it.
            self._save()
            self._look(searching)
            if not over:
                self._compiling.dispatch()
            self._show()
            if self._task is None and (over or not self._compiling.busy):
                return
            workers = [*self._compiling.workers, self._bench]
            wait_for_any(workers, _REFRESH_SECONDS)
            for build, compiled in self._compiling.collect():
                self._compiled(build, compiled)
            if self._task is not None:
                outcome = self._bench.outcome()
                if outcome is not None:
                    self._take(outcome)

    def _look(self, searching: bool) -> None:
        """For the races that changed: queues the kernels that a search wants, and reports those
        that are over."""
        wanted: dict[Build, None] = {}
        for state in self.states:
            before = self._seen.get(state.problem)
            if state is not before:
                self._seen[state.problem] = state
                wanted.update(dict.fromkeys(state.wanted if searching else ()))
                if state.finished and not (before is not None and before.finished):
                    self._on_finished(state)
        new = [build for build in wanted if build not in self._asked_for]
        self._asked_for.update(new)
        self._compiling.add(new)

    def _next_of_search(self) -> Task | None:
        """Of a budget every problem gets its share: those that used it up come last, those with
        the fewest measurements first. Without one they are taken in their order."""
        tasks = (state.search_task(self._libraries) for state in self._in_order_of_search())
        return next((task for task in tasks if task is not None), None)

    def _in_order_of_search(self) -> list[RaceState]:
        states, time = self.states, _SEARCH_SHARE * self.settings.budget
        if math.isinf(time):
            return states
        share = time / max(1, len(self.races))
        waiting = [state.problem for state in states if state.waiting]
        # The last moment at which there is still a share for each of them.
        if waiting and self._clock() >= self._began + time - share * len(waiting):
            self._early.update(waiting)
            states = self.states

        def order(state: RaceState) -> tuple[float, int]:
            seconds = self._seconds[state.problem]
            return seconds if seconds > share else 0.0, state.measurements // _IN_A_ROW

        return sorted(states, key=order)

    def _next_of_finals(self, deadline: float) -> Task | None:
        unfinished = [state.race for state in self.states if not state.finished]
        for place, race in enumerate(unfinished):
            # A finalist that failed its check may have left something to search.
            task = self._state(race).search_task(self._libraries)
            if task is None and not self._state(race).searched:
                self._closed.add(race.problem)
            share = (deadline - self._clock()) / (len(unfinished) - place)
            if task := task or self._state(race).final_task(self._libraries, share):
                return task
        return None

    # ---- requests ----

    def _start(self, task: Task | None) -> None:
        self._task, self._task_began = task, self._clock()
        if task is None:
            return
        problem = self._last_problem = task.problem
        launches = (task.least + 5) * len(task.builds)
        seconds = self.settings.patience + launches * (
            problem.attn_flop() / _SLOWEST_FLOP_PER_SECOND
        )
        kernels = [(build, self._libraries[build]) for build in task.builds]
        self._opened.update(library for _, library in kernels)
        if len(self._opened) > MAX_LIBRARIES:
            self._bench.stop()  # the request starts another process
            self._opened = {library for _, library in kernels}
        if problem not in self._prepared:
            self._bench.request("prepare", problem, seconds=seconds)
        elif task.stage in (PROVE, CHECK):
            thorough = task.stage == CHECK
            self._bench.request("prove", problem, *kernels[0], thorough, seconds=seconds)
        else:
            how = (task.least, task.ms, task.steady)
            self._bench.request("time", problem, kernels, *how, seconds=seconds)

    def _take(self, outcome: Outcome) -> None:
        """Adds the result of the request."""
        task, self._task = self._task, None
        assert task is not None
        self._seconds[task.problem] += self._clock() - self._task_began
        if outcome.failure is not None:
            self._take_failure(task, outcome.failure)
            return
        self._startups_failed = 0
        about = task.stage, task.problem, task.builds
        if task.problem not in self._prepared:
            self._prepared.add(task.problem)
        elif task.stage in (PROVE, CHECK):
            self._note(Record(*about, proof=outcome.value))
        else:
            origin = {**self.runner.origin, "time": now()}
            self._note(Record(*about, samples=tuple(outcome.value), origin=origin))

    def _take_failure(self, task: Task, failure: Failure) -> None:
        problem = task.problem
        if failure.kind == "startup":
            self._startups_failed += 1
            if self._startups_failed == _STARTUP_ATTEMPTS:
                raise LaunchError(
                    f"the measuring process did not start {_STARTUP_ATTEMPTS} times in a row; the "
                    f"last time: {failure.reason}\nWhat was found so far is kept; run again"
                )
            return
        about: tuple[str, Problem, tuple[Build, ...]] = (task.stage, problem, task.builds)
        if problem not in self._prepared:
            self.progress.say(f"{problem}: left out, its tensors cannot be made: {failure.reason}")
            about = PREPARE, problem, ()
        elif failure.raised == LibraryGoneError.__name__ and self._compile_again(task):
            return
        self._note(Record(*about, failure=(failure.kind, failure.reason)))

    def _compile_again(self, task: Task) -> bool:
        """Queues the libraries of a task, with all that is in them, to be compiled again; False:
        they were already, and are gone once more."""
        if self._recompiled.issuperset(task.builds):
            return False
        gone = {self._libraries[build] for build in task.builds}
        lost = [build for build, library in self._libraries.items() if library in gone]
        for build in lost:
            del self._libraries[build]
        self._recompiled.update(lost)
        self._compiling.add(lost)
        return True

    def _compiled(self, build: Build, compiled: Compiled) -> None:
        if compiled.facts is not None:
            self._libraries[build] = compiled.library
        self._note(compiled.record(build))

    # ---- reporting ----

    def _work_done(self) -> tuple[float, float]:
        done, total = zip(*(state.work for state in self.states), strict=True)
        return math.fsum(done), math.fsum(total)

    def _show(self) -> None:
        now = self._clock()
        if now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        done, total = self._work_done()
        elapsed = now - self._began
        pace = (done - self._done_before) / max(elapsed, 1e-3)
        left = (total - done) / pace if pace > 0 else math.inf
        left = min(left, self.settings.budget - elapsed)
        self.progress.update(done / total if total else 1.0, left, self._doing())

    def _doing(self) -> str:
        if self._last_problem is None:
            return "compiling"
        state = self._state(self.races[self._last_problem])
        if not state.ranked:
            return f"{state.problem}: proving"
        best = state.ranked[0]
        return f"{state.problem}: best so far {best.name}, {state.tflops(best):.0f} TFLOP/s"
