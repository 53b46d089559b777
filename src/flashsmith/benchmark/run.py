"""The main job: build a set of kernels, run each on real tensors, prove it, count what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from flashsmith.benchmark.kernel_facts import CONFLICT_KINDS, conflict_factors
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.run_times import Timing, time_kernels
from flashsmith.benchmark.tasks import EMULATED, Task, size_for
from flashsmith.benchmark.timing import CudaEvents, require_usable_gpu
from flashsmith.builder import KernelLibrary, libraries_for
from flashsmith.emulator import BankConflicts, estimate_seconds
from flashsmith.errors import ArgumentError, EmulatorError, LaunchError
from flashsmith.families import KernelConfig, Problem, Semantics, check_legal
from flashsmith.runtime.target import Target
from flashsmith.verify import Verdict, prove_problem, reference_of
from flashsmith.verify.attention_semantics import Window

# What the emulator's checks slow it down by, for the estimate.
_CHECKS_COST = 4.0
# What both references take for a score and a column on one core.
_REFERENCE_SECONDS = 0.8e-9


@dataclass(frozen=True)
class Options:
    """What a task's semantics leave open: None is what Problem takes for typical. `checks` turns
    all of the emulator's checks on; `seed` is of the inputs, and of packed sequences' lengths."""

    window: Window | None = None
    softcap: float | None = None
    sinks: bool = False
    checks: bool = False
    seed: int = 0

    def of(self, problem: Problem) -> dict[str, Any]:
        """The options with which `prove_problem` proves `problem`."""
        return reference_of(problem.computed).options(
            problem,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            seed=self.seed,
        )


@dataclass(frozen=True)
class KernelRow:
    """What the run found out about one kernel.

    `proven` is what it was proven on, with the semantics that it is compiled for; `problems` says
    what is wrong, empty for a kernel that passed. Spilled bytes and registers are per thread;
    `instructions` are warp instructions of what was `emulated`; a conflict factor is None where the
    kernel makes no such access; `timing` is None without a GPU.
    """

    config: KernelConfig
    proven: Problem
    emulated: Problem
    problems: tuple[str, ...]
    max_error: float | None
    bound: float | None
    rel_l2: float | None
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    ctas_per_sm: int
    instructions: int | None
    conflicts: dict[str, float | None]
    timing: Timing | None

    @property
    def ok(self) -> bool:
        """Whether the kernel is right."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        facts |= {name: str(facts[name]) for name in ("config", "proven", "emulated")}
        facts["verdict"] = "pass" if self.ok else "FAIL"
        facts["timing"] = asdict(self.timing) if self.timing else None
        return facts


@dataclass(frozen=True)
class Report:
    """A whole run. `skipped`: the kernels that cannot compute the task, and why."""

    target: Target
    task: Task
    options: Options
    rows: tuple[KernelRow, ...]
    skipped: Mapping[KernelConfig, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every kernel is right."""
        return all(row.ok for row in self.rows)

    @property
    def meaning(self) -> str:
        """What is computed, in the terms of forward(): masks, caps, lengths, sinks."""
        problem = self.rows[0].proven
        return reference_of(problem.computed).meaning(problem, self.options.of(problem))

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it, a kernel an item of `kernels`."""
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
    narrator: Narrator,
) -> Report:
    """Builds, runs, proves and, on a GPU, times every config that can compute the task.

    `task` is what is proven. Instructions and conflicts are always counted in the emulator: of the
    task too or, with a GPU, of EMULATED with the same semantics. A kernel that is wrong, or that
    does not come to its end, is a row of the report and not an exception.

    Raises ArgumentError for a task that none of the configs can compute, or whose lengths want
    another kernel than its semantics say; IllegalConfigError, LaunchError when a kernel has left
    the GPU unusable to this process, and what building raises.
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
    narrator.expect("emulating", _estimates(jobs))
    libraries = _libraries(jobs, target, narrator)
    rows = []
    for done, job in enumerate(jobs):
        narrator.step(f"proving {job.config}", done, len(jobs))
        rows.append(job.row(libraries[job.config]))
    if target.backend == "gpu":
        narrator.step("timing them together", len(jobs), len(jobs))
        rows = _timed(rows, task, options.seed)
    return Report(target, task, options, tuple(rows), skipped)


def _not_computed(task: Task, skipped: Mapping[KernelConfig, str]) -> ArgumentError:
    cfg, reason = next(iter(skipped.items()))
    return ArgumentError(
        f"problem='{task.describe(())}': no selected kernel computes it: {cfg} {reason}; name one "
        "that does with --kernels, as 'flashsmith choose' does"
    )


def _estimates(jobs: Sequence[_Job]) -> list[float]:
    """Seconds that each kernel is expected to take; the first of a problem has its references
    computed, too."""
    estimates, known = [], set[Problem]()
    for job in jobs:
        problem, seconds = job.emulated, job.estimate()
        if problem not in known:
            known.add(problem)
            # 4 FLOP a score and column, in either reference.
            seconds += _REFERENCE_SECONDS * problem.attn_flop() / 4
        estimates.append(seconds)
    return estimates


def _job(cfg: KernelConfig, target: Target, task: Task, options: Options) -> _Job:
    """One kernel's part. Raises ArgumentError for options that do not fit the task."""
    proven = emulated = task.problem(cfg)
    options.of(proven)
    if target.backend == "gpu":
        emulated = size_for(EMULATED, proven.semantics).problem(cfg)
    return _Job(cfg, target, proven, emulated, options)


def _libraries(
    jobs: Sequence[_Job], target: Target, narrator: Narrator
) -> dict[KernelConfig, KernelLibrary]:
    """Each config's library of the semantics that it is proven with."""
    groups: dict[Semantics, list[KernelConfig]] = {}
    for job in jobs:
        groups.setdefault(job.proven.semantics, []).append(job.config)
    find = partial(libraries_for, arch=target.device.arch, progress=narrator.build)
    found: dict[KernelConfig, KernelLibrary] = {}
    for semantics, configs in groups.items():
        found |= find(configs, semantics=semantics)
    return found


def _timed(rows: Sequence[KernelRow], task: Task, seed: int) -> list[KernelRow]:
    """The rows with the times of the kernels that are right."""
    asked = {row.config: task.timed(row.config) for row in rows if row.ok}
    found = time_kernels({cfg: problem for cfg, problem in asked.items() if problem}, seed)
    timed = []
    for row in rows:
        outcome = found.get(row.config, row.problems)
        if isinstance(outcome, Timing):
            timed.append(replace(row, timing=outcome))
        else:
            timed.append(replace(row, problems=outcome))
    return timed


@dataclass(frozen=True)
class _Job:
    """One kernel's part of the run."""

    config: KernelConfig
    target: Target
    proven: Problem
    emulated: Problem
    options: Options

    def estimate(self) -> float:
        """Seconds that the emulation is expected to take."""
        seconds = estimate_seconds(self.config, self.emulated)
        return seconds * (_CHECKS_COST if self.options.checks else 1.0)

    def row(self, library: KernelLibrary) -> KernelRow:
        conflicts = BankConflicts()
        problems: list[str] = []
        emulated = self._prove("emulator", self.emulated, problems, conflicts)
        judged = emulated
        if self.target.backend == "gpu":
            judged = self._prove("gpu", self.proven, problems)
        entry = library.entry(self.config)
        return KernelRow(
            config=self.config,
            proven=self.proven,
            emulated=self.emulated,
            problems=tuple(problems),
            max_error=judged.max_error if judged else None,
            bound=judged.bound if judged else None,
            rel_l2=judged.rel_l2 if judged else None,
            registers=entry.registers,
            spill_store_bytes=entry.spill_store_bytes,
            spill_load_bytes=entry.spill_load_bytes,
            smem_bytes=self.config.smem_bytes(),
            ctas_per_sm=self.config.num_ctas_per_sm(
                self.target.device.max_smem_per_sm, entry.registers
            ),
            instructions=(
                emulated.emulation.warp_instructions if emulated and emulated.emulation else None
            ),
            conflicts=(
                conflict_factors(conflicts, self.config)
                if emulated
                else dict.fromkeys(CONFLICT_KINDS)
            ),
            timing=None,
        )

    def _prove(
        self, backend: str, problem: Problem, problems: list[str], *observers: BankConflicts
    ) -> Verdict | None:
        """The verdict, or None for a kernel that did not end; what is wrong goes to `problems`."""
        try:
            verdict = prove_problem(
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
            problems.append(f"did not come to its end: {error}")
            return None
        if not verdict.ok:
            problems.append(str(verdict))
        return verdict
