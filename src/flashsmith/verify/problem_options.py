"""Makes the options with which prove() checks a kernel: the values, such as lengths and a window's
limits, that the problem's semantics do not determine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.semantics.signature import check_mask, check_scale, check_softcap
from flashsmith.verify.attention_semantics import NO_WINDOW, Attention, Ranges, Window, unequal_lens


def problem_options(
    problem: Problem,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """The values that the semantics of an attention problem do not determine, as the options of
    prove().

    One packed sequence has the problem's own lengths. The lengths of the others, which are shorter,
    and the key ranges of partial attention are drawn from seed.

    Args:
        problem: what the kernel computes; if packed, ``batch`` is the number of sequences.
        window, softcap: None stands for the typical value of the problem, if its semantics have a
            window or softcap.
        sinks: whether every head has a sink logit.
        seed: for drawing lengths.

    Raises:
        ArgumentError: a window or softcap is given that is not in the semantics or has no effect;
            or a packed problem has no sequence.
    """
    p, semantics = problem, problem.semantics
    if window is not None:
        _check_window(p, window)
    cap = _cap_of(p, softcap)
    options: dict[str, Any] = {
        "causal": semantics.causal,
        "window": window or p.window or NO_WINDOW,
        "softcap": cap,
        "sinks": sinks,
    }
    draw = random.Random(seed)
    if semantics.packed:
        if p.batch < 1:
            raise ArgumentError(f"problem='{p}': packed, give at least one sequence: b1")
        lens_q, lens_k = (unequal_lens(p.batch, longest, draw) for longest in (p.seq_q, p.seq_k))
        options |= {"lens_q": lens_q, "lens_k": lens_k}
    if semantics.partial:
        if sinks:
            raise ArgumentError(f"sinks: '{p}' has none; a merge of its parts may have some")
        rows = sum(options["lens_k"]) if semantics.packed else p.seq_k
        options["ranges"] = drawn_ranges(p.batch, rows, p.seq_k, draw)
    return options


def options_by_limits(
    problem: Problem,
    *,
    causal: bool | None = None,
    window: Window | None = None,
    left: int | None = None,
    right: int | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """problem_options() for an operation whose options have the limits of a window, ``left`` and
    ``right``. They may also be given as ``window``. ``causal`` must agree with the semantics of the
    problem.

    Raises the errors of problem_options(), and ArgumentError if ``causal`` does not agree.
    """
    if causal is not None and causal != problem.semantics.causal:
        raise ArgumentError(
            f"causal={causal}: the mask of '{problem}' is {problem.semantics.mask!r}; leave it out"
        )
    if (left, right) != NO_WINDOW:
        window = (left, right)
    found = problem_options(problem, window=window, **asked)
    found["left"], found["right"] = found.pop("window")
    return found


def attention_of(problem: Problem, options: Mapping[str, Any]) -> Attention:
    """The Attention that these options describe, with its scale."""
    return Attention(
        check_scale(options.get("scale"), problem.d),
        problem.semantics.causal,
        (options.get("left"), options.get("right")),
        options.get("softcap", 0.0),
        options.get("lens_q"),
        options.get("lens_k"),
    )


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have an effect. An option of value 0 has no effect, unless it is a window's
    limit."""
    return {
        name: value
        for name, value in options.items()
        if value or (name in ("left", "right") and value is not None)
    }


def drawn_ranges(batch: int, rows: int, longest: int, draw: random.Random) -> Ranges:
    """Draws a range of keys for each sequence: at most ``longest`` of ``rows`` keys.

    Ranges may overlap. The first sequence gets as many keys as possible; the third gets no keys.
    """
    ranges = [(0, min(rows, longest))]
    for index in range(1, batch):
        begin = draw.randint(0, rows)
        ranges.append((begin, 0 if index == 2 else draw.randint(0, min(rows - begin, longest))))
    return tuple(ranges[:batch])


def _check_window(problem: Problem, window: Window) -> None:
    if not problem.semantics.key_mask.takes_limits:
        raise ArgumentError(f"window={window}: '{problem}' has none; add the word window to it")
    kind = check_mask(False, window).kind
    if kind != "window":
        raise ArgumentError(
            f"window={window}: is the mask '{kind}' and no window; give another limit, or that mask"
        )


def _cap_of(problem: Problem, given: float | None) -> float:
    if given is None:
        return problem.softcap
    if problem.semantics.score.is_plain:
        raise ArgumentError(f"softcap={given}: '{problem}' has none; add the word softcap to it")
    found = check_softcap(given, check_scale(None, problem.d))
    if not found:
        raise ArgumentError(f"softcap={given}: caps nothing; give a number above 0")
    return given
