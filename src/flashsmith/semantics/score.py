"""Scores, as values. A Score describes how a scaled score is changed before the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import SCORE
from flashsmith.semantics.typed import FLOAT, Typed, apply, typed_constant, typed_symbol

# The symbol for a score divided by the factor.
ARGUMENT = typed_symbol("argument", FLOAT)


_ONE = typed_constant(1.0)


@dataclass(frozen=True)
class Score:
    """A change of scores before the softmax, to factor * function(score / factor).

    function: an expression of ARGUMENT.
    factor: an expression of the numbers that a call passes, such as a softcap; the host multiplies
        log2(e) by it once per call.

    Raises:
        ArgumentError: the function reads anything but ARGUMENT, or the factor reads it.
    """

    name: str
    function: Typed
    factor: Typed = _ONE

    def __post_init__(self) -> None:
        strange = {*self.function.symbols(), *(str(it) for it in self.function.reads())}
        if strange - {"argument"}:
            raise ArgumentError(
                f"score {self.name}: its function reads {', '.join(sorted(strange))}; it may read "
                "ARGUMENT only, and the factor the numbers of a call"
            )
        if not {"argument", "score"}.isdisjoint(self.factor.symbols()) or self.factor.reads():
            raise ArgumentError(
                f"score {self.name}: factor '{self.factor}' is not the same in the whole call; "
                "it may read the numbers of a call only"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that a call passes."""
        return self.factor.symbols()

    @property
    def is_plain(self) -> bool:
        """Whether the score does not change."""
        return self.function is ARGUMENT

    @cached_property
    def value(self) -> Typed:
        """The new score, an expression of SCORE and of the numbers."""
        return self.factor * self.body

    @cached_property
    def body(self) -> Typed:
        """The value without its factor, which kernels compute for each score."""
        return self._at_score(self.function)

    @cached_property
    def slope(self) -> Typed:
        """The derivative of the value with respect to the score."""
        return self._at_score(self.function_slope)

    @cached_property
    def function_slope(self) -> Typed:
        """The derivative of the value as an expression of ARGUMENT. The factor does not occur,
        because it and its inverse cancel."""
        return derivative(self.function, ARGUMENT)

    def _at_score(self, function: Typed) -> Typed:
        return function.replace({ARGUMENT: SCORE / self.factor})

    def apply(self, scores: Any, numbers: Mapping[str, float], xp: Any) -> Any:
        """An array of scores after the change, in the array's own dtype. ``xp`` is numpy or
        torch."""
        return self.value.evaluate({"score": scores, **numbers}, xp=xp, exact=False)


def capped_by(cap: float) -> Score:
    """Returns the Score for a softcap; 0 means no cap."""
    return SOFTCAP if cap else PLAIN


PLAIN = Score("plain", ARGUMENT)
SOFTCAP = Score("softcap", apply("tanh", ARGUMENT), typed_symbol("softcap", FLOAT))
