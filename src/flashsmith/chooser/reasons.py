"""Explains a choice in sentences, which say why the chosen kernel is slow on the problem and why
other families were not chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flashsmith.builder import find_library
from flashsmith.chooser.candidates import candidates
from flashsmith.chooser.cost_model import Estimate, estimate
from flashsmith.chooser.evidence import ExpectedTime
from flashsmith.chooser.spills import known_spill
from flashsmith.families import DeviceSpec, Family, Problem, d_head_for, families
from flashsmith.operations import DEFAULT

# A note is shown if less than the share _FILLED of the rows or of the CTA slots is filled, or if d
# is less than the share _OF_D_HEAD of d_head.
_FILLED = 0.8
_OF_D_HEAD = 0.9
# The number of keys from which on it is worthwhile to split K and V among CTAs.
_LONG_K = 1024


def caveats(config: Any, problem: Problem, device: DeviceSpec) -> Iterator[str]:
    """Yields the reasons why ``config`` is slower on ``problem`` than the FLOP of the problem
    suggest."""
    if 0 in (problem.batch, problem.seq_q):
        yield "there is no output: nothing is launched"
        return
    yield from _about_d(config, problem)
    if problem.window is not None and not problem.window_keys:
        keys = problem.window[0]
        yield (
            f"the problem gives no window size: the time is for a window of {keys} keys; write "
            "window_4096 for about 4096"
        )
    if problem.semantics.packed:
        yield "packed: every sequence is assumed to be as long as the longest"
    yield from _about_spills(config, problem, device)
    if config.family.has_cost_model:
        guess = estimate(config, problem, device)
        yield from _about_rows(guess, problem)
        yield from _about_waves(config, guess, problem, device)


def _about_d(config: Any, problem: Problem) -> Iterator[str]:
    columns, compiled = problem.d + problem.d_v, config.d_head + config.d_head_v
    if columns < _OF_D_HEAD * compiled:
        wasted = 1 - columns / compiled
        d = problem.d if problem.d == problem.d_v else f"{problem.d}:{problem.d_v}"
        spent = "of both GEMMs is spent on" if problem.operation == DEFAULT else "are"
        yield (
            f"d = {d} runs on d_head {config.head_dims}: {wasted:.0%} {spent} columns that "
            "do not exist"
        )


def _about_spills(config: Any, problem: Problem, device: DeviceSpec) -> Iterator[str]:
    """Yields a sentence about the spills of the kernel. If the kernel is built, the compiler has
    reported its spills; otherwise, known_spill() knows them."""
    semantics = problem.required_semantics(config)
    library = find_library(config, arch=device.arch, semantics=semantics)
    known = known_spill(config, problem, device)
    spilled = library.entry(config).spill_bytes if library else known.size if known else 0
    if spilled:
        yield (
            f"the kernel spills registers: {spilled} bytes per thread are stored to local memory "
            "and loaded from it"
        )


def _about_rows(guess: Estimate, problem: Problem) -> Iterator[str]:
    used = problem.seq_q * guess.heads
    rows = -(-used // guess.rows) * guess.rows
    if used < _FILLED * rows:
        many = f" of {guess.heads} heads" if guess.heads > 1 else ""
        yield (
            f"seq_q = {problem.seq_q}{many} fills {used / rows:.0%} of its tiles of "
            f"{guess.rows} rows; the rest is computed and discarded"
        )


def _about_waves(
    config: Any, guess: Estimate, problem: Problem, device: DeviceSpec
) -> Iterator[str]:
    if guess.ctas < device.sm_count:
        idle = device.sm_count - guess.ctas
        text = f"{guess.ctas} CTAs for {device.sm_count} SMs: {idle} of them idle"
        in_parts = config.family.split_variants(config, problem, device)
        if problem.seq_k >= _LONG_K and in_parts:
            text += (
                f", and each CTA walks all of its {problem.seq_k} keys; {in_parts[-1]} splits them"
            )
        yield text
        return
    slots = device.sm_count * guess.resident
    waves = -(-guess.ctas // slots)
    if guess.ctas < _FILLED * waves * slots and not problem.semantics.key_mask.is_triangular:
        yield (
            f"{guess.ctas} CTAs run in {waves} waves of {slots}: "
            f"{1 - guess.ctas / (waves * slots):.0%} of the slots stay empty"
        )


def passed_over(
    problem: Problem, device: DeviceSpec, expected: Sequence[ExpectedTime], measured: bool
) -> dict[str, str]:
    """Returns the reason for each family that was not chosen, by the name of the family.

    expected: the configs that were compared, the chosen one first.
    measured: whether the times come from a table.
    """
    chosen = expected[0]
    return {
        family.name: _why_not(family, problem, device, expected, measured)
        for family in families(chosen.config.family.operation)
        if family is not chosen.config.family
    }


def _why_not(
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    expected: Sequence[ExpectedTime],
    measured: bool,
) -> str:
    reason = family.unsupported_reason(problem, device)
    if reason is not None:
        return f"does not serve this: {reason}"
    chosen = expected[0]
    best = min(
        (one for one in expected if family.name == one.config.FAMILY),
        key=lambda one: one.ms,
        default=None,
    )
    if best is not None:
        behind = f"{best.ms / chosen.ms - 1:+.0%}" if chosen.ms else "no sooner"
        return f"its best, {best.config}, takes {best.ms:.3g} ms ({behind})"
    return _not_weighed(family, problem, device, measured)


def _not_weighed(family: Family, problem: Problem, device: DeviceSpec, measured: bool) -> str:
    if not family.has_cost_model:
        return "has no cost model and was not measured"
    masked = problem.semantics.key_mask.hides
    d_head = d_head_for(problem)
    kind = problem.operation, problem.gradients
    weighed = candidates(problem.dtype, d_head, device, masked, *kind)
    guesses = [(estimate(c, problem, device).ms, c) for c in weighed if family.name == c.FAMILY]
    if not guesses or not measured:
        return f"none of its kernels fits on {device.name}"
    ms, config = min(guesses, key=lambda guess: guess[0])
    return (
        f"not measured here, and measured configs take precedence over estimates; {config} should "
        f"take {ms:.3g} ms, and `flashsmith tune --problems '{problem}'` measures both families"
    )
