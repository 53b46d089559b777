"""Sizes: the part of a Problem that an operation uses, as a protocol to avoid an import cycle."""

from __future__ import annotations

import re
from typing import Protocol

from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType

# A word of a problem's text that says sizes: b2, d64, s128 or s128:512, h16 or h32:8.
SIZE = re.compile(r"(?:([bd])(\d+)|([sh])(\d+)(?::(\d+))?)", re.ASCII)
# A word that says how many keys a page of a cache has.
PAGE = re.compile(r"page(\d+)", re.ASCII)
# Words that say which gradients a problem needs where it does not need all of dq, dk and dv.
ONLY_DQ, NO_DQ = GRADIENT_WORDS = ("only_dq", "no_dq")


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
    def window(self) -> tuple[int, int] | None:
        """The limits of a window in measurements; None without one."""
