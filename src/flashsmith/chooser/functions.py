"""The score and mask functions of a call, as a program and a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.signature import NO_WINDOW, check_mask
from flashsmith.tracing import BoundProgram, bind
from flashsmith.tracing.block_masks import is_block_mask, mask_of_blocks


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
) -> tuple[BoundProgram | None, bool, tuple[int | None, int | None]]:
    """A call's program, causal and window. ``limits`` are the caller's causal and window, which
    hide keys as well.

    Masks that are a causal mask or a window become one, so that its kernels serve them.

    Raises ArgumentError and TraceError as tracing.bind() does.
    """
    own = [mask_of_blocks(it, lengths, positions) if is_block_mask(it) else it for it in masks]
    found = bind(score_mod, tuple(own), lengths, positions)
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
