"""Runs whole sweeps, from the problems to the table of winners, with tune(); and has the functions
for the two modes that need no GPU."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashsmith.chooser.choice import forget_choices
from flashsmith.chooser.winners import WinnersTable, check_table, require_user_table_path
from flashsmith.errors import ArgumentError, LaunchError, SelectionError, TableError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted
from flashsmith.runtime import gpu_count, query_gpu
from flashsmith.time_left import format_seconds
from flashsmith.tuning.compiling import CompileQueue
from flashsmith.tuning.executor import LOCAL_GPU, Executor, LocalExecutor, WorkerGpu
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.race import DEFAULT_HALVING, Halving, Race, RaceState, states_of
from flashsmith.tuning.ranking import record_alone, record_beside, summary, write_ranking
from flashsmith.tuning.runner import Compiler, Runner
from flashsmith.tuning.space import KNOWN, check_space, search_space, shipped_choices
from flashsmith.tuning.sweep import Settings, Sweep, run_sweeps
from flashsmith.tuning.sweep_problems import default_problems, reference_problem
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import Build, Trials

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600}
_REFRESH_SECONDS = 0.5


@dataclass(frozen=True)
class SweepResult:
    """The states of the races at the end of a sweep.

    interrupted: whether the sweep was ended by Ctrl-C.
    gpus: for each race, the kind of its GPU.
    """

    races: list[RaceState]
    interrupted: bool
    gpus: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every problem has a winner."""
        return all(state.ranked for state in self.races)


@dataclass(frozen=True)
class GpuPool:
    """GPUs of one kind, their races, and the `runner` that compiles for them and measures."""

    runner: Runner
    gpus: tuple[WorkerGpu, ...]
    races: Sequence[Race]


def fleets_of(
    gpus: Iterable[tuple[WorkerGpu, Runner]], races_on: Callable[[DeviceSpec], Sequence[Race]]
) -> list[GpuPool]:
    """Groups GPUs whose times can be compared, which is the case if the environments of their
    runners are equal."""
    kinds: dict[str, list[tuple[WorkerGpu, Runner]]] = {}
    for gpu, runner in gpus:
        kinds.setdefault(journal_key(runner), []).append((gpu, runner))
    return [
        GpuPool(kind[0][1], tuple(gpu for gpu, _ in kind), races_on(kind[0][1].device))
        for kind in kinds.values()
    ]


def parse_budget(text: str) -> float:
    """Converts '90s', '10m' or '1.5h' to seconds; 'none' is infinite.

    Raises ArgumentError for anything else.
    """
    if text == "none":
        return math.inf
    match = _BUDGET.fullmatch(text)
    if match is None or float(match.group(1)) == 0:
        raise ArgumentError(
            f"budget={quoted(text)}: write it like 90s, 10m or 1h, or none for no limit"
        )
    return float(match.group(1)) * _UNITS[match.group(2)]


def make_race(
    problem: Problem,
    device: DeviceSpec,
    key: str | None = None,
    halving: Halving = DEFAULT_HALVING,
    reference: Race | None = None,
    refinements: int = 0,
    incumbents: Sequence[KernelConfig] = (),
) -> Race:
    """Makes the race for a problem between the configs of a space (see search_space) and the
    ``incumbents``, which are always in the final.

    Raises the errors of ``search_space``.
    """
    # Incumbents come first, so that they are measured even with a short budget.
    configs = dict.fromkeys((*incumbents, *search_space(problem, device, key)))
    return Race(
        problem,
        tuple(Build.of(problem, cfg) for cfg in configs),
        halving,
        reference,
        refinements,
        tuple(Build.of(problem, cfg) for cfg in incumbents),
    )


def plan_races(
    problems: Sequence[Problem] | None, device: DeviceSpec, key: str, settings: Settings
) -> list[Race]:
    """Makes a race for each problem, in the order of ``problems``.

    If ``problems`` is None, the races are for the default problems, except those for which the
    space has no configs. A long problem has a reference, which is a similar shorter problem. Every
    race and its final include the configs that attention() would use without this sweep.

    Raises the errors of ``search_space``.
    """
    check_space(key)
    wanted = default_problems() if problems is None else problems
    halving = settings.halving.of_few() if key == KNOWN else settings.halving
    races: dict[Problem, Race] = {}
    refused = None
    for problem in sorted(wanted, key=lambda p: p.seq_q):
        shorter = reference_problem(problem, device, races)
        reference = races[shorter] if shorter is not None else None
        try:
            races[problem] = make_race(
                problem,
                device,
                key,
                halving,
                reference,
                settings.refinements,
                shipped_choices(problem, device),
            )
        except SelectionError as error:
            refused = error
    if refused is not None and (problems is not None or not races):
        raise refused
    return [races[problem] for problem in wanted if problem in races]


def check_gpu(ordinal: int) -> DeviceSpec:
    """Returns the GPU with this ordinal, on which to measure.

    Raises LaunchError if there is no GPU, and ArgumentError if no GPU has this ordinal.
    """
    if gpu_count() == 0:
        raise LaunchError(
            "timing needs an NVIDIA GPU, and this machine has none that is usable. Without a GPU, "
            "--dry-run lists what would be tried and --build-only compiles it"
        )
    return query_gpu(ordinal)


def tune(
    races: Sequence[Race],
    runner: Runner,
    settings: Settings,
    out: Path,
    progress: SweepProgress,
    *,
    fresh: bool = False,
    table: Path | None = None,
) -> SweepResult:
    """Runs the races and writes the results to the folder `out`: journal.jsonl continuously,
    winners.json after each problem, ranking.csv and ranking.json at the end. Winners of finals are
    also merged into `table`, which by default is the user's table.

    If `out` has results of an earlier run with the same GPU, driver and sources, these are used
    unless `fresh` is set. Ctrl-C ends the sweep early; the results so far are still written.

    Raises ArgumentError if `out` cannot be written, TableError if a table cannot be written,
    LaunchError if the GPU is lost for good, CompileError if nothing can be compiled.
    """
    fleet = GpuPool(runner, (WorkerGpu(LOCAL_GPU, runner.origin),), races)
    executor = LocalExecutor.of(runner)
    return tune_fleets([fleet], executor, settings, out, progress, fresh=fresh, table=table)


def tune_fleets(
    fleets: Sequence[GpuPool],
    executor: Executor,
    settings: Settings,
    out: Path,
    progress: SweepProgress,
    *,
    fresh: bool = False,
    table: Path | None = None,
) -> SweepResult:
    """Runs tune() for several kinds of GPU at the same time.

    Calls go to an executor, which is closed at the end.

    The journal, the ranking and the tables cover all kinds of GPU; only this process writes them.

    Raises the errors of `tune`.
    """
    began = time.monotonic()
    interrupted = False
    with contextlib.ExitStack() as stack:
        stack.callback(executor.close)
        path = table or require_user_table_path()
        check_table(path)
        shipped = WinnersTable.shipped() if table is None else None
        winners = _Winners(out / "winners.json", path, shipped)
        keys = [journal_key(fleet.runner) for fleet in fleets]
        journal = Journal(out / "journal.jsonl", *keys, fresh=fresh)
        stack.callback(journal.close)

        several = len(fleets) > 1

        def sweep_of(fleet: GpuPool, key: str) -> Sweep:
            report = functools.partial(_report_done, fleet.runner, winners, progress, several)
            return Sweep(
                *(fleet.races, fleet.runner, journal.part(key), settings),
                *(progress, executor, fleet.gpus, report),
            )

        sweeps = list(map(sweep_of, fleets, keys))
        _report_known(journal, progress)
        try:
            run_sweeps(sweeps, executor, progress)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            ended = [(sweep.states, sweep.runner) for sweep in sweeps]
            try:
                write_ranking(out, ended)
            finally:
                # Races that were finished earlier are included, because one of their kernels may
                # since have been found to be wrong on another problem.
                failures = winners.record_all(ended)
                forget_choices()
    _check_recorded(failures, out)
    names = [runner.device.name for states, runner in ended for _ in states]
    tuned = SweepResult([state for states, _ in ended for state in states], interrupted, names)
    _report_end(tuned, time.monotonic() - began, out, progress)
    return tuned


class _Winners:
    """Enters races into two tables: the sweep's table, and the table at ``path``.

    In the table at ``path``, the races are merged with the existing entries and with those of the
    shipped table.
    """

    def __init__(self, own: Path, path: Path, shipped: WinnersTable | None) -> None:
        self._own, self._path, self._shipped = own, path, shipped
        # The states that have already been written to both tables; they are not written again.
        self._recorded: dict[tuple[str, Problem], RaceState] = {}

    def record(self, state: RaceState, runner: Runner) -> list[TableError]:
        """Enters a race into both tables. Returns the errors."""
        failures: list[TableError] = []
        place = runner.device.name, state.problem
        if self._recorded.get(place) is state:
            return failures
        for write in (
            lambda: record_alone(state, runner, self._own),
            lambda: record_beside(state, runner, self._path, self._shipped),
        ):
            try:
                write()
            except TableError as error:
                failures.append(error)
        if not failures:
            self._recorded[place] = state
        return failures

    def record_all(self, ended: Iterable[tuple[Sequence[RaceState], Runner]]) -> list[TableError]:
        """Enters the races of several runners into both tables. Returns the errors."""
        return [
            failure
            for states, runner in ended
            for state in states
            for failure in self.record(state, runner)
        ]


def _check_recorded(failures: Sequence[TableError], out: Path) -> None:
    if failures:
        raise TableError(
            f"{failures[0]}\nThe ranking is in {out}; fix this error and run again to enter it"
        )


def _report_done(
    runner: Runner, winners: _Winners, progress: SweepProgress, several: bool, state: RaceState
) -> None:
    """Records and reports a finished race; ``several`` is whether to name the race's GPU."""
    # If writing to a table fails, it is tried again at the end. No result is lost, because the
    # journal has all results.
    for failure in winners.record(state, runner):
        progress.say(str(failure))
    which = f"{runner.device.name}, " if several else ""
    progress.say(f"done {which}{_outcome(state)}")
    progress.emit("done", gpu=runner.device.name, **summary([state])[0])


def _report_end(tuned: SweepResult, took: float, out: Path, progress: SweepProgress) -> None:
    races = tuned.races
    _report_undecided(races, out, progress)
    won = sum(bool(state.ranked) for state in races)
    progress.say(f"{won} of {len(races)} problems have a winner, in {format_seconds(took)}")
    progress.emit(
        "end",
        problems=len(races),
        winners=won,
        unfinished=[str(state.problem) for state in races if not state.finished],
        seconds=took,
        interrupted=tuned.interrupted,
    )


def build_ahead(
    races: Sequence[Race],
    compiler: Compiler,
    device: DeviceSpec,
    settings: Settings,
    progress: SweepProgress,
) -> list[RaceState]:
    """Compiles every kernel that the races need, culls those that are unsuitable according to the
    compiler's report, and returns the states of the races.

    Raises CompileError if nothing can be compiled.
    """
    known = Trials(device, settings.max_spill)
    builds = dict.fromkeys(b for state in states_of(races, known) for b in state.wanted)
    executor = LocalExecutor()
    compiling = CompileQueue(compiler, executor, settings.jobs, settings.compile_patience)
    began, done = time.monotonic(), 0
    try:
        compiling.add(builds)
        while compiling.busy:
            compiling.dispatch()
            over = executor.next_result(_REFRESH_SECONDS)
            for build, compiled in (compiling.take(*over) if over else None) or ():
                done += 1
                known.add(compiled.record(build))
            pace = (time.monotonic() - began) / max(1, done)
            left = pace * (len(builds) - done) if done else math.inf
            what = f"compiled {done} of {pluralize(len(builds), 'kernel')}"
            progress.update(done / max(1, len(builds)), left, {"compilers": what})
    finally:
        executor.close()
    return states_of(races, known)


def journal_key(runner: Runner) -> str:
    """The environment for which the records of a journal are valid, as a string."""
    return "; ".join(f"{name}: {value}" for name, value in sorted(runner.environment.items()))


def _report_known(journal: Journal, progress: SweepProgress) -> None:
    if journal.records:
        progress.say(f"continuing from {len(journal.records)} records in {journal.path}")
    if journal.foreign:
        progress.say(
            f"{journal.foreign} records in {journal.path} are of another GPU, driver, sources or "
            "protocol and are ignored"
        )
    if journal.damaged:
        progress.say(f"{journal.damaged} lines of {journal.path} cannot be read and are ignored")


def _report_undecided(states: Sequence[RaceState], out: Path, progress: SweepProgress) -> None:
    count = sum(bool(state.ranked) and not state.decided for state in states)
    if count:
        progress.say(
            f"{count} problems had no final: their winners are in {out / 'winners.json'} only; run "
            "again to continue"
        )


def _outcome(state: RaceState) -> str:
    if not state.ranked:
        return f"{state.problem}: no kernel works"
    best = state.ranked[0]
    return f"{state.problem}: {best.name}, {best.ms:.4f} ms, {state.tflops(best):.0f} TFLOP/s"
