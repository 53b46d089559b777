"""Times the kernels of a run together, by the one protocol, and judges the output that is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flashsmith.benchmark.implementations import KernelImplementation, kernel_implementation
from flashsmith.benchmark.timing import (
    INTERLEAVED,
    Clock,
    CudaEvents,
    Samples,
    measure,
    require_usable_gpu,
)
from flashsmith.benchmark.workload import AnyWorkload, workload_of
from flashsmith.errors import LaunchError
from flashsmith.families import KernelConfig, Problem, Semantics


@dataclass(frozen=True)
class TimedSize:
    """The problem that is timed."""

    batch: int = 16
    seq: int = 4096
    heads: int = 16

    def length(self, semantics: Semantics) -> int:
        """The length of its sequences: for an uneven kernel one that fills no tiles."""
        return self.seq - (semantics.uneven and not semantics.packed)

    def problem(self, cfg: KernelConfig, semantics: Semantics | None = None) -> Problem:
        """It, for a config's dtype and head dimension; semantics None are plain."""
        semantics = semantics or Semantics()
        b, s, h = self.batch, self.length(semantics), self.heads
        return Problem(b, s, s, h, h, cfg.d_head, cfg.dtype, semantics, cfg.family.operation)


TIMED = TimedSize()

# What is wrong with a kernel, in words.
Problems = tuple[str, ...]


@dataclass(frozen=True)
class Timing:
    """Median and best time of the launches, and their interquartile range over the median; FLOP are
    `Problem.attn_flop`'s: of attention those of the two products."""

    ms: float
    best_ms: float
    spread: float
    tflops: float


def time_kernels(
    problem_of: Mapping[KernelConfig, Problem],
    seed: int,
    *,
    clock: Clock | None = None,
    make_workload: Callable[[Problem, int], AnyWorkload] = workload_of,
) -> dict[KernelConfig, Timing | Problems]:
    """Launches every kernel on its problem, judges two heads of its output, then times the right
    ones.

    A kernel that is wrong, or does not come to its end, has problems in place of a timing. Kernels
    of one problem take turns. `clock` None is GPU 0's.

    Raises LaunchError where there is no GPU, or a kernel has left it unusable to this process.
    """
    clock = clock or CudaEvents()
    timings: dict[KernelConfig, Timing | Problems] = {}
    ordered = sorted(problem_of, key=problem_of.__getitem__)
    groups = itertools.groupby(ordered, key=problem_of.__getitem__)
    for problem, group in groups:
        workload = make_workload(problem, seed)
        contenders = []
        for cfg in group:
            contender = kernel_implementation(cfg, workload)
            if problems := _problems(contender, clock):
                timings[cfg] = problems
            else:
                contenders.append(contender)
        timings |= _times(contenders, problem, clock)
    return timings


def _problems(contender: KernelImplementation, clock: Clock) -> Problems:
    try:
        verdict = contender.workload.judge(contender.output())
    except LaunchError as error:
        require_usable_gpu(clock, contender.name)
        return (f"the timed launch: {error}",)
    return tuple(f"the timed launch: {reason}" for reason in verdict.reasons)


def _times(
    contenders: Sequence[KernelImplementation], problem: Problem, clock: Clock
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
