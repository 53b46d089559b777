"""Times the kernels of a run together, by the one protocol, and judges the output that is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashsmith.benchmark.contenders import KernelContender, kernel_contender
from flashsmith.benchmark.timing import INTERLEAVED, Clock, CudaEvents, Samples, measure
from flashsmith.benchmark.usable_gpu import require_usable_gpu
from flashsmith.benchmark.workload import Workload
from flashsmith.configs import KernelConfig, Problem
from flashsmith.errors import LaunchError


@dataclass(frozen=True)
class TimedSize:
    """The problem that is timed."""

    batch: int = 16
    seq: int = 4096
    heads: int = 16

    def problem(self, cfg: KernelConfig) -> Problem:
        """It, for a config's dtype and head dimension."""
        return Problem(
            self.batch, self.seq, self.seq, self.heads, self.heads, cfg.d_head, cfg.dtype
        )


TIMED = TimedSize()

# What is wrong with a kernel, in words.
Problems = tuple[str, ...]


@dataclass(frozen=True)
class Timing:
    """Median and best time of the launches, and their interquartile range over the median; FLOP are
    those of the two products, 4 b h s^2 d."""

    ms: float
    best_ms: float
    spread: float
    tflops: float


def time_kernels(
    configs: Iterable[KernelConfig],
    seed: int,
    *,
    clock: Clock | None = None,
    make_workload: Callable[[Problem, int], Workload] = Workload,
) -> dict[KernelConfig, Timing | Problems]:
    """Launches every kernel on TIMED, judges two heads of its output, then times the right ones.

    A kernel that is wrong, or does not come to its end, has problems in place of a timing. Kernels
    of one dtype and head dimension take turns. `clock` None is GPU 0's.

    Raises LaunchError where there is no GPU, or a kernel has left it unusable to this process.
    """
    clock = clock or CudaEvents()
    timings: dict[KernelConfig, Timing | Problems] = {}
    groups = itertools.groupby(sorted(configs, key=TIMED.problem), key=TIMED.problem)
    for problem, group in groups:
        workload = make_workload(problem, seed)
        contenders = []
        for cfg in group:
            contender = kernel_contender(cfg, workload)
            if problems := _problems(contender, clock):
                timings[cfg] = problems
            else:
                contenders.append(contender)
        timings |= _times(contenders, problem, clock)
    return timings


def _problems(contender: KernelContender, clock: Clock) -> Problems:
    try:
        verdict = contender.workload.judge(contender.output())
    except LaunchError as error:
        require_usable_gpu(clock, contender.name)
        return (f"the timed launch: {error}",)
    return tuple(f"the timed launch: {reason}" for reason in verdict.reasons)


def _times(
    contenders: Sequence[KernelContender], problem: Problem, clock: Clock
) -> dict[KernelConfig, Timing | Problems]:
    try:
        measured = measure(contenders, INTERLEAVED, clock=clock)
    except LaunchError as error:
        require_usable_gpu(clock, f"one of {', '.join(c.name for c in contenders)}")
        return {contender.config: (f"the timed launches: {error}",) for contender in contenders}
    return {
        contender.config: _timing(measured[contender.name], problem) for contender in contenders
    }


def _timing(samples: Samples, problem: Problem) -> Timing:
    ms = samples.median_ms
    return Timing(ms, samples.best_ms, samples.spread, problem.attn_flop() / ms / 1e9)
