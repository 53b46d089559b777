"""From one tile to a whole problem: how many CTAs there are, how long each, and who is last.

CTAs are handed out in order, as many at a time as all SMs hold: a wave. Where all are of one
length the last wave is as long as a full one, however few are in it, except that fewer CTAs to an
SM run faster. A causal head's CTAs differ, and the longest goes first: the others fill up behind
it, and only the last head's longest is left over at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashsmith.configs import Problem
from flashsmith.tuning.cost_model.tile_work import TileWork

# Of a long head, this many Q blocks stand for all.
_SAMPLES = 64


class Schedule(NamedTuple):
    """ctas: of the whole problem; waves: that over what all SMs hold at a time; cycles: in all."""

    ctas: int
    waves: float
    cycles: float


def schedule(work: TileWork, problem: Problem, sm_count: int) -> Schedule:
    """The problem's CTAs on ``sm_count`` SMs; no CTA takes no time."""
    blocks = -(-problem.seq_q // work.rows)
    ctas = problem.batch * problem.heads_q * blocks
    if ctas == 0:
        return Schedule(0, 0.0, 0.0)
    steps = _steps(work, problem, blocks)
    slots = sm_count * work.resident
    if problem.semantics.mask == "causal":
        cycles = _uneven_cycles(work, steps, ctas, blocks, sm_count)
    else:
        cycles = _even_cycles(work, steps[0], ctas, sm_count)
    return Schedule(ctas, ctas / slots, cycles)


def _even_cycles(work: TileWork, steps: float, ctas: int, sm_count: int) -> float:
    full, rest = divmod(ctas, sm_count * work.resident)
    cycles = full * (work.cta_cycles + steps * work.step_cycles(work.resident))
    if rest:
        cycles += work.cta_cycles + steps * work.step_cycles(-(-rest // sm_count))
    return cycles


def _uneven_cycles(
    work: TileWork, steps: Sequence[float], ctas: int, blocks: int, sm_count: int
) -> float:
    side_by_side = min(work.resident, -(-ctas // sm_count))
    slots = sm_count * side_by_side
    mean = work.cta_cycles + sum(steps) / len(steps) * work.step_cycles(side_by_side)
    few = min(side_by_side, -(-blocks // sm_count))
    longest = work.cta_cycles + max(steps) * work.step_cycles(few)
    return max(ctas / slots * mean, (ctas - blocks) / slots * mean + longest)


def _steps(work: TileWork, problem: Problem, blocks: int) -> list[float]:
    """Steps of the Q blocks of one head, or of a sample of them."""
    everything = -(-problem.seq_k // work.keys)
    if problem.semantics.mask != "causal":
        # A window's limits are no part of a problem.
        return [everything]
    sampled = range(blocks)
    if blocks > _SAMPLES:
        sampled = range(blocks // _SAMPLES // 2, blocks, blocks // _SAMPLES)
    beyond = problem.seq_k - problem.seq_q
    last_keys = (min(problem.seq_k, (block + 1) * work.rows + beyond) for block in sampled)
    return [max(0, -(-keys // work.keys)) for keys in last_keys]
