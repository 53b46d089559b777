"""A problem in prove()'s terms: values for all that its semantics leave open."""

from __future__ import annotations

import random
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.runtime.forward_options import check_mask, check_scale, check_softcap
from flashsmith.verify.attention_semantics import NO_WINDOW, Window, unequal_lens


def problem_options(
    problem: Problem,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Values for all that an attention problem's semantics leave open, as prove()'s keywords.

    Packed, one sequence has the problem's lengths, and the others shorter ones, drawn from seed.

    Args:
        problem: what the kernel computes; packed, ``batch`` is how many sequences.
        window, softcap: None is the problem's typical one, if its semantics have one.
        sinks: whether every head has a sink logit.
        seed: of the lengths.

    Raises:
        ArgumentError: a window or a softcap where the semantics have none, one that masks or caps
        nothing, or packed without a sequence.
    """
    p, semantics = problem, problem.semantics
    if window is not None:
        _check_window(p, window)
    if softcap is not None:
        _check_softcap(p, softcap)
    options = {
        "causal": semantics.mask == "causal",
        "window": window or p.window or NO_WINDOW,
        "softcap": p.softcap if softcap is None else softcap,
        "sinks": sinks,
    }
    if not semantics.packed:
        return options
    if p.batch < 1:
        raise ArgumentError(f"problem='{p}': packed, give at least one sequence: b1")
    draw = random.Random(seed)
    lens_q, lens_k = (unequal_lens(p.batch, longest, draw) for longest in (p.seq_q, p.seq_k))
    return options | {"lens_q": lens_q, "lens_k": lens_k}


def _check_window(problem: Problem, window: Window) -> None:
    if problem.semantics.mask != "window":
        raise ArgumentError(f"window={window}: '{problem}' has none; add the word window to it")
    kind = check_mask(False, window).kind
    if kind != "window":
        raise ArgumentError(
            f"window={window}: is the mask '{kind}' and no window; give another limit, or that mask"
        )


def _check_softcap(problem: Problem, softcap: float) -> None:
    if not problem.semantics.softcap:
        raise ArgumentError(f"softcap={softcap}: '{problem}' has none; add the word softcap to it")
    if not check_softcap(softcap, check_scale(None, problem.d)):
        raise ArgumentError(f"softcap={softcap}: caps nothing; give a number above 0")
