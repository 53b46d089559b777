"""Why a choice is of its family and not of another: sentences for whoever asks what was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from flashsmith.chooser.candidates import candidates
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.evidence import Expected
from flashsmith.families import DeviceSpec, Family, Problem, d_head_for, families


def passed_over(
    problem: Problem, device: DeviceSpec, expected: Sequence[Expected], measured: bool
) -> dict[str, str]:
    """The families that were not chosen, each with why.

    expected: what was weighed, the choice first. measured: whether its times are of a table.
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
    expected: Sequence[Expected],
    measured: bool,
) -> str:
    reason = family.unserved(problem, device)
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
    masked = problem.semantics.mask != "none"
    d_head = d_head_for(problem)
    weighed = candidates(problem.dtype, d_head, device, masked, problem.operation)
    guesses = [(estimate(c, problem, device).ms, c) for c in weighed if family.name == c.FAMILY]
    if not guesses or not measured:
        return f"none of its kernels fits on {device.name}"
    ms, config = min(guesses, key=lambda guess: guess[0])
    return (
        f"not measured here, and what was measured goes before what is estimated; {config} should "
        f"take {ms:.3g} ms, and `flashsmith tune --problems '{problem}'` measures both families"
    )
