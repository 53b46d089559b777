"""`flashsmith ncu`: profiles configs on problems with one profiler process per length, and writes
one row per kernel; kernels that have a row are skipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from flashsmith.benchmark.bench import serves
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.kernel_facts import BuiltKernels
from flashsmith.benchmark.measurement import now
from flashsmith.benchmark.ncu.counters import ProfiledLaunch
from flashsmith.benchmark.ncu.profile_rows import ProfileRow
from flashsmith.benchmark.ncu.profiled_process import ProfiledKernel
from flashsmith.benchmark.ncu.profiler import ProfiledUse, Profiler
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.errors import ArgumentError, EmulatorError, ProfilerError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics
from flashsmith.pluralize import pluralize
from flashsmith.runtime.emulation import BankConflicts
from flashsmith.verify import prove

_WHOLE = ("registers", "wavefronts", "wavefronts_ideal", "l2_bytes")
_WHOLE_BYTES = ("dram_read_bytes", "dram_write_bytes")


@dataclass(frozen=True)
class ProfilePlan:
    """A plan of what to profile: every config on each problem that it serves, with `runs`
    launches."""

    configs: tuple[KernelConfig, ...]
    problems: tuple[Problem, ...]
    runs: int = 1

    def uses(self) -> list[tuple[Problem, KernelConfig]]:
        """The (problem, config) pairs, grouped by length.

        Raises ArgumentError if there is none or if `runs` is below 1.
        """
        if self.runs < 1:
            raise ArgumentError(f"runs={self.runs}: give at least 1")
        problems = sorted(self.problems, key=lambda problem: problem.seq_k)
        pairs = [(p, cfg) for p in problems for cfg in self.configs if serves(cfg, p)]
        if not pairs:
            raise ArgumentError(
                f"kernels: none of the {len(self.configs)} serves any of the "
                f"{len(self.problems)} problems; give --d_heads and --dtypes they support"
            )
        return pairs


def run_profile(
    plan: ProfilePlan,
    profiler: Profiler,
    device: DeviceSpec,
    known: Iterable[ProfileRow],
    write: Callable[[ProfileRow], None],
    reporter: ProgressReporter,
) -> None:
    """Profiles one length after another, and passes the row of each (problem, config) pair to
    `write`. Pairs that already have a usable row among `known` are skipped.

    All kernels are built first. A config that is illegal on this device gets a row that says why.

    Raises ProfilerError if the profiler fails, after earlier rows are written; and any error of
    building.
    """
    done = {row.key for row in settled(plan, device, known)}
    wanted = plan.uses()
    uses = [use for use in wanted if _key(*use, device) not in done]
    if already := len(wanted) - len(uses):
        reporter.say(f"{already} of {len(wanted)} rows already exist")
    built = BuiltKernels(device)
    built.build(((cfg, problem) for problem, cfg in uses), reporter.build)
    environment = replace(Environment.collect(), gpu=device.name, arch=device.arch)
    rows = _Rows(built, profiler, environment)
    for problem, cfg in uses:
        if illegality := built.illegality(cfg):
            write(rows.row(problem, cfg, "error", note=illegality))
    legal = [(problem, cfg) for problem, cfg in uses if not built.illegality(cfg)]
    lengths = sorted({problem.seq_k for problem, _ in legal})
    for number, seq in enumerate(lengths):
        own = [(problem, cfg) for problem, cfg in legal if problem.seq_k == seq]
        reporter.step(
            f"profiling {pluralize(len(own), 'kernel')} at length {seq}", number, len(lengths)
        )
        found, failure = profiler.profile(
            tuple(ProfiledKernel(str(problem), str(cfg)) for problem, cfg in own), plan.runs
        )
        for (problem, cfg), profiled in zip(own, found, strict=False):
            write(rows.of(problem, cfg, profiled))
        if failure:
            raise ProfilerError(failure)


def settled(plan: ProfilePlan, device: DeviceSpec, known: Iterable[ProfileRow]) -> list[ProfileRow]:
    """The rows in `known` that need not be measured again.

    A (problem, config) pair need not be measured again if its last row for this GPU and this
    revision of flashsmith says that the kernel is correct.
    """
    revision = Environment.collect().revision
    wanted = {_key(*use, device) for use in plan.uses()}
    last = {row.key: row for row in known if row.key in wanted and row.revision == revision}
    return [row for row in last.values() if row.verdict == "pass"]


def _key(problem: Problem, cfg: KernelConfig, device: DeviceSpec) -> tuple[str, str, str]:
    return str(cfg), str(problem), device.name


@dataclass(frozen=True)
class _Rows:
    """Makes the rows of one profile."""

    built: BuiltKernels
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
        if emulated := emulated_wavefronts(cfg, problem, self.environment.arch):
            values["emulated_wavefronts"] = emulated.actual
            values["emulated_wavefronts_ideal"] = emulated.ideal
        stalls = selection.stalls(launch.metrics)
        absent = selection.absent_columns()
        notes = [launch.parts] if launch.parts else []
        notes += [f"no counter here for {', '.join(absent)}"] if absent else []
        return self.row(
            problem,
            cfg,
            "pass",
            note="; ".join(notes),
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
        return ProfileRow.of(
            str(cfg),
            "ours",
            problem,
            {"smem_bytes": cfg.smem_bytes()},
            self.built.facts(cfg, problem),
            self.environment,
            values,
            family=cfg.FAMILY,
            config=str(cfg),
            verdict=verdict,
            ncu=self.profiler.version,
            time=now(),
        )


def _median(launches: list[ProfiledLaunch]) -> ProfiledLaunch:
    """The launch with the median duration; if the number of launches is even, the shorter of the
    two in the middle."""
    times = [launch.metrics.get("gpu__time_duration.sum", math.inf) for launch in launches]
    return launches[times.index(statistics.median_low(times))]


# --- the emulator's count -------------------------------------------------------------------------


class WavefrontCount(NamedTuple):
    """The shared-memory wavefronts of a whole launch: the counted number, and the number without
    bank conflicts."""

    actual: int
    ideal: int


def emulated_wavefronts(cfg: Any, problem: Problem, arch: int) -> WavefrontCount | None:
    """The wavefronts that the emulator counts for `cfg`'s kernel on `problem`; None if they cannot
    be derived.

    It emulates one CTA twice: with a few tiles of keys, and with one tile more. Both runs include
    the first step and the steps that the mask cuts, so the difference is one ordinary step. The
    result is the sum over all CTAs of the launch.
    """
    windowed = problem.semantics.key_mask.takes_limits
    if not cfg.family.equal_steps or problem.semantics.packed or windowed:
        return None
    try:
        first, step = _of_a_cta(cfg, problem.semantics.key_mask.is_triangular, arch)
    except EmulatorError:
        return None
    rows, _ = cfg.family.loop_tiles(cfg)
    heads = problem.batch * problem.heads_q
    steps = [_steps(cfg, problem, begin) for begin in range(0, problem.seq_q, rows)]
    actual, ideal = (
        heads * sum(begin + each * (n - 1) for n in steps)
        for begin, each in zip(first, step, strict=True)
    )
    return WavefrontCount(actual, ideal)


def _steps(cfg: Any, problem: Problem, begin: int) -> int:
    """How many tiles of keys are processed by the CTA whose first row is `begin`."""
    rows, keys = cfg.family.loop_tiles(cfg)
    seen = problem.seq_k
    if problem.semantics.key_mask.is_triangular:
        last = min(begin + rows, problem.seq_q)
        seen = min(seen, max(0, last + problem.seq_k - problem.seq_q))
    return -(-seen // keys)


@lru_cache(maxsize=512)
def _of_a_cta(cfg: Any, causal: bool, arch: int) -> tuple[WavefrontCount, WavefrontCount]:
    """The wavefronts of a CTA that processes one tile of keys, and the wavefronts that each further
    tile adds."""
    rows, keys = cfg.family.loop_tiles(cfg)
    # The runs have at least as many tiles as the diagonal crosses; otherwise the count would be too
    # low for a kernel that skips parts of these tiles.
    n_few = max(2, -(-rows // keys))
    few, more = (_count(cfg, n, causal, arch) for n in (n_few, n_few + 1))
    step = WavefrontCount(more.actual - few.actual, more.ideal - few.ideal)
    before = n_few - 1
    first = WavefrontCount(few.actual - before * step.actual, few.ideal - before * step.ideal)
    return first, step


def _count(cfg: Any, n_tiles: int, causal: bool, arch: int) -> WavefrontCount:
    rows, keys = cfg.family.loop_tiles(cfg)
    conflicts = BankConflicts()
    # Masks are aligned to the bottom right, so the last row may see all n_tiles * keys keys.
    semantics = Semantics("causal" if causal else "none")
    sizes = 1, rows, n_tiles * keys, 1, 1, cfg.d_head
    problem = Problem(*sizes, cfg.dtype, semantics, d_v=cfg.d_head_v)
    verdict = prove(cfg, problem, arch=arch, observers=[conflicts])
    ctas = verdict.problem.batch * verdict.problem.heads_q
    counted = conflicts.by_kind.values()
    return WavefrontCount(
        sum(kind.actual for kind in counted) // ctas, sum(kind.ideal for kind in counted) // ctas
    )
