"""Attention: the function of q, k and v that a forward pass computes, described by forward()'s
options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from flashsmith.semantics import CAUSAL, NONE, UNLIMITED, WINDOW, Mask, Score
from flashsmith.semantics.score import capped_by

Lens = tuple[int, ...]
Window = tuple[int | None, int | None]
# For each sequence, the first key that partial attention uses and the number of keys used.
Ranges = tuple[tuple[int, int], ...]
NO_WINDOW: Window = (None, None)


class Sequence(NamedTuple):
    """One sequence of a batch.

    ``q`` and ``k`` are the indices of its rows in tensors (batch, seq, heads, d) or, if packed,
    (total, heads, d).
    """

    q: tuple[int | slice, ...]
    k: tuple[int | slice, ...]


@dataclass(frozen=True)
class Attention:
    """What a forward pass computes; the defaults are plain attention.

    ``lens_q`` and ``lens_k`` are the lengths of packed sequences, None for dense tensors. Masks are
    aligned to the bottom right: query i of seq_q is at key position i + seq_k - seq_q. ``ranges``,
    for partial attention, has each sequence's range of keys: the index in k of the range's first
    key, and the number of keys. ``program``, a BoundProgram, has the functions that change scores
    and hide keys, and the tensors and numbers that these functions read.
    """

    scale: float
    causal: bool = False
    window: Window = NO_WINDOW
    softcap: float = 0.0
    lens_q: Lens | None = None
    lens_k: Lens | None = None
    ranges: Ranges | None = None
    program: Any = None

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed into tensors of rank 3."""
        return self.lens_q is not None

    @property
    def mask(self) -> Mask:
        """The mask, which determines the keys that each row sees. A window may also be causal."""
        if self.window != NO_WINDOW:
            return WINDOW
        return CAUSAL if self.causal else NONE

    @property
    def masked(self) -> bool:
        """Whether the mask may hide a key from a query."""
        bound = self.program
        return self.mask.hides or (bound is not None and bound.program.mask is not None)

    @property
    def score(self) -> Score:
        """The function that is applied to scaled scores before the softmax."""
        return capped_by(self.softcap)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that the score function reads, by name."""
        return dict.fromkeys(self.score.numbers, self.softcap)

    def visible_keys(
        self, rows: np.ndarray, seq_q: int, seq_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each of ``rows``, the first key that the row sees and the key after the last one that
        it sees. Both are equal if the row sees no key."""
        left, right = (UNLIMITED if limit is None else limit for limit in self.window)
        right = 0 if self.causal else right
        return self.mask.keys(rows + (seq_k - seq_q), seq_k, left, right, np)

    def placed(self, to_device: Callable[[np.ndarray], Any]) -> Attention:
        """A copy of this object whose program has its tensors on an engine's device."""
        if self.program is None:
            return self
        tensors = tuple(map(to_device, self.program.tensors))
        return replace(self, program=self.program._replace(tensors=tensors))

    def changed_by_program(self, scores: Any, at: Mapping[str, Any], xp: Any) -> Any:
        """The scores that the program computes from scores in natural units. ``at`` has the indices
        b, h, q and k and the lengths seq_q and seq_k, as arrays that broadcast with the scores."""
        bound = self.program
        if bound is None or bound.program.score is None:
            return scores
        values = {**at, "score": scores, **self._program_numbers}
        return bound.program.score.evaluate(values, self._program_tensors, xp)

    def slope_of_program(self, scores: Any, at: Mapping[str, Any], xp: Any) -> Any:
        """The derivative of changed_by_program() with respect to the scores; None if it is 1."""
        bound = self.program
        if bound is None or bound.program.slope is None:
            return None
        values = {**at, "score": scores, **self._program_numbers}
        return bound.program.slope.evaluate(values, self._program_tensors, xp)

    def seen_by_program(self, at: Mapping[str, Any], xp: Any) -> Any:
        """For each pair of a row and a key, whether the program leaves the key visible to the row.
        None if the program has no mask."""
        bound = self.program
        if bound is None or bound.program.mask is None:
            return None
        values = {**at, **self._program_numbers}
        return bound.program.mask.evaluate(values, self._program_tensors, xp)

    @property
    def _program_numbers(self) -> dict[str, Any]:
        names = (it.name for it in self.program.program.numbers)
        return dict(zip(names, self.program.numbers, strict=True))

    @property
    def _program_tensors(self) -> dict[str, Any]:
        names = (it.name for it in self.program.program.reads)
        return dict(zip(names, self.program.tensors, strict=True))

    def sequences(self, batch: int) -> Iterator[Sequence]:
        """The sequences of a batch: the packed sequences, or ``batch`` dense ones."""
        keys = None if self.ranges is None else [slice(a, a + n) for a, n in self.ranges]
        if self.lens_q is None or self.lens_k is None:
            for b in range(batch):
                yield Sequence((b,), (b,) if keys is None else (b, keys[b]))
            return
        own = row_slices(self.lens_k) if keys is None else keys
        for rows_q, rows_k in zip(row_slices(self.lens_q), own, strict=True):
            yield Sequence((rows_q,), (rows_k,))

    def __str__(self) -> str:
        """Describes the differences from plain attention, for example 'causal, softcap 30, lens
        3+0+64:5+7+64'."""
        words = ["causal"] if self.causal else []
        if self.window != NO_WINDOW:
            words.append("window ({}, {})".format(*self.window))
        words += [f"{name} {value:g}" for name, value in self.numbers.items()]
        if self.lens_q is not None and self.lens_k is not None:
            words.append(
                f"lens {'+'.join(map(str, self.lens_q))}:{'+'.join(map(str, self.lens_k))}"
            )
        if self.program is not None:
            words.append(str(self.program.program))
        if self.ranges is not None:
            words.append("keys " + " ".join(f"{a}+{n}" for a, n in self.ranges))
        return ", ".join(words) or "plain"


def offsets(lens: Lens) -> np.ndarray:
    """The cu_seqlens of packed sequences with these lengths: int32 offsets from 0 to the total
    length."""
    return np.array([0, *itertools.accumulate(lens)], dtype=np.int32)


def row_slices(lens: Lens) -> list[slice]:
    """For each packed sequence, the slice of its rows."""
    cu_seqlens = offsets(lens).tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(cu_seqlens)]


def unequal_lens(count: int, longest: int, draw: random.Random, empty: int = 0) -> Lens:
    """Draws ``count`` lengths whose maximum is ``longest``, adds ``empty`` zeros for sequences
    without rows, and returns all in random order."""
    others = (draw.randint(min(1, longest), longest) for _ in range(count - 1))
    lens = [longest, *others, *[0] * empty]
    draw.shuffle(lens)
    return tuple(lens)
