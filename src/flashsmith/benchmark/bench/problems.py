"""The problems of a benchmark: the default shapes, and the product of what is asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, Semantics
from flashsmith.operations import DEFAULT
from flashsmith.printable import quoted
from flashsmith.untrusted import whole_number

SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
# Heads such that heads times d is 2048, as models have them, for the head sizes that divide it.
_HEADS = {64: 32, 128: 16, 256: 8}
_OTHER_HEADS = 16
# The work of a cell stays bounded: so large a batch up to so long a sequence.
_BATCHES = ((4096, 16), (8192, 8), (16384, 4), (32768, 2))


def default_problem(
    d: int,
    seq: int,
    dtype: DType,
    *,
    causal: bool = False,
    heads: tuple[int, int] | None = None,
    packed: bool = False,
    operation: str = DEFAULT,
) -> Problem:
    """The problem that stands for a head size and a length: batch 16 up to 4096, 8 up to 8192, 4 up
    to 16384; heads 16, or 32 for d 64 and 8 for d 256, unless given as (heads_q, heads_k).

    Raises ArgumentError when the sizes make no problem.
    """
    heads_q, heads_k = heads or (default_heads(d),) * 2
    batch = next((batch for longest, batch in _BATCHES if seq <= longest), 1)
    semantics = Semantics("causal" if causal else "none", packed=packed, uneven=packed)
    return Problem(batch, seq, seq, heads_q, heads_k, d, dtype, semantics, operation)


def default_heads(d: int) -> int:
    """How many heads a problem of that head size has."""
    return _HEADS.get(d, _OTHER_HEADS)


@dataclass(frozen=True)
class Shapes:
    """What `flashsmith bench` is asked for. ``gqa``: '8' (heads of k and v) or '32:8'."""

    d_heads: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtypes: tuple[DType, ...]
    masks: tuple[bool, ...]  # causal or not
    gqa: str | None = None
    packed: bool = False
    operation: str = DEFAULT

    def problems(self) -> tuple[Problem, ...]:
        """The product. Raises ArgumentError when the sizes make no problem."""
        product = itertools.product(self.d_heads, self.dtypes, self.masks, self.seq_lens)
        return tuple(
            default_problem(
                d,
                seq,
                dtype,
                causal=causal,
                heads=self._heads(d),
                packed=self.packed,
                operation=self.operation,
            )
            for d, dtype, causal, seq in product
        )

    def _heads(self, d: int) -> tuple[int, int] | None:
        if self.gqa is None:
            return None
        first, colon, second = self.gqa.partition(":")
        heads_q = whole_number(first) if colon else default_heads(d)
        heads_k = whole_number(second if colon else first)
        if not heads_q or not heads_k:
            raise ArgumentError(
                f"gqa={quoted(self.gqa)}: give the heads of k and v, as 8, or those of q as "
                "well, as 32:8"
            )
        return heads_q, heads_k
