"""Sweep: races for many problems, run by compile processes and one measuring process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashsmith.configs import DeviceSpec, Problem, Semantics, parse_kernel_name_into_config
from flashsmith.errors import LaunchError
from flashsmith.tuning.sweep.candidate import Candidate, Status
from flashsmith.tuning.sweep.compiling import Compiling
from flashsmith.tuning.sweep.cull import DEFAULT_MAX_SPILL, cull_compiled, cull_unbuilt
from flashsmith.tuning.sweep.halving import DEFAULT_HALVING, Halving
from flashsmith.tuning.sweep.journal import Journal
from flashsmith.tuning.sweep.progress import SweepProgress
from flashsmith.tuning.sweep.race import Race, Task, samples_to_json
from flashsmith.tuning.sweep.runner import Build, Compiled, Runner
from flashsmith.tuning.sweep.space import DEFAULT_SPACE, search_space
from flashsmith.tuning.sweep.worker import Failure, Outcome, Worker, wait_for_any

# What the search leaves of the budget to the finals, whose figures the table is made of.
_SEARCH_SHARE = 0.75
# A GPU that does not come back so many times in a row is not one kernel's fault.
_STARTUP_ATTEMPTS = 3
# Slower than this is as good as hanging.
_SLOWEST_FLOP_PER_SECOND = 1e12
_REFRESH_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """How a sweep goes about it.

    budget: seconds for all problems together. max_spill: spilled bytes per thread that are let
    pass. jobs: compile processes. patience: seconds that a request to the bench may take beyond
    what its FLOP explain; compile_patience: seconds that a batch of kernels may take to compile.
    """

    halving: Halving = DEFAULT_HALVING
    budget: float = math.inf
    max_spill: int = DEFAULT_MAX_SPILL
    jobs: int = 1
    patience: float = 60.0
    compile_patience: float = 600.0


def make_race(
    problem: Problem,
    device: DeviceSpec,
    key: str = DEFAULT_SPACE,
    halving: Halving = DEFAULT_HALVING,
) -> Race:
    """The race between the configs of a space for a problem; those that cannot be tried on the
    device are culled.

    Raises what ``search_space`` raises.
    """
    candidates = []
    for cfg in search_space(problem, device, key):
        candidate = Candidate(Build.of(problem, cfg))
        reason = cull_unbuilt(cfg, device)
        if reason is not None:
            candidate.drop("culled", reason)
        candidates.append(candidate)
    return Race(problem, candidates, halving)


class Sweep:
    """One run over races, from what the journal knows to the end of the work or of the budget.

    `finished` hears of every race that is over, as soon as it is.
    """

    def __init__(
        self,
        races: Sequence[Race],
        runner: Runner,
        journal: Journal,
        settings: Settings,
        progress: SweepProgress,
        finished: Callable[[Race], None] = lambda race: None,
    ) -> None:
        self.races = {str(race.problem): race for race in races}
        self.runner, self.journal, self.settings = runner, journal, settings
        self.progress = progress
        self._tell_finished = finished
        self._compiling = Compiling(runner.compiler, settings.jobs, settings.compile_patience)
        self._bench = Worker(runner.bench, environment=runner.process_environment)
        self._task: Task | None = None
        self._last_race: Race | None = None
        self._task_began = 0.0
        self._records: list[dict[str, Any]] = []
        self._libraries: dict[Build, str] = {}
        self._prepared: set[str] = set()
        self._startups_failed = 0
        self._finished: set[str] = set()
        for record in journal.records:
            self._apply(record)
        self._began = time.monotonic()
        self._work_before = self._work()[0]

    def run(self) -> None:
        """Searches, then runs the finals; returns early at the end of the budget.

        Raises LaunchError when the GPU does not come back.
        """
        self._began = time.monotonic()
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
            self._save()
            self._compiling.stop()
            self._bench.stop()

    def build(self) -> None:
        """Only compiles, and culls by what the compiler says."""
        try:
            self._compiling.add(self._wanted_builds())
            self._loop(lambda: None, math.inf)
        finally:
            self._save()
            self._compiling.stop()

    @property
    def candidates(self) -> list[Candidate]:
        """Those of all races."""
        return [c for race in self.races.values() for c in race.candidates.values()]

    # ---- the loop ----

    def _loop(self, next_task: Callable[[], Task | None], until: float) -> None:
        """Keeps all processes busy until there is nothing left to do, or it is `until`."""
        while time.monotonic() < until:
            self._compiling.dispatch()
            if self._task is None:
                self._start(next_task())
            # On disk only now: the bench need not wait for it.
            self._save()
            self._announce_finished()
            self._show()
            if self._task is None and not self._compiling.busy:
                return
            workers = [*self._compiling.workers, self._bench]
            wait_for_any(workers, min(until, time.monotonic() + _REFRESH_SECONDS))
            for build, compiled in self._compiling.collect():
                self._compiled(build, compiled)
            if self._task is not None:
                outcome = self._bench.outcome()
                if outcome is not None:
                    self._take(outcome)

    def _wanted_builds(self) -> list[Build]:
        """Of all that may still be measured. A race that only lacks its ranking needs none."""
        wanted: dict[Build, None] = {}
        for race in self.races.values():
            race.search_task(())
            if not race.finished:
                wanted.update(dict.fromkeys(c.build for c in race.field))
        return list(wanted)

    def _next_of_search(self) -> Task | None:
        """Problems in their order, but those that used up their share of the time come last."""
        share = _SEARCH_SHARE * self.settings.budget / max(1, len(self.races))
        order = sorted(self.races.values(), key=lambda r: r.seconds if r.seconds > share else 0.0)
        for race in order:
            if task := race.search_task(self._libraries):
                return task
        return None

    def _next_of_finals(self, deadline: float) -> Task | None:
        open_races = [race for race in self.races.values() if not race.finished]
        for place, race in enumerate(open_races):
            share = (deadline - time.monotonic()) / (len(open_races) - place)
            if task := race.final_task(self._libraries, share):
                return task
        return None

    # ---- requests ----

    def _start(self, task: Task | None) -> None:
        self._task, self._task_began = task, time.monotonic()
        if task is None:
            return
        self._last_race = task.race
        problem = task.race.problem
        launches = max(1, task.runs) * len(task.candidates) + 10
        seconds = self.settings.patience + launches * (
            problem.attn_flop() / _SLOWEST_FLOP_PER_SECOND
        )
        kernels = [(c.build, self._libraries[c.build]) for c in task.candidates]
        if str(problem) not in self._prepared:
            self._bench.request("prepare", problem, seconds=seconds)
        elif task.kind in ("prove", "check"):
            thorough = task.kind == "check"
            self._bench.request("prove", problem, *kernels[0], thorough, seconds=seconds)
        else:
            steady = task.kind == "final"
            self._bench.request("time", problem, kernels, task.runs, steady, seconds=seconds)

    def _take(self, outcome: Outcome) -> None:
        """Takes over what became of the request."""
        task, self._task = self._task, None
        assert task is not None
        race, problem = task.race, str(task.race.problem)
        race.seconds += time.monotonic() - self._task_began
        if outcome.failure is not None:
            self._take_failure(task, outcome.failure)
            return
        self._startups_failed = 0
        name = task.candidates[0].name
        if problem not in self._prepared:
            self._prepared.add(problem)
        elif task.kind in ("prove", "check"):
            proof, thorough = asdict(outcome.value), task.kind == "check"
            self._note("proof", problem=problem, config=name, thorough=thorough, proof=proof)
        elif task.kind == "time":
            times = samples_to_json(outcome.value[0])
            self._note("times", problem=problem, config=name, rung=task.rung, times=times)
        else:
            found = zip(task.candidates, outcome.value, strict=True)
            times = {candidate.name: samples_to_json(samples) for candidate, samples in found}
            self._note("final", problem=problem, times=times)

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
        elif task.kind == "final":
            self._note("final failed", problem=problem, reason=failure.reason)
        else:
            self._note_failure(task, failure)

    def _note_failure(self, task: Task, failure: Failure) -> None:
        build = task.candidates[0].build
        what = {"prove": "proven", "check": "proven"}.get(task.kind, "timed")
        self._note(
            "failed",
            build=_build_to_json(build),
            status=failure.kind,
            reason=f"while it was {what} on {task.race.problem}: {failure.reason}",
        )

    def _compiled(self, build: Build, compiled: Compiled) -> None:
        if compiled.error is None:
            self._libraries[build] = compiled.library
        self._note("compiled", build=_build_to_json(build), compiled=compiled.to_json())

    # ---- what is known ----

    def _note(self, kind: str, **facts: Any) -> None:
        """Something new: it counts from now on, and is on its way to the journal."""
        record = {"kind": kind, **facts}
        self._records.append(record)
        self._apply(record, new=True)

    def _save(self) -> None:
        records, self._records = self._records, []
        self.journal.add(records)

    def _apply(self, record: dict[str, Any], new: bool = False) -> None:
        """Takes over a record, new or from an earlier run."""
        kind = record["kind"]
        if kind == "compiled":
            self._apply_compiled(record, new)
        elif kind == "failed":
            self._condemn(
                _build_from_json(record["build"]), record["status"], record["reason"], new
            )
        elif race := self.races.get(record["problem"]):
            race.apply(record)
            candidate = race.candidates.get(record.get("config", ""))
            if kind == "proof" and candidate and candidate.proof and not candidate.proof.ok:
                reason = f"on {record['problem']}: {candidate.proof.reason}"
                self._condemn(candidate.build, "wrong", reason, new)

    def _apply_compiled(self, record: dict[str, Any], new: bool) -> None:
        build = _build_from_json(record["build"])
        compiled = Compiled(**record["compiled"])
        device, max_spill = self.runner.device, self.settings.max_spill
        reason = cull_compiled(build.config, compiled, device, max_spill)
        for candidate in self._of_build(build):
            candidate.compiled = compiled
            if reason is not None:
                candidate.drop("culled", reason)
        if reason is not None and new:
            self.progress.say(f"culled {build}: {reason}")

    def _condemn(self, build: Build, status: Status, reason: str, new: bool) -> None:
        """A kernel that did wrong once is not trusted on any problem."""
        for candidate in self._of_build(build):
            candidate.drop(status, reason)
        if new:
            self.progress.say(f"{status} of {build} {reason}")

    def _of_build(self, build: Build) -> list[Candidate]:
        found = (race.candidates.get(str(build.config)) for race in self.races.values())
        return [c for c in found if c is not None and c.build == build]

    # ---- telling ----

    def _announce_finished(self) -> None:
        for name, race in self.races.items():
            if name not in self._finished and race.finished:
                self._finished.add(name)
                self._tell_finished(race)

    def _work(self) -> tuple[float, float]:
        parts = [race.work() for race in self.races.values()]
        return sum(done for done, _ in parts), sum(total for _, total in parts)

    def _show(self) -> None:
        done, total = self._work()
        self.progress.update(done / total if total else 1.0, self._seconds_left(), self._doing())

    def _seconds_left(self) -> float:
        """By the pace of this run, and no more than the budget has."""
        done, total = self._work()
        elapsed = time.monotonic() - self._began
        pace = (done - self._work_before) / max(elapsed, 1e-3)
        left = (total - done) / pace if pace > 0 else math.inf
        return min(left, self.settings.budget - elapsed)

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


def _build_to_json(build: Build) -> list[str]:
    return [str(build.config), str(build.semantics)]


def _build_from_json(texts: list[str]) -> Build:
    return Build(parse_kernel_name_into_config(texts[0]), Semantics.parse(texts[1]))
