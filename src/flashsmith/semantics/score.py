"""Scores, as values: how a scaled score changes before the softmax."""

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
    """How a score changes before the softmax.

    ``value`` is an expression of SCORE and of the numbers that a call gives; ``numbers`` are these
    numbers' names.

    Raises:
        ArgumentError: the expression reads another symbol.
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
        """Whether the score stays as it is."""
        return self.value == SCORE

    @property
    def factor(self) -> Expression:
        """The factor of the body, an expression of the numbers alone.

        The host multiplies log2(e) by it once per call.
        """
        return self._parts[0]

    @property
    def body(self) -> Expression:
        """The value without its factor, which kernels compute for each score."""
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
        """The changed scores of an array; ``xp`` is numpy or torch."""
        return self.value.evaluate({"score": scores, **numbers}, xp)


def capped_by(cap: float) -> Score:
    """The Score for a softcap; 0 means no cap."""
    return SOFTCAP if cap else PLAIN


PLAIN = Score("plain", SCORE)
SOFTCAP = Score("softcap", symbol("softcap") * tanh(SCORE / symbol("softcap")), ("softcap",))
