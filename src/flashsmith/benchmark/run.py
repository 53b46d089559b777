"""`flashsmith run`: builds a set of kernels, runs each on real tensors, checks its results, and
counts instructions and bank conflicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import KernelImplementation, kernel_implementation
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement import Measurement, Proof, Times, now
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.tasks import EMULATED, Task, size_for
from flashsmith.benchmark.timing import (
    INTERLEAVED,
    Clock,
    CudaEvents,
    measure,
    require_usable_gpu,
)
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.builder import KernelLibrary, libraries_for
from flashsmith.errors import ArgumentError, EmulatorError, LaunchError
from flashsmith.families import KernelConfig, Problem, Semantics, check_legal
from flashsmith.runtime.emulation import BankConflicts
from flashsmith.runtime.running_time import estimate_seconds
from flashsmith.runtime.target import Target
from flashsmith.verify import Verdict, prove, reference_of
from flashsmith.verify.attention_semantics import Window

# For estimates: the factor by which the checks of the emulator multiply the time.
_CHECKS_COST = 2.2
# For estimates: the seconds that the two references together take on one core, per score and
# column.
_REFERENCE_SECONDS = 0.8e-9


@dataclass(frozen=True)
class Options:
    """The values that the semantics of a task do not determine. None stands for the typical value,
    which Problem provides.

    `checks`: whether to enable all checks of the emulator. `seed` determines the inputs and the
    lengths of packed sequences.
    """

    window: Window | None = None
    softcap: float | None = None
    sinks: bool = False
    checks: bool = False
    seed: int = 0

    def of(self, problem: Problem) -> dict[str, Any]:
        """The options that `prove` needs to check a kernel on `problem`."""
        return reference_of(problem.computed).options(
            problem,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            seed=self.seed,
        )


@dataclass(frozen=True)
class KernelRun:
    """The results of running one kernel.

    `proven` is the problem on which the kernel's results were checked, with the semantics for which
    it was compiled. `emulated` is the problem on which instructions and conflicts were counted.
    `problems` lists what is wrong with the kernel; it is empty if the kernel passed. `verdict` is
    None if the kernel did not finish; `times` is None if there is no GPU.
    """

    config: KernelConfig
    proven: Problem
    emulated: Problem
    problems: tuple[str, ...]
    verdict: Verdict | None
    facts: KernelFacts
    times: Times | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel's output is correct."""
        return not self.problems

    @property
    def proof(self) -> Proof:
        """The verdict, converted to the Proof of a measurement."""
        note = "; ".join(self.problems)
        if self.verdict is None:
            return Proof("error", note)
        verdict = Proof.of(self.verdict)
        return replace(verdict, verdict="pass" if self.ok else "fail", note=note)

    def to_json(self) -> dict[str, Any]:
        """The results as JSON."""
        proof = self.proof
        return {
            "config": str(self.config),
            "proven": str(self.proven),
            "emulated": str(self.emulated),
            "problems": self.problems,
            "max_error": proof.max_error,
            "bound": proof.error_bound,
            "rel_l2": proof.rel_l2,
            **asdict(self.facts),
            "instructions": self.facts.total_instructions,
            "timing": asdict(self.times) if self.times else None,
            "verdict": "pass" if self.ok else "FAIL",
        }

    def measurement(self, timed: Problem | None, environment: Environment) -> Measurement:
        """The results as a row; `timed` is the problem on which the kernel was timed, if it was."""
        return Measurement.of(
            str(self.config),
            "ours",
            timed if self.times and timed else self.proven,
            self.proof,
            self.times,
            self.facts,
            environment,
            family=self.config.FAMILY,
            config=str(self.config),
            protocol=str(INTERLEAVED) if self.times else "proof",
            time=now(),
        )


@dataclass(frozen=True)
class Report:
    """The results of a whole run.

    `skipped` maps each kernel that cannot compute the task to the reason.
    """

    target: Target
    task: Task
    options: Options
    rows: tuple[KernelRun, ...]
    skipped: Mapping[KernelConfig, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every kernel's output is correct."""
        return all(row.ok for row in self.rows)

    @property
    def meaning(self) -> str:
        """The computation as options of forward(): masks, caps, lengths, sinks."""
        problem = self.rows[0].proven
        return reference_of(problem.computed).meaning(problem, self.options.of(problem))

    def to_json(self) -> dict[str, Any]:
        """The run as JSON; `kernels` has one item per kernel."""
        on_gpu = self.target.backend == "gpu"
        return {
            "arch": self.target.arch,
            "device": self.target.device.name,
            "backend": self.target.backend,
            "proven": self.task.to_json([row.config for row in self.rows]),
            "computes": self.meaning,
            "sinks": self.options.sinks,
            "timed": self.task.timed_to_json() if on_gpu else None,
            "checks": self.options.checks,
            "seed": self.options.seed,
            "kernels": [row.to_json() for row in self.rows],
            "skipped": [
                {"config": str(cfg), "reason": reason} for cfg, reason in self.skipped.items()
            ],
        }


def run_kernels(
    configs: Sequence[KernelConfig],
    target: Target,
    *,
    task: Task,
    options: Options | None = None,
    reporter: ProgressReporter,
    write: Callable[[Measurement], None] | None = None,
) -> Report:
    """Builds, runs and checks every config that can compute the task; on a GPU, also times it.

    `task` defines the problem on which kernels are checked. Instructions and conflicts are always
    counted in the emulator: on the task itself or, if there is a GPU, on EMULATED with the same
    semantics. A kernel that is wrong or does not finish gets a row in the report and raises no
    exception. `write` is called with each measurement as soon as it is complete.

    Raises ArgumentError if no config can compute the task, or if the lengths of the task need a
    kernel with other semantics. Raises IllegalConfigError, any error of building, and LaunchError
    if a kernel has left the GPU unusable to this process.
    """
    options = options or Options()
    for cfg in configs:
        check_legal(cfg, target.device)
    reasons = {cfg: task.why_not(cfg) for cfg in configs}
    skipped = {cfg: reason for cfg, reason in reasons.items() if reason}
    served = [cfg for cfg in configs if cfg not in skipped]
    if not served:
        raise _not_computed(task, skipped)
    for cfg in served:
        task.check(cfg)
    jobs = [_job(cfg, target, task, options) for cfg in served]
    reporter.expect("emulating", _estimates(jobs))
    libraries = _libraries(jobs, target, reporter)
    on_gpu = target.backend == "gpu"
    rows: list[KernelRun] = []

    def done_with(row: KernelRun) -> None:
        if write is not None:
            environment = Environment.collect(0 if on_gpu else None)
            write(row.measurement(task.timed(row.config), environment))

    for done, job in enumerate(jobs):
        reporter.step(f"proving {job.config}", done, len(jobs))
        rows.append(job.run(libraries[job.config]))
        if not on_gpu:
            done_with(rows[-1])
    if on_gpu:
        reporter.step("timing them together", len(jobs), len(jobs))
        rows = _timed(rows, task, options.seed)
        for row in rows:
            done_with(row)
    return Report(target, task, options, tuple(rows), skipped)


def _not_computed(task: Task, skipped: Mapping[KernelConfig, str]) -> ArgumentError:
    cfg, reason = next(iter(skipped.items()))
    return ArgumentError(
        f"problem='{task.describe(())}': no selected kernel computes it: {cfg} {reason}; name one "
        "that does with --kernels; 'flashsmith choose' prints one"
    )


def _estimates(jobs: Sequence[_Job]) -> list[float]:
    """Returns the seconds that each kernel is expected to take.

    The estimate for the first kernel of a problem includes the time of the references.
    """
    estimates, known = [], set[Problem]()
    for job in jobs:
        problem, seconds = job.emulated, job.estimate()
        if problem not in known:
            known.add(problem)
            # attn_flop() counts 4 FLOP per score and column.
            seconds += _REFERENCE_SECONDS * problem.attn_flop() / 4
        estimates.append(seconds)
    return estimates


def _job(cfg: KernelConfig, target: Target, task: Task, options: Options) -> _Job:
    """The job for one kernel. Raises ArgumentError if the options do not fit the kernel."""
    proven = emulated = task.problem(cfg)
    options.of(proven)
    if target.backend == "gpu":
        emulated = size_for(EMULATED, proven.semantics).problem(cfg)
    return _Job(cfg, target, proven, emulated, options)


def _libraries(
    jobs: Sequence[_Job], target: Target, reporter: ProgressReporter
) -> dict[KernelConfig, KernelLibrary]:
    """For each config, a library with its kernel, compiled for the semantics to be checked."""
    groups: dict[Semantics, list[KernelConfig]] = {}
    for job in jobs:
        groups.setdefault(job.proven.semantics, []).append(job.config)
    find = partial(libraries_for, arch=target.device.arch, progress=reporter.build)
    found: dict[KernelConfig, KernelLibrary] = {}
    for semantics, configs in groups.items():
        found |= find(configs, semantics=semantics)
    return found


# A list of what is wrong with a kernel, one string for each fault.
Problems = tuple[str, ...]


def _timed(rows: Sequence[KernelRun], task: Task, seed: int) -> list[KernelRun]:
    """The same rows, with times added to the rows of correct kernels."""
    asked = {row.config: task.timed(row.config) for row in rows if row.ok}
    found = time_kernels({cfg: problem for cfg, problem in asked.items() if problem}, seed)
    timed = []
    for row in rows:
        outcome = found.get(row.config, row.problems)
        if isinstance(outcome, Times):
            timed.append(replace(row, times=outcome))
        else:
            timed.append(replace(row, problems=outcome))
    return timed


def time_kernels(
    problem_of: Mapping[KernelConfig, Problem],
    seed: int,
    *,
    clock: Clock | None = None,
    make_workload: Callable[[Problem, int], AnyWorkload] = workload_of,
) -> dict[KernelConfig, Times | Problems]:
    """Runs every kernel on its problem, checks two heads of the output, and times the correct
    kernels.

    A kernel that is wrong or does not finish gets problems instead of times. Kernels of the same
    problem are interleaved. If `clock` is None, GPU 0's clock is used.

    Raises LaunchError if there is no GPU or a kernel has left it unusable to this process.
    """
    clock = clock or CudaEvents()
    timings: dict[KernelConfig, Times | Problems] = {}
    ordered = sorted(problem_of, key=problem_of.__getitem__)
    groups = itertools.groupby(ordered, key=problem_of.__getitem__)
    for problem, group in groups:
        workload = make_workload(problem, seed)
        implementations = []
        for cfg in group:
            implementation = kernel_implementation(cfg, workload)
            if problems := _problems(implementation, clock):
                timings[cfg] = problems
            else:
                implementations.append(implementation)
        timings |= _times(implementations, problem, clock)
    return timings


def _problems(implementation: KernelImplementation, clock: Clock) -> Problems:
    try:
        verdict = implementation.workload.check(implementation.output())
    except LaunchError as error:
        require_usable_gpu(clock, implementation.name)
        return (f"the timed launch: {error}",)
    return tuple(f"the timed launch: {reason}" for reason in verdict.reasons)


def _times(
    implementations: Sequence[KernelImplementation], problem: Problem, clock: Clock
) -> dict[KernelConfig, Times | Problems]:
    try:
        measured = measure(implementations, INTERLEAVED, clock=clock)
    except LaunchError as error:
        require_usable_gpu(clock, f"one of {', '.join(found.name for found in implementations)}")
        return {found.config: (f"the timed launches: {error}",) for found in implementations}
    return {found.config: Times.of(measured[found.name], problem) for found in implementations}


@dataclass(frozen=True)
class _Job:
    """Everything that is needed to run one kernel."""

    config: KernelConfig
    target: Target
    proven: Problem
    emulated: Problem
    options: Options

    def estimate(self) -> float:
        """The seconds that the emulation is expected to take."""
        seconds = estimate_seconds(self.config, self.emulated)
        return seconds * (_CHECKS_COST if self.options.checks else 1.0)

    def run(self, library: KernelLibrary) -> KernelRun:
        conflicts = BankConflicts()
        problems: list[str] = []
        emulated = self._prove("emulator", self.emulated, problems, conflicts)
        verdict = emulated
        if self.target.backend == "gpu":
            verdict = self._prove("gpu", self.proven, problems)
        facts = KernelFacts.of(
            library.entry(self.config),
            self.target.device,
            emulated.emulation if emulated else None,
            conflicts if emulated else None,
        )
        return KernelRun(self.config, self.proven, self.emulated, tuple(problems), verdict, facts)

    def _prove(
        self, backend: str, problem: Problem, problems: list[str], *observers: BankConflicts
    ) -> Verdict | None:
        """Returns the verdict, or None if the kernel did not finish.

        Appends descriptions of what is wrong to `problems`.
        """
        try:
            verdict = prove(
                self.config,
                problem,
                options=self.options.of(problem),
                seed=self.options.seed,
                backend=backend,
                arch=self.target.device.arch,
                checks=self.options.checks and backend == "emulator",
                observers=observers,
            )
        except (EmulatorError, LaunchError) as error:
            if backend == "gpu":
                require_usable_gpu(CudaEvents(), str(self.config))
            problems.append(f"did not finish: {error}")
            return None
        if not verdict.ok:
            problems.append(str(verdict))
        return verdict
