"""The emulator's count of shared-memory wavefronts for a launch far too large to emulate."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from flashsmith.emulator import BankConflicts
from flashsmith.errors import EmulatorError
from flashsmith.families import Problem, Semantics
from flashsmith.verify import prove


class WavefrontCount(NamedTuple):
    """Trips to shared memory of a whole launch, as they are and as they would be without
    conflicts."""

    actual: int
    ideal: int


def emulated_wavefronts(cfg: Any, problem: Problem, arch: int) -> WavefrontCount | None:
    """What the emulator counts for `cfg`'s kernel on `problem`; None where it cannot tell.

    One CTA is emulated over a few tiles of keys and over one more: the steps that a mask cuts and
    the first are in both, so that the difference is one ordinary step, and a launch is the sum over
    its CTAs.
    """
    windowed = problem.semantics.mask == "window"
    if not cfg.family.equal_steps or problem.semantics.packed or windowed:
        return None
    try:
        first, step = _of_a_cta(cfg, problem.semantics.mask == "causal", arch)
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
    """Tiles of keys that the CTA of the rows from `begin` on passes over."""
    rows, keys = cfg.family.loop_tiles(cfg)
    seen = problem.seq_k
    if problem.semantics.mask == "causal":
        last = min(begin + rows, problem.seq_q)
        seen = min(seen, max(0, last + problem.seq_k - problem.seq_q))
    return -(-seen // keys)


@lru_cache(maxsize=512)
def _of_a_cta(cfg: Any, causal: bool, arch: int) -> tuple[WavefrontCount, WavefrontCount]:
    """Of a CTA that takes one tile of keys, and what every further tile adds."""
    rows, keys = cfg.family.loop_tiles(cfg)
    # As many as the diagonal crosses, or a kernel that trims them would count fewer.
    n_few = max(2, -(-rows // keys))
    few, more = (_count(cfg, n, causal, arch) for n in (n_few, n_few + 1))
    step = WavefrontCount(more.actual - few.actual, more.ideal - few.ideal)
    before = n_few - 1
    first = WavefrontCount(few.actual - before * step.actual, few.ideal - before * step.ideal)
    return first, step


def _count(cfg: Any, n_tiles: int, causal: bool, arch: int) -> WavefrontCount:
    rows, keys = cfg.family.loop_tiles(cfg)
    conflicts = BankConflicts()
    # Masks are aligned to the bottom right: so many keys are seen by the last row, masked or not.
    semantics = Semantics("causal" if causal else "none")
    problem = Problem(1, rows, n_tiles * keys, 1, 1, cfg.d_head, cfg.dtype, semantics)
    verdict = prove(cfg, problem, arch=arch, observers=[conflicts])
    ctas = verdict.problem.batch * verdict.problem.heads_q
    counted = conflicts.by_kind.values()
    return WavefrontCount(
        sum(kind.actual for kind in counted) // ctas, sum(kind.ideal for kind in counted) // ctas
    )
