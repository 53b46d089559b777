"""Computes the time of a whole problem from the time of one tile, by the number of CTAs, the time
that each CTA takes, and the CTAs that end last.

CTAs start in order. A wave is the number of CTAs that all SMs together hold. If all CTAs take the
same time, a last wave of few CTAs takes about as long as a full wave; it is faster only because
fewer CTAs share an SM. With a causal mask, the CTAs of a head take different times. The longest CTA
starts first, so that shorter ones fill the gaps. At the end, only the longest CTA of the last head
is still running. If the longest CTAs of all heads start first, a few short CTAs are still running
at the end. A CTA that computes several tiles counts as several CTAs.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from flashsmith.families import Problem
from flashsmith.families.split_keys import tiles_to_split
from flashsmith.families.tile_work import TileWork

# The time at the end for which some SMs have no work if the longest tiles start first, in multiples
# of the time of the shortest tile.
_TAIL = 3.0


class CtaSchedule(NamedTuple):
    """Describes how the CTAs of a launch share the SMs.

    ctas: the number of CTAs.
    waves: ctas divided by the number of CTAs that all SMs together hold.
    cycles: the number of cycles from the start of the first CTA to the end of the last.
    """

    ctas: int
    waves: float
    cycles: float


def schedule(work: TileWork, problem: Problem, sm_count: int) -> CtaSchedule:
    """Returns the schedule of a problem's CTAs on ``sm_count`` SMs, in which cycles is 0 if there
    are no CTAs."""
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
            # Splitting keys would affect only the last and shortest tiles, so its gain is smaller
            # than the error of the model.
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
    """Returns the schedule of CTAs that each keep one block of keys and loop over the queries of a
    group of heads."""
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
    """The number of steps that all blocks of keys of one head take together.

    As many queries see the last block as it has keys. Each earlier block is visible to one more
    block of queries than the block after it, until a block is visible to all queries. Rounding up
    to whole steps adds about half a step per block.
    """
    growing = min(blocks, problem.seq_q // work.rows)
    seeing = work.rows * growing * (growing + 1) / 2
    rounded_up = growing * (work.keys - gcd(work.rows, work.keys)) / 2
    return (seeing + rounded_up) / work.keys + (blocks - growing) * longest


def _steps_of_window(rows: int, keys: int, left: int) -> int:
    """The number of steps of a CTA in which each row sees `left` keys before its own position."""
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
    """Returns the cycles of a launch whose CTAs take different times. ``mean`` and ``longest`` are
    the mean and the maximum number of steps of a CTA; ``blocks`` is the number of CTAs of one
    head."""
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
    """The number of steps that all blocks of queries of one head, of `rows` rows each, take
    together.

    Block i sees (i + 1) * rows + seq_k - seq_q keys (none if this is negative); the last block sees
    all keys. Rounding up to whole steps adds the average remainder of an arithmetic sequence to
    each block.
    """
    beyond = problem.seq_k - problem.seq_q
    blind = max(0, -beyond) // rows
    seeing = max(0, blocks - 1 - blind)
    seen = seeing * (rows * (blind + blocks) / 2 + beyond)
    step = gcd(rows, keys)
    rounded_up = seeing * (-beyond % step + (keys - step) / 2)
    return (seen + rounded_up) / keys + -(-problem.seq_k // keys)
