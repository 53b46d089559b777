"""Computes the values of typed expressions with NumPy or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Protocol

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.typed_operators import BOOL, FLOAT, FUNCTIONS, INT, LONG, MAY_OVERFLOW


class Part(Protocol):
    """A typed expression."""

    function: str
    operands: tuple[Any, ...]
    dtype: str

    @property
    def arguments(self) -> tuple[Part, ...]:
        """The operands that are expressions."""


def evaluated(
    parts: Sequence[Part],
    values: Mapping[str, Any],
    tensors: Mapping[str, Any],
    xp: Any,
    *,
    exact: bool,
) -> Any:
    """Returns the value of the last of ``parts``. Each part must come after its own operands.

    The other arguments are those of Typed.evaluate().
    """
    xp = import_module("numpy") if xp is None else xp
    value = _exact_value if exact else _plain_value
    done: dict[Part, Any] = {}
    with xp.errstate(all="ignore") if hasattr(xp, "errstate") else nullcontext():
        for it in parts:
            done[it] = value(it, done, values, tensors, xp)
    return done[parts[-1]]


def computed(function: str, constants: Sequence[tuple[Any, str]]) -> Any:
    """Returns the operator's value for constants that are given with their types, as a Python
    number."""
    xp = import_module("numpy")
    with xp.errstate(all="ignore"):
        found = [_as_dtype(value, dtype, xp) for value, dtype in constants]
        return FUNCTIONS[function](xp, *found).item()


def _plain_value(
    it: Part,
    done: Mapping[Part, Any],
    values: Mapping[str, Any],
    tensors: Mapping[str, Any],
    xp: Any,
) -> Any:
    """Returns the value in the given arrays' own types; casts and reads are exact."""
    if it.function == "symbol":
        return _given(it.operands[0], values)
    if it.function == "constant":
        return it.operands[0]
    if it.function in ("read", "cast"):
        exact = {part: _as_dtype(done[part], part.dtype, xp) for part in it.arguments}
        return _exact_value(it, exact, values, tensors, xp)
    found = [done[part] for part in it.arguments]
    if any(hasattr(value, "shape") for value in found):
        return FUNCTIONS[it.function](xp, *found)
    # PyTorch's functions take no Python numbers.
    operands = [(value, part.dtype) for value, part in zip(found, it.arguments, strict=True)]
    return computed(it.function, operands)


def _exact_value(
    it: Part,
    done: Mapping[Part, Any],
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
    result = FUNCTIONS[it.function](xp, *found)
    return _wrapped(result) if it.dtype == INT and it.function in MAY_OVERFLOW else result


def _given(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values:
        raise ArgumentError(
            f"no value for {quoted(name)}; given are {', '.join(values) or 'none'}: add one"
        )
    return values[name]


def _as_dtype(value: Any, dtype: str, xp: Any) -> Any:
    is_numpy = xp.__name__ == "numpy"
    kind = {BOOL: xp.bool_ if is_numpy else xp.bool, FLOAT: xp.float64}.get(dtype, xp.int64)
    if hasattr(value, "detach") and is_numpy:
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = (value.double() if dtype == FLOAT else value).numpy()
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
