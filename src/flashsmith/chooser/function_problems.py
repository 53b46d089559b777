"""Problems with functions, as strings: 'b1 s512 h4 d64 bf16 score=alibi mask=causal'.

Such a string is analysed just as attention() analyses a call, so that the kernels built for the
string are the ones that the call uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flashsmith.chooser.functions import (
    CacheSizes,
    CallFunctions,
    ScoreSizes,
    bound_functions,
    bound_over_cache,
)
from flashsmith.chooser.named_functions import Sizes, Wrap, bias_named, mask_named, score_named
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.decode import DECODE
from flashsmith.operations.forward import FORWARD
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.printable import quoted
from flashsmith.runtime.arguments import program_for
from flashsmith.semantics.signature import NO_WINDOW, check_mask
from flashsmith.tracing import BoundProgram
from flashsmith.tracing.binding import POSITIONS

_WORDS = ("score", "mask", "bias", "positions")
# The batch, seq_q and seq_k with which tensors are drawn for problems without sizes. No size is 1,
# because a dimension of size 1 would be broadcast.
ANY_SIZES = (2, 256, 256)


class FunctionProblem(NamedTuple):
    """A problem with functions: the problem's semantics are those that the functions require.

    program: the part of the functions that causal and window cannot express, or None.
    causal, window: the values that the kernel gets.
    asked: the causal and window that the string contains apart from its functions.
    """

    problem: Problem
    functions: CallFunctions
    program: BoundProgram | None
    causal: bool
    window: tuple[int | None, int | None]
    asked: tuple[bool, tuple[int | None, int | None]] = (False, NO_WINDOW)


def has_functions(text: str) -> bool:
    """Whether a problem string names functions."""
    return any(word.partition("=")[0].lower() in _WORDS for word in text.split() if "=" in word)


def parse_with_functions(
    text: str,
    parse: Callable[[str], Problem] = Problem.parse,
    sizes: tuple[int, int, int] | None = None,
    seed: int = 0,
    wrap: Wrap = np.asarray,
) -> FunctionProblem:
    """Parses a problem string: the words 'score=', 'mask=', 'bias=' and 'positions=' itself, and
    all other words with ``parse``.

    ``sizes`` are the batch, seq_q and seq_k with which tensors are drawn; None means those of the
    problem. ``wrap`` converts the drawn NumPy arrays to the tensors that functions get.

    Raises ArgumentError if a word is unknown or doubled, or if the operation takes no functions.
    Also raises the errors of ``parse``, score_named(), mask_named() and tracing.
    """
    given: dict[str, str] = {}
    others = []
    for word in text.split():
        name, is_given, value = word.partition("=")
        if not is_given:
            others.append(word)
        elif name.lower() not in _WORDS or name.lower() in given or not value:
            raise ArgumentError(
                f"problem={quoted(text)}: {quoted(word)}: give score=NAME, mask=NAME, "
                "bias=TENSOR and positions=start or end, each at most once and without spaces"
            )
        else:
            given[name.lower()] = value
    problem = parse(" ".join(others))
    if not given:
        asked = problem.semantics.causal, problem.window or NO_WINDOW
        return FunctionProblem(problem, CallFunctions(), None, *asked, asked)
    batch, seq_q, seq_k = sizes or (problem.batch, problem.seq_q, problem.seq_k)
    drawn = Sizes(batch, problem.heads_q, seq_q, seq_k)
    score, mask, bias = (given.get(name) for name in _WORDS[:3])
    functions = CallFunctions(
        score_mod=None if score is None else score_named(score, drawn, seed, wrap),
        mask=None if mask is None else mask_named(mask, drawn, seed, wrap),
        bias=None if bias is None else bias_named(bias, drawn, seed, wrap),
        positions=given.get("positions", POSITIONS[0]),
    )
    return with_functions(problem, functions, drawn)


def with_functions(problem: Problem, functions: CallFunctions, sizes: Sizes) -> FunctionProblem:
    """Returns the problem of a call with these functions, for tensors of these sizes.

    Raises ArgumentError if the operation takes no functions, and the errors of tracing.
    """
    over_cache = problem.operation in (DECODE.name, LATENT_DECODE.name)
    if not over_cache and problem.operation not in (FORWARD.name, BACKWARD.name):
        raise ArgumentError(
            f"score, mask: given for {problem.operation}; only attention(), its gradients and "
            "attention_with_cache() take functions: leave them out"
        )
    if over_cache and functions.positions != POSITIONS[0]:
        raise ArgumentError(
            f"positions={quoted(functions.positions)}: given for {problem.operation}, where "
            "indices are positions in the whole sequence: leave it out"
        )
    semantics = problem.semantics
    lengths = None if semantics.packed else (sizes.seq_q, sizes.seq_k)
    limits = semantics.causal, problem.window or NO_WINDOW
    of_scores = ScoreSizes(sizes.batch, sizes.heads, lengths)
    if over_cache:
        over = CacheSizes(of_scores, None if lengths is None else sizes.seq_q, sizes.seq_k)
        program, causal, window = bound_over_cache(functions, limits, over)
    else:
        program, causal, window = bound_functions(functions, limits, of_scores)
    mask = check_mask(causal, window)
    changes: dict[str, Any] = {"mask": mask.kind}
    if program is not None:
        # The same kernels compute the gradients of canonical outputs and of all other outputs.
        bits = "" if problem.operation == BACKWARD.name else problem.bits
        changes |= {"program": program_for(program, bits), "uneven": True}
    is_own = (causal, window) == limits
    made = replace(
        problem,
        semantics=replace(semantics, **changes),
        window_keys=problem.window_keys if is_own else mask.window_keys,
    )
    return FunctionProblem(made, functions, program, causal, window, limits)
