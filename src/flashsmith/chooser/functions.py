"""The score and mask functions of a call, as a program and a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.signature import NO_WINDOW, check_mask
from flashsmith.tracing import BoundProgram, bind
from flashsmith.tracing.binding import BoundFunctions
from flashsmith.tracing.block_masks import is_block_mask, mask_of_blocks
from flashsmith.tracing.captures import is_array

# A call's program, causal and window.
Bound = tuple[BoundProgram | None, bool, tuple[int | None, int | None]]


def lengths_of(q: Any, k: Any) -> tuple[int, int] | None:
    """seq_q and seq_k of tensors that are not packed; None for tensors that are refused later."""
    shapes = [tuple(getattr(it, "shape", ())) for it in (q, k)]
    if any(len(shape) != 4 for shape in shapes):
        return None
    return int(shapes[0][1]), int(shapes[1][1])


def bound_functions(
    score_mod: Callable[..., Any] | None,
    masks: tuple[Any, ...],
    limits: tuple[Any, Any],
    lengths: tuple[int, int] | None,
    positions: str,
) -> Bound:
    """A call's program, causal and window. ``limits`` are the caller's causal and window, which
    hide keys as well.

    Masks that are a causal mask or a window become one, so that its kernels serve them.

    Raises ArgumentError and TraceError as tracing.bind() does.
    """
    own = [mask_of_blocks(it, lengths, positions) if is_block_mask(it) else it for it in masks]
    return _limited(bind(score_mod, tuple(own), lengths, positions), limits)


def bound_over_cache(
    score_mod: Callable[..., Any] | None, masks: tuple[Any, ...], limits: tuple[Any, Any]
) -> Bound:
    """The same for attention over a cache, where indices are positions in the whole sequence.

    Raises ArgumentError also for masks whose rows are queries of the call.
    """
    for it in masks:
        if is_block_mask(it) or is_array(it):
            kind = "BlockMask" if is_block_mask(it) else "tensor"
            raise ArgumentError(
                f"mask: a {kind}, whose rows count the queries of one call; over a cache a query's "
                "index is its position in the sequence: give a function, or a value of "
                "flashsmith.masks such as masks.blocks()"
            )
    return _limited(bind(score_mod, masks, None, "end"), limits)


def _limited(found: BoundFunctions, limits: tuple[Any, Any]) -> Bound:
    """The program, and causal and window, which also hide what the functions' limits hide."""
    causal, window = limits
    if found.left is None and found.right is None:
        return found.program, causal, window
    asked = check_mask(causal, window)
    left = min(asked.left, UNLIMITED if found.left is None else found.left)
    right = min(asked.right, UNLIMITED if found.right is None else found.right)
    if left == UNLIMITED and right == 0:
        return found.program, True, NO_WINDOW
    window = None if left == UNLIMITED else left, None if right == UNLIMITED else right
    return found.program, False, window
