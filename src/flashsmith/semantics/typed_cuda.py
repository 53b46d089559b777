"""Generates CUDA C++ for typed expressions: statements that define subexpressions, and an
expression for the value."""

from __future__ import annotations

import math

from flashsmith.errors import ArgumentError
from flashsmith.semantics.typed import BOOL, FLOAT, INT, LONG, Typed, all_parts

TYPES = {BOOL: "bool", INT: "int", LONG: "int64_t", FLOAT: "float"}
# Operators for which C++ gives the same results as PyTorch, as long as no int overflows.
ARITHMETIC = {"add": "+", "subtract": "-", "multiply": "*"}
INFIX = {
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
_FUNCTIONS = {"minimum": "min", "maximum": "max"}


class CudaPrinter:
    """Prints the body of one function, using only operators that C++ itself has.

    Symbols keep their names in C++. Ints must not overflow.
    """

    def __init__(self) -> None:
        self._texts: dict[Typed, str] = {}

    def statements(self, root: Typed) -> tuple[list[str], str]:
        """Definitions of the parts that are used more than once, and the root's value.

        Raises: ArgumentError: the expression has an operator that this printer does not support.
        """
        uses: dict[Typed, int] = {}
        for it in all_parts([root]):
            for part in it.arguments:
                uses[part] = uses.get(part, 0) + 1
        lines: list[str] = []
        for it in all_parts([root]):
            text = self._text(it)
            if uses.get(it, 0) > 1 and not self._is_name(it):
                name = f"x{len(lines)}"
                lines.append(f"const {TYPES[it.dtype]} {name} = {text};")
                text = name
            self._texts[it] = text
        return lines, self._texts[root]

    def _is_name(self, it: Typed) -> bool:
        """Whether a part's C++ is so short that a variable for it would not help."""
        return it.function in ("constant", "symbol")

    def _text(self, it: Typed) -> str:
        if it.function == "symbol":
            return self._symbol(it)
        if it.function == "constant":
            return self._constant(it)
        parts = [self._texts[part] for part in it.arguments]
        if it.function == "where":
            return f"({parts[0]} ? {parts[1]} : {parts[2]})"
        return self._operator(it, parts)

    def _symbol(self, it: Typed) -> str:
        return str(it.operands[0])

    def _constant(self, it: Typed) -> str:
        (value,) = it.operands
        # The keys of libraries contain this string, so 1.0 stays '1', as in older keys.
        return str(int(value)) if it.dtype == FLOAT and value in (0, 1) else literal(it)

    def _operator(self, it: Typed, parts: list[str]) -> str:
        sign = INFIX.get(it.function) or ARITHMETIC.get(it.function)
        if sign is not None:
            return f"({parts[0]} {sign} {parts[1]})"
        if it.function == "negative":
            return f"(-{parts[0]})"
        if it.function == "not":
            return f"({'!' if it.dtype == BOOL else '~'}{parts[0]})"
        if it.function in _FUNCTIONS and it.dtype == INT:
            return f"{_FUNCTIONS[it.function]}({', '.join(parts)})"
        allowed = (*ARITHMETIC, *INFIX, "negative", "not", *_FUNCTIONS, "where")
        raise ArgumentError(
            f"'{it}': kernels do not compute '{it.function}' in masks and scores; allowed are "
            f"{', '.join(allowed)}. Write a mask_mod or score_mod function for others"
        )


def literal(it: Typed) -> str:
    """Returns the C++ text of a constant, which reads back as the same number."""
    (value,) = it.operands
    if it.dtype == BOOL:
        return bool_literal(value)
    if it.dtype == FLOAT:
        if math.isnan(value):
            return "NAN"
        if math.isinf(value) or abs(value) >= 2.0**128 * (1 - 2.0**-25):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"{value!r}f" if math.copysign(1, value) > 0 else f"({value!r}f)"
    if it.dtype == LONG:
        return f"int64_t({value}LL)" if value != -(2**63) else "INT64_MIN"
    return f"({value})" if value < 0 else str(value)


def bool_literal(value: bool) -> str:
    """Returns the C++ text of a bool."""
    return "true" if value else "false"
