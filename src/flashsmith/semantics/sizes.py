"""Sizes: the part of a Problem that an operation uses, as a protocol to avoid an import cycle."""

from __future__ import annotations

import math
import re
from typing import Protocol

from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.mask import UNLIMITED

# A word of a problem's text that says sizes: b2, d64, s128 or s128:512, h16 or h32:8.
SIZE = re.compile(r"(?:([bd])(\d+)|([sh])(\d+)(?::(\d+))?)", re.ASCII)
# A word that says how many keys a page of a cache has.
PAGE = re.compile(r"page(\d+)", re.ASCII)
# A word that says how many keys a row sees in a window, by classes: powers of two.
WINDOW_KEYS = re.compile(r"window_(\d+)", re.ASCII)
# Smaller windows are computed alike: a tile has as many keys.
SMALLEST_WINDOW = 64
# Words that say which gradients a problem needs where it does not need all of dq, dk and dv.
ONLY_DQ, NO_DQ = GRADIENT_WORDS = ("only_dq", "no_dq")

# The word of problems whose rows have the bits of one order, whichever kernel computes them.
CANONICAL = "canonical"
FREE = "free"


def window_class(left: int, right: int) -> int:
    """The power of two nearest to how many keys a row sees in a window besides its own, at least
    SMALLEST_WINDOW; 0, which is any window, where one side has no limit."""
    if max(left, right) >= UNLIMITED:
        return 0
    return max(SMALLEST_WINDOW, 2 ** round(math.log2(max(1, left + right))))


class Sizes(Protocol):
    """The sizes of one call, its dtype, and what of its semantics is compiled in."""

    @property
    def batch(self) -> int: ...

    @property
    def seq_q(self) -> int: ...

    @property
    def seq_k(self) -> int: ...

    @property
    def heads_q(self) -> int: ...

    @property
    def heads_k(self) -> int: ...

    @property
    def d(self) -> int: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def semantics(self) -> Semantics: ...

    @property
    def page(self) -> int: ...

    @property
    def gradients(self) -> str: ...

    @property
    def bits(self) -> str: ...

    @property
    def window(self) -> tuple[int, int] | None:
        """The limits of a window in measurements; None without one."""
