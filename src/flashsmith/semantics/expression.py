"""Expressions: the formulas of masks and scores, as values that NumPy, PyTorch and CUDA can run.

An Expression is built with Python's operators from symbols and numbers. The expression's value, C++
text and derivative all come from one tree, so they cannot disagree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted

Number = int | float


@dataclass(frozen=True)
class _Function:
    """How to compute an operator on numbers, on a library's arrays, and in C++ ({0}, {1}, ...).

    ``arrays`` is None where ``numbers``, Python's operator, accepts arrays too.
    """

    numbers: Callable[..., Any]
    cpp: str
    arrays: Callable[..., Any] | None = None


_FUNCTIONS = {
    "add": _Function(operator.add, "({0} + {1})"),
    "subtract": _Function(operator.sub, "({0} - {1})"),
    "multiply": _Function(operator.mul, "({0} * {1})"),
    "divide": _Function(operator.truediv, "({0} / {1})"),
    "negative": _Function(operator.neg, "(-{0})"),
    "less_equal": _Function(operator.le, "({0} <= {1})"),
    "minimum": _Function(min, "min({0}, {1})", lambda xp, a, b: xp.where(a <= b, a, b)),
    "maximum": _Function(max, "max({0}, {1})", lambda xp, a, b: xp.where(b <= a, a, b)),
    "where": _Function(
        lambda condition, yes, no: yes if condition else no,
        "({0} ? {1} : {2})",
        lambda xp, condition, yes, no: xp.where(condition, yes, no),
    ),
    "exp": _Function(math.exp, "expf({0})", lambda xp, a: xp.exp(a)),
    "tanh": _Function(math.tanh, "tanhf({0})", lambda xp, a: xp.tanh(a)),
}


@dataclass(frozen=True)
class Expression:
    """A symbol, a number, or a function of expressions.

    ``function`` is 'symbol', 'constant', or one of add, subtract, multiply, divide, negative,
    minimum, maximum, less_equal, where, exp and tanh; ``operands`` are a symbol's name, a
    constant's value, or the function's arguments. Use symbol() and Python's operators.
    """

    function: str
    operands: tuple[Any, ...]

    def __add__(self, other: Expression | Number) -> Expression:
        return _call("add", self, other)

    def __radd__(self, other: Number) -> Expression:
        return _call("add", other, self)

    def __sub__(self, other: Expression | Number) -> Expression:
        return _call("subtract", self, other)

    def __rsub__(self, other: Number) -> Expression:
        return _call("subtract", other, self)

    def __mul__(self, other: Expression | Number) -> Expression:
        return _call("multiply", self, other)

    def __rmul__(self, other: Number) -> Expression:
        return _call("multiply", other, self)

    def __truediv__(self, other: Expression | Number) -> Expression:
        return _call("divide", self, other)

    def __rtruediv__(self, other: Number) -> Expression:
        return _call("divide", other, self)

    def __neg__(self) -> Expression:
        return _call("negative", self)

    def __le__(self, other: Expression | Number) -> Expression:
        return _call("less_equal", self, other)

    def __ge__(self, other: Expression | Number) -> Expression:
        return _call("less_equal", other, self)

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"'{self}' has no truth value before its symbols have values; write where(condition, "
            "a, b) for a choice"
        )

    def __str__(self) -> str:
        return self.cpp({name: name for name in self.symbols()})

    def symbols(self) -> tuple[str, ...]:
        """The names of the expression's symbols, without duplicates, in order of appearance."""
        return tuple(dict.fromkeys(self._symbols()))

    def _symbols(self) -> Iterator[str]:
        if self.function == "symbol":
            yield self.operands[0]
        elif self.function != "constant":
            for operand in self.operands:
                yield from operand._symbols()

    def evaluate(self, values: Mapping[str, Any], xp: Any = None) -> Any:
        """The value, with symbols taken from ``values``.

        Values are numbers or, with ``xp`` (numpy or torch), arrays whose shapes broadcast.

        Raises ArgumentError for a symbol without a value.
        """
        if self.function == "symbol":
            if self.operands[0] not in values:
                raise ArgumentError(
                    f"'{self}': no value for {quoted(self.operands[0])}; given are "
                    f"{', '.join(values) or 'none'}"
                )
            return values[self.operands[0]]
        if self.function == "constant":
            return self.operands[0]
        found = [operand.evaluate(values, xp) for operand in self.operands]
        function = _FUNCTIONS[self.function]
        is_array = xp is not None and any(hasattr(value, "shape") for value in found)
        if function.arrays is None or not is_array:
            return function.numbers(*found)
        return function.arrays(xp, *found)

    def cpp(self, names: Mapping[str, str]) -> str:
        """The C++ expression; ``names`` maps each symbol to a C++ name."""
        if self.function == "symbol":
            return names[self.operands[0]]
        if self.function == "constant":
            return _literal(self.operands[0])
        return _FUNCTIONS[self.function].cpp.format(*(it.cpp(names) for it in self.operands))

    def replace(self, part: Expression, other: Expression) -> Expression:
        """The expression with every ``part`` replaced by ``other``."""
        if self == part:
            return other
        if self.function in ("symbol", "constant"):
            return self
        return _call(self.function, *(it.replace(part, other) for it in self.operands))

    def derivative(self, name: str) -> Expression:
        """The derivative with respect to the symbol ``name``.

        At a kink, minimum and maximum take the derivative of their second operand. A condition's
        derivative is 0.
        """
        if self.function == "symbol":
            return constant(1 if self.operands[0] == name else 0)
        if self.function in ("constant", "less_equal"):
            return constant(0)
        slopes = [operand.derivative(name) for operand in self.operands]
        return _DERIVATIVES[self.function](self, self.operands, slopes)


_Rule = Callable[[Expression, tuple[Any, ...], list[Expression]], Expression]
_DERIVATIVES: dict[str, _Rule] = {
    "add": lambda _, x, d: d[0] + d[1],
    "subtract": lambda _, x, d: d[0] - d[1],
    "multiply": lambda _, x, d: d[0] * x[1] + x[0] * d[1],
    "divide": lambda it, x, d: (d[0] - it * d[1]) / x[1],
    "negative": lambda _, x, d: -d[0],
    "minimum": lambda _, x, d: where(x[1] <= x[0], d[1], d[0]),
    "maximum": lambda _, x, d: where(x[0] <= x[1], d[1], d[0]),
    "where": lambda _, x, d: where(x[0], d[1], d[2]),
    "exp": lambda it, x, d: it * d[0],
    "tanh": lambda it, x, d: (1 - it * it) * d[0],
}


def symbol(name: str) -> Expression:
    """A value that is known only when the expression is computed."""
    return Expression("symbol", (name,))


def constant(value: Number) -> Expression:
    """A number. Raises ArgumentError for anything else, including NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(f"value={quoted(value)}: give a finite int or float, or an Expression")
    return Expression("constant", (value,))


def minimum(one: Expression | Number, other: Expression | Number) -> Expression:
    """The smaller of two values."""
    return _call("minimum", one, other)


def maximum(one: Expression | Number, other: Expression | Number) -> Expression:
    """The larger of two values."""
    return _call("maximum", one, other)


def where(condition: Expression, yes: Expression | Number, no: Expression | Number) -> Expression:
    """``yes`` where the condition holds, else ``no``."""
    yes, no = _expression(yes), _expression(no)
    return yes if yes == no else _call("where", condition, yes, no)


def exp(value: Expression) -> Expression:
    """e to the power of a value."""
    return _call("exp", value)


def tanh(value: Expression) -> Expression:
    """The hyperbolic tangent."""
    return _call("tanh", value)


def _expression(value: Expression | Number) -> Expression:
    return value if isinstance(value, Expression) else constant(value)


def _call(function: str, *operands: Expression | Number) -> Expression:
    given = tuple(map(_expression, operands))
    simple = _simplified(function, given)
    return Expression(function, given) if simple is None else simple


def _simplified(function: str, given: tuple[Expression, ...]) -> Expression | None:
    """A simpler equal expression, or None.

    Derivatives would otherwise be full of sums with 0, products with 0 and 1, fractions that
    cancel, and functions of constants.
    """
    zero, one = constant(0), constant(1)
    if all(it.function == "constant" for it in given) and function not in ("less_equal", "where"):
        return constant(_FUNCTIONS[function].numbers(*(it.operands[0] for it in given)))
    if function == "add" and zero in given:
        return given[0] if given[1] == zero else given[1]
    if function == "subtract" and given[1] == zero:
        return given[0]
    if function == "multiply" and zero in given:
        return zero
    if function in ("multiply", "divide") and given[1] == one:
        return given[0]
    if function == "multiply" and given[0] == one:
        return given[1]
    if function == "multiply" and given[1].function == "divide":
        numerator, denominator = given[1].operands
        return numerator if given[0] == denominator else given[0] * numerator / denominator
    if function == "divide" and given[0] == zero:
        return zero
    return None


def _literal(value: Number) -> str:
    """A C++ literal: an int, or a float that reads back as the same fp32 number."""
    return str(value) if isinstance(value, int) else f"{value!r}f"
