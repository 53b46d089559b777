"""Profiles configs on problems: one profiler process a length, one row a kernel, none twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from flashsmith.benchmark.bench import serves
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.kernel_facts import BuiltKernels
from flashsmith.benchmark.measurement import now, problem_columns
from flashsmith.benchmark.ncu.profiler import ProfiledUse, Profiler
from flashsmith.benchmark.ncu.raw_page import ProfiledLaunch
from flashsmith.benchmark.ncu.rows import ProfileRow
from flashsmith.benchmark.ncu.target import Use
from flashsmith.benchmark.ncu.wavefronts import emulated_wavefronts
from flashsmith.benchmark.progress import Narrator
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError, ProfilerError
from flashsmith.families import DeviceSpec, KernelConfig, Problem

_WHOLE = ("registers", "wavefronts", "wavefronts_ideal", "l2_bytes")
_WHOLE_BYTES = ("dram_read_bytes", "dram_write_bytes")


@dataclass(frozen=True)
class ProfilePlan:
    """What is profiled: every config on every problem that it serves, `runs` launches each."""

    configs: tuple[KernelConfig, ...]
    problems: tuple[Problem, ...]
    runs: int = 1

    def uses(self) -> list[tuple[Problem, KernelConfig]]:
        """All pairs, lengths one after the other.

        Raises ArgumentError when there are none, or runs is below 1.
        """
        if self.runs < 1:
            raise ArgumentError(f"runs={self.runs}: give at least 1")
        problems = sorted(self.problems, key=lambda problem: problem.seq_q)
        pairs = [(p, cfg) for p in problems for cfg in self.configs if serves(cfg, p)]
        if not pairs:
            raise ArgumentError(
                f"kernels: none of the {len(self.configs)} serves any of the "
                f"{len(self.problems)} problems; give --d_heads and --dtypes that are theirs"
            )
        return pairs


def run_profile(
    plan: ProfilePlan,
    profiler: Profiler,
    device: DeviceSpec,
    known: Iterable[ProfileRow],
    write: Callable[[ProfileRow], None],
    narrator: Narrator,
) -> None:
    """Hands a row for every use of the plan that the `known` rows do not settle to `write`, a
    length's at a time.

    Kernels are built first. A config that is illegal on this device gets a row that says so.

    Raises ProfilerError when the profiler fails, after the rows before that have been written; and
    what building raises.
    """
    done = {row.key for row in settled(plan, device, known)}
    wanted = plan.uses()
    uses = [use for use in wanted if _key(*use, device) not in done]
    if already := len(wanted) - len(uses):
        narrator.say(f"{already} of {len(wanted)} rows are there already")
    built = BuiltKernels(device)
    built.build(((cfg, problem) for problem, cfg in uses), narrator.build)
    rows = _Rows(device, profiler, Environment.collect())
    for problem, cfg in uses:
        if illegality := built.illegality(cfg):
            write(rows.row(problem, cfg, "error", note=illegality))
    legal = [(problem, cfg) for problem, cfg in uses if not built.illegality(cfg)]
    lengths = sorted({problem.seq_q for problem, _ in legal})
    for number, seq in enumerate(lengths):
        own = [(problem, cfg) for problem, cfg in legal if problem.seq_q == seq]
        narrator.step(
            f"profiling {counted(len(own), 'kernel')} at length {seq}", number, len(lengths)
        )
        found, failure = profiler.profile(
            tuple(Use(str(problem), str(cfg)) for problem, cfg in own), plan.runs
        )
        for (problem, cfg), profiled in zip(own, found, strict=False):
            write(rows.of(problem, cfg, profiled))
        if failure:
            raise ProfilerError(failure)


def settled(plan: ProfilePlan, device: DeviceSpec, known: Iterable[ProfileRow]) -> list[ProfileRow]:
    """The rows that need not be made again: each use's last by this revision of flashsmith on this
    GPU, where its kernel was right."""
    revision = Environment.collect().revision
    wanted = {_key(*use, device) for use in plan.uses()}
    last = {row.key: row for row in known if row.key in wanted and row.revision == revision}
    return [row for row in last.values() if row.verdict == "pass"]


def _key(problem: Problem, cfg: KernelConfig, device: DeviceSpec) -> tuple[str, str, str]:
    return str(cfg), str(problem), device.name


@dataclass(frozen=True)
class _Rows:
    """Makes rows of one profile."""

    device: DeviceSpec
    profiler: Profiler
    environment: Environment

    def of(self, problem: Problem, cfg: KernelConfig, profiled: ProfiledUse) -> ProfileRow:
        if profiled.wrong:
            return self.row(problem, cfg, "fail", note=profiled.wrong)
        selection = self.profiler.selection
        launch = _median(profiled.launches)
        values: dict[str, Any] = selection.values(launch.metrics)
        for name in {*_WHOLE, *_WHOLE_BYTES} & set(values):
            values[name] = round(values[name])
        if duration := values.get("duration_us"):
            values["tflops"] = problem.attn_flop() / duration / 1e6
        if emulated := emulated_wavefronts(cfg, problem, self.device.arch):
            values["emulated_wavefronts"] = emulated.actual
            values["emulated_wavefronts_ideal"] = emulated.ideal
        stalls = selection.stalls(launch.metrics)
        absent = selection.absent_columns()
        return self.row(
            problem,
            cfg,
            "pass",
            note=f"no counter here for {', '.join(absent)}" if absent else "",
            stalls=", ".join(f"{reason} {cycles:.2f}" for reason, cycles in stalls),
            **values,
        )

    def row(
        self,
        problem: Problem,
        cfg: KernelConfig,
        verdict: Literal["pass", "fail", "error"],
        **values: Any,
    ) -> ProfileRow:
        return ProfileRow(
            config=str(cfg),
            family=cfg.FAMILY,
            **problem_columns(problem),
            gpu=self.device.name,
            verdict=verdict,
            smem_bytes=cfg.smem_bytes(),
            arch=self.device.arch,
            driver=self.environment.driver,
            ncu=self.profiler.version,
            flashsmith=self.environment.flashsmith,
            revision=self.environment.revision,
            time=now(),
            **values,
        )


def _median(launches: list[ProfiledLaunch]) -> ProfiledLaunch:
    """The launch with the median duration; of an even number the shorter of the middle ones."""
    times = [launch.metrics.get("gpu__time_duration.sum", math.inf) for launch in launches]
    return launches[times.index(statistics.median_low(times))]
