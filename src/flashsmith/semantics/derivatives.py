"""Differentiates typed expressions, and builds powers of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashsmith.semantics.typed import (
    FLOAT,
    Typed,
    apply,
    cast,
    typed_constant,
    where,
)

_Slopes = list["Typed | None"]


def derivative(
    expression: Typed, of: Typed, is_uniform: Callable[[Typed], bool] = lambda it: False
) -> Typed:
    """Returns the derivative of a float expression with respect to ``of``, a symbol or a read.

    Points without a derivative get PyTorch's value: 0 for abs at 0, half to each operand for the
    minimum and the maximum of equal values, 1 at the ends of a clamp, 0 at steps. Factors for which
    ``is_uniform`` returns true are multiplied with each other first.
    """
    slopes: dict[Typed, Typed | None] = {}
    for it in expression.parts():
        if it is of:
            slopes[it] = typed_constant(1.0)
            continue
        own = [slopes[part] for part in it.arguments]
        rule = _RULES.get(it.function)
        if it.dtype != FLOAT or rule is None or all(slope is None for slope in own):
            slopes[it] = None
        else:
            found = rule(it, it.arguments, own)
            slopes[it] = None if found is None else _grouped(found, is_uniform)
    found = slopes[expression]
    return typed_constant(0.0) if found is None else found


def _grouped(it: Typed, is_uniform: Callable[[Typed], bool]) -> Typed:
    """Rewrites (x * a) * b as x * (a * b) if a and b are uniform and x is not."""
    if it.function != "multiply":
        return it
    for one, last in (it.arguments, it.arguments[::-1]):
        if one.function != "multiply" or not is_uniform(last):
            continue
        for x, inner in (one.arguments, one.arguments[::-1]):
            if is_uniform(inner) and not is_uniform(x):
                return x * (inner * last)
    return it


def _times(slope: Typed | None, factor: Typed) -> Typed | None:
    if slope is None:
        return None
    if slope.function == "constant" and slope.operands[0] == 1.0:
        return factor
    if slope.function == factor.function == "constant":
        return typed_constant(slope.operands[0] * factor.operands[0])
    return slope * factor


def _sum(one: Typed | None, other: Typed | None) -> Typed | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _negated(slope: Typed | None) -> Typed | None:
    return None if slope is None else -slope


def _zero_if_none(slope: Typed | None) -> Typed:
    return typed_constant(0.0) if slope is None else slope


def _where(condition: Typed, yes: Typed | None, no: Typed | None) -> Typed | None:
    if yes is None and no is None:
        return None
    return where(condition, _zero_if_none(yes), _zero_if_none(no))


def _divide(it: Typed, x: tuple[Typed, ...], d: _Slopes) -> Typed | None:
    rise = _sum(d[0], None if d[1] is None else -(it * d[1]))
    return None if rise is None else rise / x[1]


def _extreme(x: tuple[Typed, ...], d: _Slopes) -> Typed | None:
    """Returns the derivative of a minimum or maximum: d[0] where x[0] < x[1], and the mean of both
    where they are equal."""
    both = _sum(d[0], d[1])
    half = None if both is None else both * 0.5
    return _where(x[0].equals(x[1]), half, _where(x[0] < x[1], d[0], d[1]))


def _remainder(it: Typed, x: tuple[Typed, ...], d: _Slopes) -> Typed | None:
    if d[1] is None:
        return d[0]
    return _sum(d[0], -((x[0] // x[1]) * d[1]))


_Rule = Callable[[Typed, "tuple[Typed, ...]", _Slopes], "Typed | None"]
_RULES: dict[str, _Rule] = {
    "add": lambda it, x, d: _sum(d[0], d[1]),
    "subtract": lambda it, x, d: _sum(d[0], _negated(d[1])),
    "multiply": lambda it, x, d: _sum(_times(d[0], x[1]), _times(d[1], x[0])),
    "divide": _divide,
    "remainder": _remainder,
    "negative": lambda it, x, d: _negated(d[0]),
    "abs": lambda it, x, d: _where(x[0] < 0.0, _negated(d[0]), _where(x[0] > 0.0, d[0], None)),
    "minimum": lambda it, x, d: _extreme(x, d),
    "maximum": lambda it, x, d: _extreme(x[::-1], d),
    "where": lambda it, x, d: _where(x[0], d[1], d[2]),
    "exp": lambda it, x, d: _times(d[0], it),
    "exp2": lambda it, x, d: _times(d[0], it * math.log(2.0)),
    "log": lambda it, x, d: _times(d[0], 1.0 / x[0]),
    "log2": lambda it, x, d: _times(d[0], 1.0 / (x[0] * math.log(2.0))),
    "log1p": lambda it, x, d: _times(d[0], 1.0 / (x[0] + 1.0)),
    "tanh": lambda it, x, d: _times(d[0], 1.0 - it * it),
    "sigmoid": lambda it, x, d: _times(d[0], it * (1.0 - it)),
    "sqrt": lambda it, x, d: _times(d[0], 0.5 / it),
    "rsqrt": lambda it, x, d: _times(d[0], it * it * it * -0.5),
    "sin": lambda it, x, d: _times(d[0], apply("cos", x[0])),
    "cos": lambda it, x, d: _times(d[0], -apply("sin", x[0])),
    "erf": lambda it, x, d: _times(d[0], apply("exp", -(x[0] * x[0])) * (2 / math.sqrt(math.pi))),
    "cast": lambda it, x, d: None if x[0].dtype != FLOAT else _zero_if_none(d[0]),
}


def power(base: Typed, exponent: float) -> Typed:
    """Returns the base raised to a constant power. For small whole exponents it is a product, which
    is rounded as in PyTorch."""
    if exponent == int(exponent) and abs(exponent) <= 16:
        found = _whole_power(base, abs(int(exponent)))
        return found if exponent >= 0 else 1.0 / cast(found, FLOAT)
    value = cast(base, FLOAT)
    if abs(exponent) == 0.5:
        return apply("sqrt" if exponent > 0 else "rsqrt", value)
    return apply("exp2", apply("log2", value) * float(exponent))


def _whole_power(base: Typed, exponent: int) -> Typed:
    if exponent == 0:
        return typed_constant(1, base.dtype)
    half = _whole_power(base, exponent // 2) if exponent > 1 else None
    if half is None:
        return base
    square = half * half
    return square * base if exponent % 2 else square
