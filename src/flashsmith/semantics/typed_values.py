"""The values of typed expressions on numbers and on NumPy's and PyTorch's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.typed import BOOL, FLOAT, INT, LONG, Typed, typed_constant


def evaluate(
    expression: Typed, values: Mapping[str, Any], tensors: Mapping[str, Any], xp: Any = None
) -> Any:
    """The value of an expression: float64 for floats, exact two's complement for ints.

    ``values`` gives numbers or arrays for the symbols, ``tensors`` arrays for the tensors that the
    expression reads; arrays broadcast. ``xp`` is numpy or torch; None means numpy.

    Raises ArgumentError for a symbol or a tensor without a value.
    """
    xp = np if xp is None else xp
    done: dict[Typed, Any] = {}
    with np.errstate(all="ignore"):
        for it in expression.parts():
            done[it] = _value(it, done, values, tensors, xp)
    return done[expression]


def _value(
    it: Typed,
    done: Mapping[Typed, Any],
    values: Mapping[str, Any],
    tensors: Mapping[str, Any],
    xp: Any,
) -> Any:
    if it.function == "symbol":
        return _as_dtype(_given(it.operands[0], values), it.dtype, xp)
    if it.function == "constant":
        return _as_dtype(it.operands[0], it.dtype, xp)
    if it.function == "read":
        name, _, *indices = it.operands
        return _read(_given(name, tensors), [done[index] for index in indices], it.dtype, xp)
    found = [done[part] for part in it.arguments]
    if it.function == "cast":
        return _cast(found[0], it.arguments[0].dtype, it.dtype, xp)
    result = _FUNCTIONS[it.function](xp, *found)
    return _wrapped(result) if it.dtype == INT and it.function in _MAY_OVERFLOW else result


def _given(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values:
        raise ArgumentError(
            f"no value for {quoted(name)}; given are {', '.join(values) or 'none'}: add one"
        )
    return values[name]


def _as_dtype(value: Any, dtype: str, xp: Any) -> Any:
    kind = {BOOL: xp.bool_ if xp is np else xp.bool, FLOAT: xp.float64}.get(dtype, xp.int64)
    if hasattr(value, "detach") and xp is np:
        value = value.detach().cpu().numpy()
    return value.to(kind) if hasattr(value, "detach") else xp.asarray(value, dtype=kind)


def _read(tensor: Any, indices: list[Any], dtype: str, xp: Any) -> Any:
    if len(indices) != len(tensor.shape):
        raise ArgumentError(
            f"a tensor of shape {tuple(tensor.shape)} is read with {len(indices)} indices; give "
            "one for each dimension"
        )
    array = _as_dtype(tensor, dtype, xp)
    if not indices:
        return array
    inside = []
    for index, size in zip(indices, array.shape, strict=True):
        counted = xp.where(index < 0, index + size, index)
        inside.append(xp.clip(counted, 0, max(size - 1, 0)))
    return array[tuple(inside)]


def _wrapped(value: Any) -> Any:
    return (value + 2**31) % 2**32 - 2**31


def _cast(value: Any, old: str, new: str, xp: Any) -> Any:
    if new == BOOL:
        return value != 0
    if old == FLOAT:
        bound = 2.0 ** (31 if new == INT else 63)
        whole = xp.nan_to_num(xp.trunc(value), nan=0.0)
        return _as_dtype(xp.clip(whole, -bound, bound - (1 if new == INT else 1024)), new, xp)
    result = _as_dtype(value, new, xp)
    return _wrapped(result) if new == INT and old == LONG else result


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


_ERF = np.frompyfunc(math.erf, 1, 1)
# Results of int32 operands that an int32 may not hold.
_MAY_OVERFLOW = ("add", "subtract", "multiply", "negative", "abs", "floor_divide", "left_shift")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda xp, a, b: a + b,
    "subtract": lambda xp, a, b: a - b,
    "multiply": lambda xp, a, b: a * b,
    "divide": lambda xp, a, b: a / b,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "minimum": lambda xp, a, b: xp.minimum(a, b),
    "maximum": lambda xp, a, b: xp.maximum(a, b),
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
    "erf": lambda xp, a: xp.erf(a) if hasattr(xp, "erf") else np.asarray(_ERF(a), np.float64),
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


def constant_value(function: str, given: tuple[Typed, ...]) -> Typed:
    """The operator's value for constants, as a constant."""
    with np.errstate(all="ignore"):
        found = [_as_dtype(it.operands[0], it.dtype, np) for it in given]
        result = _FUNCTIONS[function](np, *found).item()
    is_whole = isinstance(result, int) and not isinstance(result, bool)
    dtype = given[0].dtype if is_whole else None
    if isinstance(result, float) and math.isfinite(result) and result == int(result):
        result = float(int(result)) if result else result
    return typed_constant(result, dtype)
