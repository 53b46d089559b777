"""Sweep: races for many problems, run by compile processes and one measuring process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashsmith.benchmark.rows import now
from flashsmith.errors import LaunchError
from flashsmith.tuning.candidate import samples_to_json
from flashsmith.tuning.compiling import Compiling
from flashsmith.tuning.cull import DEFAULT_MAX_SPILL
from flashsmith.tuning.findings import Findings, build_to_json
from flashsmith.tuning.halving import DEFAULT_HALVING, Halving
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.progress import SweepProgress
from flashsmith.tuning.race import Race, Task
from flashsmith.tuning.runner import Build, Compiled, LibraryGoneError, Runner
from flashsmith.tuning.space import search_space as search_space  # documented as this module's
from flashsmith.tuning.worker import Failure, Outcome, Worker, wait_for_any

# What the search leaves of the budget to the finals, whose figures the table is made of.
_SEARCH_SHARE = 0.75
# Trials of a problem before it is another's turn, which costs making that one's tensors again.
_TURN = 32
# A GPU that does not come back so many times in a row is not one kernel's fault.
_STARTUP_ATTEMPTS = 3
# Slower than this is as good as hanging.
_SLOWEST_FLOP_PER_SECOND = 1e12
_REFRESH_SECONDS = 0.25
# Every library brings a CUDA runtime of its own, and a process cannot hold any number of them.
MAX_LIBRARIES = 300


@dataclass(frozen=True)
class Settings:
    """How a sweep goes about it.

    budget: seconds for all problems together. max_spill: spilled bytes per thread that are let
    pass. refinements: how many times neighbours of a problem's best are tried. jobs: compile
    processes. patience: seconds that a request to the bench may take beyond
    what its FLOP explain; compile_patience: seconds that a batch of kernels may take to compile.
    """

    halving: Halving = DEFAULT_HALVING
    budget: float = math.inf
    max_spill: int = DEFAULT_MAX_SPILL
    refinements: int = 0
    jobs: int = 1
    patience: float = 60.0
    compile_patience: float = 600.0


class Sweep:
    """One run over races, from what the journal knows to the end of the work or of the budget.

    `finished` hears of every race that is over, as soon as it is. The budget is counted by `clock`,
    in seconds.
    """

    def __init__(
        self,
        races: Sequence[Race],
        runner: Runner,
        journal: Journal,
        settings: Settings,
        progress: SweepProgress,
        finished: Callable[[Race], None] = lambda race: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.findings = Findings(races, journal, runner.device, settings.max_spill, progress.say)
        self.races = self.findings.races
        self.runner, self.settings = runner, settings
        self.progress = progress
        self._tell_finished = finished
        self._clock = clock
        self._compiling = Compiling(runner.compiler, settings.jobs, settings.compile_patience)
        self._bench = Worker(runner.bench, environment=runner.process_environment)
        self._task: Task | None = None
        self._last_race: Race | None = None
        self._task_began = 0.0
        self._libraries: dict[Build, str] = {}
        self._recompiled: set[Build] = set()
        self._opened: set[str] = set()  # by the bench's process
        self._prepared: set[str] = set()
        self._startups_failed = 0
        self._finished: set[str] = set()
        self._work = {name: race.work() for name, race in self.races.items()}
        self._done_before = self._work_done()[0]
        self._began = self._shown = self._clock()

    def run(self) -> None:
        """Searches, then runs the finals; returns early at the end of the budget.

        Raises LaunchError when the GPU does not come back.
        """
        self._began = self._clock()
        deadline = self._began + self.settings.budget
        try:
            self._compiling.add(self._wanted_builds())
            self._loop(self._next_of_search, self._began + _SEARCH_SHARE * self.settings.budget)
            self._compiling.stop()
            for race in self.races.values():
                if not race.searched:
                    race.close_search()
            self._loop(lambda: self._next_of_finals(deadline), deadline)
        finally:
            self.findings.save()
            self._compiling.stop()
            self._bench.stop()

    # ---- the loop ----

    def _loop(self, next_task: Callable[[], Task | None], until: float) -> None:
        """Keeps all processes busy until there is nothing left to do, or it is `until`; what the
        bench is at then is waited for."""
        while True:
            over = self._clock() >= until
            if not over:
                self._compiling.dispatch()
            if self._task is None and not over:
                self._start(next_task())
            # On disk only now: the bench need not wait for it.
            self.findings.save()
            self._look()
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

    def _wanted_builds(self) -> list[Build]:
        """Of all that may still be measured; whoever was slower may get another chance."""
        wanted: dict[Build, None] = {}
        for race in self.races.values():
            self.findings.advance(race)
            if not race.finished:
                wanted.update(dict.fromkeys(c.build for c in race.survived))
        return list(wanted)

    def _next_of_search(self) -> Task | None:
        """Of a budget every problem gets its share: those that used it up come last, those with
        the fewest trials first. Without one they are taken in their order."""
        for race in self._in_order_of_search():
            task = race.search_task(self._libraries)
            if task is None and race.refinable:
                self._compiling.add(self.findings.advance(race))
                task = race.search_task(self._libraries)
            if task is not None:
                return task
        return None

    def _in_order_of_search(self) -> list[Race]:
        races = list(self.races.values())
        time = _SEARCH_SHARE * self.settings.budget
        if math.isinf(time):
            return races
        share = time / max(1, len(races))
        waiting = [race for race in races if race.waiting]
        # The last moment at which there is still a share for each of them.
        if waiting and self._clock() >= self._began + time - share * len(waiting):
            for race in waiting:
                race.enter_early()
        return sorted(
            races, key=lambda r: (r.seconds if r.seconds > share else 0.0, r.trials // _TURN)
        )

    def _next_of_finals(self, deadline: float) -> Task | None:
        open_races = [race for race in self.races.values() if not race.finished]
        for place, race in enumerate(open_races):
            # A finalist that failed its check reopened the search.
            self.findings.advance(race)
            task = race.search_task(self._libraries)
            if task is None and not race.searched:
                race.close_search()
            share = (deadline - self._clock()) / (len(open_races) - place)
            if task := task or race.final_task(self._libraries, share):
                return task
        return None

    # ---- requests ----

    def _start(self, task: Task | None) -> None:
        self._task, self._task_began = task, self._clock()
        if task is None:
            return
        self._last_race = task.race
        problem = task.race.problem
        launches = (task.least + 5) * len(task.candidates)
        seconds = self.settings.patience + launches * (
            problem.attn_flop() / _SLOWEST_FLOP_PER_SECOND
        )
        kernels = [(c.build, self._libraries[c.build]) for c in task.candidates]
        self._opened.update(library for _, library in kernels)
        if len(self._opened) > MAX_LIBRARIES:
            self._bench.stop()  # the request starts another process
            self._opened = {library for _, library in kernels}
        if str(problem) not in self._prepared:
            self._bench.request("prepare", problem, seconds=seconds)
        elif task.kind in ("prove", "check"):
            thorough = task.kind == "check"
            self._bench.request("prove", problem, *kernels[0], thorough, seconds=seconds)
        else:
            how = (task.least, task.ms, task.steady)
            self._bench.request("time", problem, kernels, *how, seconds=seconds)

    def _take(self, outcome: Outcome) -> None:
        """Takes over what became of the request."""
        task, self._task = self._task, None
        assert task is not None
        race, problem = task.race, str(task.race.problem)
        race.seconds += self._clock() - self._task_began
        if outcome.failure is not None:
            self._take_failure(task, outcome.failure)
            return
        self._startups_failed = 0
        name = task.candidates[0].name
        if problem not in self._prepared:
            self._prepared.add(problem)
        elif task.kind in ("prove", "check"):
            proof, thorough = asdict(outcome.value), task.kind == "check"
            self.findings.note(
                "proof", problem=problem, config=name, thorough=thorough, proof=proof
            )
        elif task.kind == "time":
            times = samples_to_json(outcome.value[0])
            self.findings.note(
                "times",
                problem=problem,
                config=name,
                rung=task.rung,
                times=times,
                origin=self._origin(),
            )
        else:
            found = zip(task.candidates, outcome.value, strict=True)
            times = {candidate.name: samples_to_json(samples) for candidate, samples in found}
            self.findings.note("final", problem=problem, times=times, origin=self._origin())

    def _origin(self) -> dict[str, Any]:
        """Where and when something is measured now."""
        return {**self.runner.origin, "time": now()}

    def _take_failure(self, task: Task, failure: Failure) -> None:
        problem = str(task.race.problem)
        if failure.kind == "startup":
            self._startups_failed += 1
            if self._startups_failed == _STARTUP_ATTEMPTS:
                raise LaunchError(
                    f"the measuring process did not start {_STARTUP_ATTEMPTS} times in a row; the "
                    f"last time: {failure.reason}\nWhat was found so far is kept; run again"
                )
        elif problem not in self._prepared:
            self.progress.say(f"{problem}: left out, its tensors cannot be made: {failure.reason}")
            for candidate in task.race.field:
                candidate.drop("not reached", f"the problem cannot be set up: {failure.reason}")
        elif failure.raised == LibraryGoneError.__name__ and self._compile_again(task):
            pass
        elif task.kind == "final":
            names = [candidate.name for candidate in task.candidates]
            self.findings.note(
                "final failed", problem=problem, configs=names, reason=failure.reason
            )
        else:
            self._note_failure(task, failure)

    def _compile_again(self, task: Task) -> bool:
        """Has the libraries of a task compiled again, with all that is in them; False: they were
        already, and are gone once more."""
        builds = {candidate.build for candidate in task.candidates}
        if builds <= self._recompiled:
            return False
        gone = {self._libraries[build] for build in builds}
        lost = [build for build, library in self._libraries.items() if library in gone]
        for build in lost:
            del self._libraries[build]
        self._recompiled.update(lost)
        self._compiling.add(lost)
        return True

    def _note_failure(self, task: Task, failure: Failure) -> None:
        build = task.candidates[0].build
        what = {"prove": "proven", "check": "proven"}.get(task.kind, "timed")
        self.findings.note(
            "failed",
            build=build_to_json(build),
            status=failure.kind,
            reason=f"while it was {what} on {task.race.problem}: {failure.reason}",
        )

    def _compiled(self, build: Build, compiled: Compiled) -> None:
        if compiled.error is None:
            self._libraries[build] = compiled.library
        self.findings.note("compiled", build=build_to_json(build), compiled=compiled.to_json())

    # ---- telling ----

    def _look(self) -> None:
        """Looks at the races that something happened to; tells which of them are over."""
        for name in [name for name in self.races if name in self.findings.touched]:
            race = self.races[name]
            self._work[name] = race.work()
            if not race.finished:
                self._finished.discard(name)
            elif name not in self._finished:
                self._finished.add(name)
                self._tell_finished(race)
        self.findings.touched.clear()

    def _work_done(self) -> tuple[float, float]:
        return tuple(map(math.fsum, zip(*self._work.values(), strict=True)))  # type: ignore[return-value]

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
        race = self._task.race if self._task else self._last_race
        if race is None:
            return "compiling"
        standings = race.standings()
        if not standings:
            return f"{race.problem}: proving"
        best = standings[0]
        rate = race.problem.attn_flop() / best.ms / 1e9
        return f"{race.problem}: best so far {best.candidate.name}, {rate:.0f} TFLOP/s"
