"""Sizes: the part of a Problem that an operation uses. Sizes is a protocol, which avoids an import
cycle."""

from __future__ import annotations

import math
import re
from typing import Protocol

from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.mask import UNLIMITED

# A size in a problem string: b2, s128 or s128:512, h16 or h32:8, d64 or d192:128.
SIZE = re.compile(r"(?:(b)(\d+)|([shd])(\d+)(?::(\d+))?)", re.ASCII)
# The number of keys per cache page.
PAGE = re.compile(r"page(\d+)", re.ASCII)
# The class of a window: how many keys a row sees, as a power of two.
WINDOW_KEYS = re.compile(r"window_(\d+)", re.ASCII)
# Smaller windows take as long as this one, because a tile has this many keys.
SMALLEST_WINDOW = 64
# The words of problem strings for problems that need only some of dq, dk and dv.
ONLY_DQ, NO_DQ = GRADIENT_WORDS = ("only_dq", "no_dq")

# The word of problem strings for problems whose rows must be summed in one fixed order, so that all
# kernels give the same bits.
CANONICAL = "canonical"
FREE = "free"


def window_class(left: int, right: int) -> int:
    """Returns the class of a window: the power of two nearest to the number of keys that a row sees
    in addition to its own.

    The class is at least SMALLEST_WINDOW. The class is 0, which means any window, if the window has
    no limit on one side.
    """
    if max(left, right) >= UNLIMITED:
        return 0
    return max(SMALLEST_WINDOW, 2 ** round(math.log2(max(1, left + right))))


class Sizes(Protocol):
    """The sizes of one call, its dtype and its compiled-in semantics."""

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
    def d_v(self) -> int: ...

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
    def cache_format(self) -> CacheFormat: ...

    @property
    def window(self) -> tuple[int, int] | None:
        """The limits of the window with which the problem is measured; None if there is no
        window."""
