"""The operators of typed expressions: their result types, their values on arrays, their signs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

BOOL, INT, LONG, FLOAT = DTYPES = ("bool", "int32", "int64", "float32")
# Operators by the type of their result. 'same' is the operands' own type.
UNARY = {
    **dict.fromkeys(("negative", "abs"), "same"),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid"), FLOAT),
    **dict.fromkeys(
        ("sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "round", "trunc"), FLOAT
    ),
    "not": "same",
}
BINARY = {
    **dict.fromkeys(("add", "subtract", "multiply", "minimum", "maximum"), "same"),
    **dict.fromkeys(("divide", "floor_divide", "remainder"), "same"),
    **dict.fromkeys(("and", "or", "xor", "left_shift", "right_shift"), "same"),
    **dict.fromkeys(("less", "less_equal", "equal", "not_equal"), BOOL),
}
OPERATORS = (*UNARY, *BINARY, "where", "cast")
COMMUTATIVE = {"add", "multiply", "minimum", "maximum", "and", "or", "xor", "equal", "not_equal"}
LOGICAL = ("and", "or", "xor", "not", "equal", "not_equal")
WHOLE = ("and", "or", "xor", "not", "left_shift", "right_shift")
INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "left_shift": "<<",
    "right_shift": ">>",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
}


def _is_float(value: Any) -> bool:
    return "float" in str(value.dtype)


def _floor_divide(xp: Any, a: Any, b: Any) -> Any:
    if _is_float(a):
        return xp.floor_divide(a, b)
    return xp.where(b == 0, 0 * a, xp.floor_divide(a, xp.where(b == 0, 1 + 0 * b, b)))


def _remainder(xp: Any, a: Any, b: Any) -> Any:
    if _is_float(a):
        return xp.remainder(a, b)
    return xp.where(b == 0, 0 * a, xp.remainder(a, xp.where(b == 0, 1 + 0 * b, b)))


def _extreme(xp: Any, a: Any, b: Any, function: str, bound: str) -> Any:
    # torch.minimum() takes no Python numbers.
    if not hasattr(xp, "clamp") or (hasattr(a, "shape") and hasattr(b, "shape")):
        return getattr(xp, function)(a, b)
    array, number = (a, b) if hasattr(a, "shape") else (b, a)
    return xp.clamp(array, **{bound: number})


def _erf(xp: Any, a: Any) -> Any:
    # NumPy has no erf.
    return xp.erf(a) if hasattr(xp, "erf") else xp.asarray(xp.vectorize(math.erf)(a), float)


# Operators whose result for int32 operands may not fit in an int32.
MAY_OVERFLOW = ("add", "subtract", "multiply", "negative", "abs", "floor_divide", "left_shift")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda xp, a, b: a + b,
    "subtract": lambda xp, a, b: a - b,
    "multiply": lambda xp, a, b: a * b,
    "divide": lambda xp, a, b: a / b,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "minimum": lambda xp, a, b: _extreme(xp, a, b, "minimum", "max"),
    "maximum": lambda xp, a, b: _extreme(xp, a, b, "maximum", "min"),
    "and": lambda xp, a, b: a & b,
    "or": lambda xp, a, b: a | b,
    "xor": lambda xp, a, b: a ^ b,
    "left_shift": lambda xp, a, b: a << (b & 31),
    "right_shift": lambda xp, a, b: a >> (b & 31),
    "less": lambda xp, a, b: a < b,
    "less_equal": lambda xp, a, b: a <= b,
    "equal": lambda xp, a, b: a == b,
    "not_equal": lambda xp, a, b: a != b,
    "negative": lambda xp, a: -a,
    "not": lambda xp, a: ~a,
    "where": lambda xp, a, b, c: xp.where(a, b, c),
    "rsqrt": lambda xp, a: 1.0 / xp.sqrt(a),
    "erf": _erf,
    "sigmoid": lambda xp, a: 0.5 * (1.0 + xp.tanh(0.5 * a)),
    **{
        name: lambda xp, a, name=name: getattr(xp, name)(a)
        for name in ("abs", "exp", "exp2", "log", "log2", "log1p", "tanh", "sqrt", "sin", "cos")
    },
    **{
        name: lambda xp, a, name=name: getattr(xp, name)(a)
        for name in ("floor", "ceil", "round", "trunc")
    },
}
