"""The options of a call beside its tensors: scale, softcap, masks, statistics; and their checks."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics import UNLIMITED
from flashsmith.semantics.sizes import window_class

# The kernel takes scale * log2(e) as fp32; outside of these it would become inf, or lose bits.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
# Without a softcap a logit is the score times the scale. Exponents are differences of two logits of
# fp32, in base 2: from 2^28 on rounding alone makes them so wrong that a probability overflows.
# Above this scale a score of 2 is already there.
MAX_UNCAPPED_SCALE = 2.0**27
NO_WINDOW = (None, None)


class ForwardOptions(NamedTuple):
    """The keywords of ``forward`` that define what is computed, as the caller gave them."""

    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    return_lse: Any = False
    return_row_max: Any = False
    partial: Any = False
    seqused_k: Any = None
    k_begin: Any = None


class Mask(NamedTuple):
    """A kind of Semantics.mask, and how many keys before and after a row's own it may see."""

    kind: str
    left: int
    right: int

    @property
    def window_keys(self) -> int:
        """The class of a window, in a Problem's terms; 0 without one."""
        return window_class(self.left, self.right) if self.kind == "window" else 0


NO_MASK = Mask("none", UNLIMITED, UNLIMITED)
CAUSAL = Mask("causal", UNLIMITED, 0)


def check_flag(name: str, value: Any) -> bool:
    """Raises ArgumentError unless ``value`` is a bool."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise ArgumentError(f"{name}={quoted(value)}: allowed are True and False")


def check_mask(causal: Any, window: Any) -> Mask:
    """The mask that both arguments together ask for; causal takes away a window's right side.

    Raises ArgumentError unless causal is a bool and window a pair of None or whole numbers from 0.
    """
    causal = check_flag("causal", causal)
    if window is NO_WINDOW:
        return CAUSAL if causal else NO_MASK
    left, right = (_window_limit(window, limit) for limit in check_pair(window))
    if causal:
        right = 0
    if left < UNLIMITED:
        return Mask("window", left, right)
    if right == 0:
        return CAUSAL
    return NO_MASK if right == UNLIMITED else Mask("window", UNLIMITED, right)


def check_pair(window: Any) -> tuple[Any, Any]:
    """Both limits, unchecked. Raises ArgumentError unless there are two."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(
            f"window={quoted(window)}: give a pair (left, right), each None (no limit) or a whole "
            "number"
        )
    return window[0], window[1]


def _window_limit(window: Any, limit: Any) -> int:
    if limit is None:
        return UNLIMITED
    value = whole_number(limit)
    if value is not None and value >= 0:
        return min(value, UNLIMITED)
    raise ArgumentError(
        f"window={quoted(window)}: {quoted(limit)} is no limit; give a whole number from 0, or "
        "None for none"
    )


def whole_number(value: Any) -> int | None:
    """The number as an int; None for anything else, such as a bool or an array of several."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_scale(scale: Any, d: int) -> float:
    """The scale as a float; None gives 1/sqrt(d). Raises ArgumentError unless finite and > 0."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    value = _real(scale)
    if value is not None and MIN_SCALE <= value <= MAX_SCALE:
        return value
    raise ArgumentError(
        f"scale={quoted(scale)}: give a finite number above 0 that fp32 can hold, or None for "
        "1/sqrt(d)"
    )


def check_softcap(softcap: Any, scale: float) -> float:
    """The cap as a float, 0 for none.

    Raises ArgumentError unless it is finite and >= 0, and scale / softcap a number fp32 can hold;
    without a cap, when the scale is above MAX_UNCAPPED_SCALE.
    """
    value = _real(softcap)
    if value == 0.0:
        if scale > MAX_UNCAPPED_SCALE:
            raise ArgumentError(
                f"scale={quoted(scale)}: at most 2**27 without a softcap, since fp32 cannot "
                "hold the differences of such logits; scale q or k down, or give a softcap"
            )
        return 0.0
    if value is None or not MIN_SCALE <= value <= MAX_SCALE:
        raise ArgumentError(
            f"softcap={quoted(softcap)}: give a finite number above 0 that fp32 can hold, or 0 for "
            "none"
        )
    if not MIN_SCALE <= scale / value <= MAX_SCALE / 4:
        raise ArgumentError(
            f"softcap={quoted(softcap)}: scale / softcap is {scale / value}, which fp32 cannot "
            "hold; "
            "give numbers nearer to each other"
        )
    return value


def _real(value: Any) -> float | None:
    """The number as a float, infinite when it is too large; None for what is no real number."""
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None
