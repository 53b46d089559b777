"""Scores: what a scaled score becomes before the softmax, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.semantics.expression import Expression, constant, symbol, tanh

# The scaled score of a query and a key, in natural units.
SCORE = symbol("score")


@dataclass(frozen=True)
class Score:
    """What a score becomes before the softmax.

    ``value`` is an expression of SCORE and of the numbers that a call gives, by name: ``numbers``.

    Raises:
        ArgumentError: the expression reads something else.
    """

    name: str
    value: Expression
    numbers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        strange = set(self.value.symbols()) - {"score", *self.numbers}
        if strange:
            raise ArgumentError(
                f"score {self.name}: {', '.join(sorted(strange))} is unknown here; name it in "
                f"numbers, now {self.numbers}"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def is_plain(self) -> bool:
        """Whether the score stays what it is."""
        return self.value == SCORE

    @property
    def factor(self) -> Expression:
        """What multiplies the body, of the numbers alone: kernels multiply the logarithm's base
        by it once."""
        return self._parts[0]

    @property
    def body(self) -> Expression:
        """The value without its factor: what kernels compute of each score."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Expression, Expression]:
        if self.value.function == "multiply":
            one, other = self.value.operands
            if "score" not in one.symbols():
                return one, other
        return constant(1.0), self.value

    @cached_property
    def slope(self) -> Expression:
        """The derivative of the value with respect to the score."""
        return self.value.derivative("score")

    def apply(self, scores: Any, numbers: Mapping[str, float], xp: Any) -> Any:
        """What an array of scores becomes; ``xp`` is numpy or torch."""
        return self.value.evaluate({"score": scores, **numbers}, xp)


def capped_by(cap: float) -> Score:
    """The score of a softcap; 0 is none."""
    return SOFTCAP if cap else PLAIN


PLAIN = Score("plain", SCORE)
SOFTCAP = Score("softcap", symbol("softcap") * tanh(SCORE / symbol("softcap")), ("softcap",))
