"""From one tile to a whole problem: the number of CTAs, their lengths, and which finish last.

CTAs start in order, as many at a time as all SMs hold; this is a wave. If all have the same length,
the last wave takes as long as a full one however few CTAs it has, except that fewer CTAs per SM run
faster. The CTAs of a causal head differ, and the longest starts first, so that the others fill in
behind it. At the end only the last head's longest CTA remains, or a few short ones if the longest
of many heads start first. A CTA that computes several tiles counts as several.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from flashsmith.families import Problem
from flashsmith.families.split_keys import tiles_to_split
from flashsmith.families.tile_work import TileWork

# The work left at the end if the longest tiles start first, in units of the shortest one.
_TAIL = 3.0


class CtaSchedule(NamedTuple):
    """ctas: of the whole problem. waves: ctas over the CTAs that all SMs hold. cycles: in total."""

    ctas: int
    waves: float
    cycles: float


def schedule(work: TileWork, problem: Problem, sm_count: int) -> CtaSchedule:
    """The schedule of the problem's CTAs on ``sm_count`` SMs; no CTA takes no time."""
    if work.of_keys:
        return _schedule_of_keys(work, problem, sm_count)
    group, tokens = work.group(problem), work.tokens(problem)
    blocks = -(-problem.seq_q * group // work.rows)
    ctas = work.tiles(problem)
    if ctas == 0:
        return CtaSchedule(0, 0.0, 0.0)
    longest = -(-problem.seq_k // work.keys)
    at_once = sm_count * work.resident
    split = tiles_to_split(problem, work.parts, tokens, work.keys, ctas, at_once)
    part = work._replace(cta_cycles=work.cta_cycles + work.part_cycles)
    if problem.semantics.key_mask.is_triangular:
        rows = -(-work.masked_rows // group) or tokens
        pieces = -(-problem.seq_q // rows)
        mean = _causal_steps(rows, work.keys, problem, pieces) / pieces
        if split == ctas:
            shares = mean / work.parts, -(-longest // work.parts)
            cycles = _uneven_cycles(part, *shares, ctas * work.parts, blocks * work.parts, sm_count)
        else:
            # The last tiles are the shortest: the gain of splitting them is within the error.
            cycles = _uneven_cycles(work, mean, longest, ctas, blocks, sm_count)
    else:
        if problem.window is not None:
            longest = min(longest, _steps_of_window(tokens, work.keys, problem.window[0]))
        cycles = _even_cycles(work, longest, ctas - split, sm_count)
        if split:
            steps = -(-longest // work.parts)
            cycles += _even_cycles(part, steps, split * work.parts, sm_count)
    ctas += split * max(0, work.parts - 1)
    return CtaSchedule(ctas, ctas / at_once, cycles)


def _schedule_of_keys(work: TileWork, problem: Problem, sm_count: int) -> CtaSchedule:
    """The schedule for CTAs that keep keys and step over the queries of a group of heads."""
    blocks = -(-problem.seq_k // work.rows)
    ctas = problem.batch * problem.heads_k * blocks
    if ctas == 0 or problem.seq_q == 0:
        return CtaSchedule(0, 0.0, 0.0)
    group = problem.heads_q // problem.heads_k
    longest = -(-problem.seq_q // work.keys)
    if problem.semantics.key_mask.is_triangular:
        mean = _causal_steps_of_keys(work, problem, blocks, longest) / blocks
        args = group * mean, group * longest, ctas, blocks
        cycles = _uneven_cycles(work, *args, sm_count)
    else:
        if problem.window is not None:
            longest = min(longest, _steps_of_window(work.rows, work.keys, problem.window[0]))
        cycles = _even_cycles(work, group * longest, ctas, sm_count)
    return CtaSchedule(ctas, ctas / (sm_count * work.resident), cycles)


def _causal_steps_of_keys(work: TileWork, problem: Problem, blocks: int, longest: int) -> float:
    """Steps of all blocks of keys of one head. As many queries see the last block as it has keys,
    and each earlier block is visible to a block more, up to all queries. On average a block rounds
    up by half a step."""
    growing = min(blocks, problem.seq_q // work.rows)
    seeing = work.rows * growing * (growing + 1) / 2
    rounded_up = growing * (work.keys - gcd(work.rows, work.keys)) / 2
    return (seeing + rounded_up) / work.keys + (blocks - growing) * longest


def _steps_of_window(rows: int, keys: int, left: int) -> int:
    """Steps of a CTA whose rows all see `left` keys before their own position."""
    return -(-(left + rows) // keys) + 1


def _even_cycles(work: TileWork, steps: int, ctas: int, sm_count: int) -> float:
    full, rest = divmod(ctas, sm_count * work.resident)
    cycles = full * (work.cta_cycles + steps * work.step_cycles[work.resident])
    if rest:
        cycles += work.cta_cycles + steps * work.step_cycles[-(-rest // sm_count)]
    return cycles


def _uneven_cycles(
    work: TileWork, mean: float, longest: int, ctas: int, blocks: int, sm_count: int
) -> float:
    """``mean`` and ``longest``: the steps of a CTA; ``blocks``: the CTAs of one head."""
    side_by_side = min(work.resident, -(-ctas // sm_count))
    one = work.cta_cycles + mean * work.step_cycles[side_by_side]
    few = min(side_by_side, -(-blocks // sm_count))
    last = work.cta_cycles + longest * work.step_cycles[few]
    slots = sm_count * side_by_side
    if work.longest_first:
        shortest = work.cta_cycles + work.step_cycles[side_by_side]
        return max(ctas / slots * one + _TAIL * shortest, last)
    return max(ctas / slots * one, (ctas - blocks) / slots * one + last)


def _causal_steps(rows: int, keys: int, problem: Problem, blocks: int) -> float:
    """Steps of all blocks of `rows` rows of Q of one head.

    Block i sees (i + 1) rows + seq_k - seq_q keys, none if that is negative, and the last block
    sees all. Each block rounds up to whole steps, by the average remainder of the arithmetic
    sequence.
    """
    beyond = problem.seq_k - problem.seq_q
    blind = max(0, -beyond) // rows
    seeing = max(0, blocks - 1 - blind)
    seen = seeing * (rows * (blind + blocks) / 2 + beyond)
    step = gcd(rows, keys)
    rounded_up = seeing * (-beyond % step + (keys - step) / 2)
    return (seen + rounded_up) / keys + -(-problem.seq_k // keys)
