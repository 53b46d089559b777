"""Sizes: the numbers, dtype and semantics of a problem, whatever is computed."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from flashsmith.errors import ArgumentError
from flashsmith.operations.dtype import DType
from flashsmith.operations.semantics import Semantics
from flashsmith.printable import quoted

# The smallest value of every size. A batch may be empty, and so may sequences.
_SMALLEST = {"batch": 0, "seq_q": 0, "seq_k": 0, "heads_q": 1, "heads_k": 1, "d": 1}
# A window and a cap as models have them.
TYPICAL_WINDOW = 1024
TYPICAL_SOFTCAP = 30.0


@dataclass(frozen=True, order=True)
class Sizes:
    """One call's sizes, and what of its semantics is compiled in; what an operation sees of a
    Problem.

    Raises:
        ArgumentError: a size is not a whole number (lengths and batch from 0, the others from 1),
            or the heads do not group.
    """

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    dtype: DType
    semantics: Semantics = field(default_factory=Semantics)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        for name, lowest in _SMALLEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < lowest:
                raise ArgumentError(
                    f"{name}={quoted(value)}: give a whole number, at least {lowest}"
                )
            object.__setattr__(self, name, operator.index(value))
        if self.heads_q % self.heads_k:
            raise ArgumentError(
                f"heads_q={self.heads_q}: must be a multiple of heads_k={self.heads_k}"
            )

    @property
    def window(self) -> tuple[int, int] | None:
        """What stands for a window's (left, right), which are no part of a problem, wherever one is
        measured: the last TYPICAL_WINDOW keys before a query's own, and half of all keys where
        these are fewer. None without a window."""
        if self.semantics.mask != "window":
            return None
        return min(TYPICAL_WINDOW, self.seq_k // 2), 0

    @property
    def softcap(self) -> float:
        """What stands for a cap's value in the same way; 0 without one."""
        return TYPICAL_SOFTCAP if self.semantics.softcap else 0.0
