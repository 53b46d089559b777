"""Typed expressions: the closed language of score and mask functions, as values.

A Typed is a graph of operators over symbols, numbers of a call, and reads from named tensors. Equal
expressions are one object, so a part that is used twice is stored, evaluated and printed once.
NumPy, PyTorch, CUDA C++, the derivative and the interval analysis all read the same graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.typed_operators import (
    BINARY,
    BOOL,
    COMMUTATIVE,
    DTYPES,
    FLOAT,
    INFIX,
    INT,
    LOGICAL,
    LONG,
    OPERATORS,
    UNARY,
    WHOLE,
)
from flashsmith.semantics.typed_values import computed, evaluated

Value = bool | int | float
# The element types of tensors that a program may read, and the type of their values.
READABLE = {
    "bool": BOOL,
    "uint8": INT,
    "int8": INT,
    "int16": INT,
    "int32": INT,
    "int64": LONG,
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "float32": FLOAT,
}
# A longer formula would not help the reader of an error message.
_MOST_PARTS = 200


class Typed:
    """An expression with a type: 'bool', 'int32', 'int64' or 'float32'.

    ``function`` is 'symbol', 'constant', 'read' or one of OPERATORS. ``operands`` are a symbol's
    name, a constant's value, a tensor's name and element type followed by the indices, or the
    operator's arguments. Equal expressions are the same object. Use the functions below and
    Python's operators, which promote types as PyTorch does for 0-dimensional tensors.
    """

    __slots__ = ("__weakref__", "digest", "dtype", "function", "operands", "size")

    function: str
    operands: tuple[Any, ...]
    dtype: str
    digest: str
    size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _node, (self.function, self.operands, self.dtype)

    def __repr__(self) -> str:
        return f"<{self.dtype} {self}>"

    def __str__(self) -> str:
        if self.size > _MOST_PARTS:
            return f"an expression of {len(self.parts())} parts"
        text = _formula(self)
        return text[1:-1] if self.function in INFIX else text

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"'{self}' has no truth value before its symbols have values; write where(condition, "
            "a, b) for a choice, and & or | for 'and' and 'or'"
        )

    @property
    def arguments(self) -> tuple[Typed, ...]:
        """The operands that are expressions."""
        return tuple(it for it in self.operands if isinstance(it, Typed))

    def parts(self) -> list[Typed]:
        """Returns all expressions inside this one, each once, operands before the expressions that
        use them."""
        found: dict[Typed, None] = {}
        stack: list[tuple[Typed, bool]] = [(self, False)]
        while stack:
            it, is_done = stack.pop()
            if is_done:
                found[it] = None
            elif it not in found:
                stack.append((it, True))
                stack.extend((part, False) for part in reversed(it.arguments))
        return list(found)

    def symbols(self) -> tuple[str, ...]:
        """Returns the names of the symbols, without duplicates."""
        return tuple(it.operands[0] for it in self.parts() if it.function == "symbol")

    def reads(self) -> list[Typed]:
        """Returns the reads from tensors, each once."""
        return [it for it in self.parts() if it.function == "read"]

    def evaluate(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, Any] | None = None,
        xp: Any = None,
        *,
        exact: bool = True,
    ) -> Any:
        """Returns the value: float64 for floats, two's complement of the type's width for ints.

        ``values`` has a number or an array for each symbol, and ``tensors`` an array for each
        tensor that the expression reads; arrays broadcast. ``xp`` is numpy or torch; None means
        numpy. With ``exact=False``, arrays are computed in their own types, such as float32, and
        numbers stay Python numbers. Functions that run inside another program, such as
        FlexAttention's kernel, need this. Casts and reads are exact in both cases.

        Raises ArgumentError for a symbol or a tensor without a value.
        """
        return evaluated(self.parts(), values, tensors or {}, xp, exact=exact)

    def replace(self, others: Mapping[Typed, Typed]) -> Typed:
        """Returns the expression with every key of ``others`` replaced by its value."""
        made: dict[Typed, Typed] = dict(others)
        for it in self.parts():
            if it not in made:
                new = tuple(made[part] if isinstance(part, Typed) else part for part in it.operands)
                is_same = all(one is other for one, other in zip(new, it.operands, strict=True))
                made[it] = it if is_same else _rebuilt(it, new)
        return made[self]

    # --- Python's operators ---

    def __add__(self, other: Typed | Value) -> Typed:
        return apply("add", self, other)

    def __radd__(self, other: Value) -> Typed:
        return apply("add", other, self)

    def __sub__(self, other: Typed | Value) -> Typed:
        return apply("subtract", self, other)

    def __rsub__(self, other: Value) -> Typed:
        return apply("subtract", other, self)

    def __mul__(self, other: Typed | Value) -> Typed:
        return apply("multiply", self, other)

    def __rmul__(self, other: Value) -> Typed:
        return apply("multiply", other, self)

    def __truediv__(self, other: Typed | Value) -> Typed:
        return apply("divide", self, other)

    def __rtruediv__(self, other: Value) -> Typed:
        return apply("divide", other, self)

    def __floordiv__(self, other: Typed | Value) -> Typed:
        return apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Value) -> Typed:
        return apply("floor_divide", other, self)

    def __mod__(self, other: Typed | Value) -> Typed:
        return apply("remainder", self, other)

    def __rmod__(self, other: Value) -> Typed:
        return apply("remainder", other, self)

    def __and__(self, other: Typed | Value) -> Typed:
        return apply("and", self, other)

    __rand__ = __and__

    def __or__(self, other: Typed | Value) -> Typed:
        return apply("or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Typed | Value) -> Typed:
        return apply("xor", self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Typed | Value) -> Typed:
        return apply("left_shift", self, other)

    def __rlshift__(self, other: Value) -> Typed:
        return apply("left_shift", other, self)

    def __rshift__(self, other: Typed | Value) -> Typed:
        return apply("right_shift", self, other)

    def __rrshift__(self, other: Value) -> Typed:
        return apply("right_shift", other, self)

    def __invert__(self) -> Typed:
        return apply("not", self)

    def __neg__(self) -> Typed:
        return apply("negative", self)

    def __abs__(self) -> Typed:
        return apply("abs", self)

    def __lt__(self, other: Typed | Value) -> Typed:
        return apply("less", self, other)

    def __le__(self, other: Typed | Value) -> Typed:
        return apply("less_equal", self, other)

    def __gt__(self, other: Typed | Value) -> Typed:
        return apply("less", other, self)

    def __ge__(self, other: Typed | Value) -> Typed:
        return apply("less_equal", other, self)

    def equals(self, other: Typed | Value) -> Typed:
        """Whether the values are equal. '==' compares the expressions themselves, not their
        values."""
        return apply("equal", self, other)


# --- construction --------------------------------------------------------------------------------

_NODES: WeakValueDictionary[Any, Typed] = WeakValueDictionary()
_NODES_LOCK = Lock()


def _node(function: str, operands: tuple[Any, ...], dtype: str) -> Typed:
    """Returns the unique object for this expression."""
    kinds = tuple(type(it) for it in operands)
    # 0.0 and -0.0 are equal but not the same; this also holds for True and 1.
    signs = tuple(math.copysign(1, it) if isinstance(it, float) else 1 for it in operands)
    key = (function, operands, kinds, signs, dtype)
    with _NODES_LOCK:
        found = _NODES.get(key)
        if found is None:
            found = Typed.__new__(Typed)
            found.function, found.operands, found.dtype = function, operands, dtype
            parts = [it.digest if isinstance(it, Typed) else repr(it) for it in operands]
            text = " ".join((function, dtype, *parts))
            found.digest = hashlib.sha256(text.encode()).hexdigest()[:24]
            found.size = 1 + sum(it.size for it in operands if isinstance(it, Typed))
            _NODES[key] = found
        return found


def typed_symbol(name: str, dtype: str) -> Typed:
    """Returns a symbol: a value that is known only when the expression is evaluated."""
    return _node("symbol", (name,), dtype)


def typed_constant(value: Value, dtype: str | None = None) -> Typed:
    """Returns a number, of the type that fits its Python type unless ``dtype`` is given.

    Raises ArgumentError for a value that is not a number, or an int beyond 64 bits.
    """
    if not isinstance(value, bool | int | float):
        raise ArgumentError(f"value={quoted(value)}: give a bool, int or float, or an expression")
    if dtype is None:
        dtype = BOOL if isinstance(value, bool) else FLOAT if isinstance(value, float) else INT
        if dtype == INT and not -(2**31) <= value < 2**31:
            dtype = LONG
    if dtype in (INT, LONG):
        bits = 32 if dtype == INT else 64
        whole = int(value)
        if not -(2 ** (bits - 1)) <= whole < 2 ** (bits - 1):
            if dtype == LONG:
                raise ArgumentError(
                    f"value={quoted(value)}: an int64 cannot hold it; give a float, or an int from "
                    "-2**63 to 2**63 - 1"
                )
            whole = wrapped(whole)
        return _node("constant", (whole,), dtype)
    return _node("constant", (bool(value) if dtype == BOOL else float(value),), dtype)


def wrapped(value: int, bits: int = 32) -> int:
    """Returns the int, wrapped to this width as in two's complement arithmetic."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


def read(name: str, dtype: str, *indices: Typed | Value) -> Typed:
    """Returns the element of the tensor ``name``, whose element type is ``dtype``, at these
    indices.

    A negative index counts from the end, and an index outside the tensor reads its nearest element.

    Raises ArgumentError for an element type that programs cannot read, or an index that is not a
    whole number.
    """
    if dtype not in READABLE:
        raise ArgumentError(
            f"dtype={quoted(dtype)} of the tensor {name}: allowed are {', '.join(READABLE)}; "
            "convert it first"
        )
    given = tuple(map(as_typed, indices))
    for it in given:
        if it.dtype not in (INT, LONG):
            raise ArgumentError(
                f"index '{it}' of the tensor {name}: its type is {it.dtype}; give whole numbers"
            )
    return _node("read", (name, dtype, *given), READABLE[dtype])


def as_typed(value: Typed | Value) -> Typed:
    """Returns an expression unchanged; converts a number to a constant."""
    return value if isinstance(value, Typed) else typed_constant(value)


def cast(value: Typed | Value, dtype: str) -> Typed:
    """Converts the value to another type: a float is rounded towards zero to an int, and a value is
    compared with 0 to make a bool."""
    it = as_typed(value)
    if it.dtype == dtype:
        return it
    if it.function == "constant":
        (number,) = it.operands
        if dtype in (BOOL, FLOAT) or it.dtype != FLOAT or abs(number) < 2**31:
            return typed_constant(number, dtype)
    if dtype == BOOL:
        return apply("not_equal", it, typed_constant(0, it.dtype))
    if it.function == "cast" and it.arguments[0].dtype == BOOL:
        it = it.arguments[0]
    return _node("cast", (it,), dtype)


def where(condition: Typed | Value, yes: Typed | Value, no: Typed | Value) -> Typed:
    """Returns an expression that is ``yes`` where the condition holds, and ``no`` elsewhere."""
    test = cast(condition, BOOL)
    one, other = promoted(yes, no)
    if one is other:
        return one
    if test.function == "constant":
        return one if test.operands[0] else other
    return _node("where", (test, one, other), one.dtype)


def apply(function: str, *operands: Typed | Value) -> Typed:
    """Applies the operator ``function`` to these operands, whose types are promoted as in PyTorch.

    Raises ArgumentError for an operator that the types do not have, such as a shift of floats.
    """
    if function == "where":
        return where(*operands)
    kind = UNARY.get(function) or BINARY.get(function)
    if kind is None or len(operands) != (1 if function in UNARY else 2):
        raise ArgumentError(f"function={quoted(function)}: allowed are {', '.join(OPERATORS)}")
    given = promoted(*operands)
    dtype = given[0].dtype
    if function in WHOLE and dtype == FLOAT:
        raise ArgumentError(
            f"{function} of '{given[0]}': floats have no bits; convert them to int: x.int()"
        )
    if function in ("divide", *(name for name, kind in UNARY.items() if kind == FLOAT)):
        if function in ("floor", "ceil", "round", "trunc") and dtype in (INT, LONG):
            return given[0]
        given = tuple(cast(it, FLOAT) for it in given)
    elif dtype == BOOL and function not in LOGICAL:
        if function in ("add", "maximum"):
            function = "or"
        elif function in ("multiply", "minimum"):
            function = "and"
        else:
            given = tuple(cast(it, INT) for it in given)
    if kind == "same":
        kind = given[0].dtype
    if function in COMMUTATIVE and _order(given[0]) > _order(given[1]):
        given = given[::-1]
    simple = _simplified(function, given)
    return _node(function, given, kind) if simple is None else simple


def _order(it: Typed) -> tuple[bool, str]:
    """Returns the sort key for the operands of a commutative operator; it puts constants last."""
    return it.function == "constant", ""


def _rebuilt(it: Typed, operands: tuple[Any, ...]) -> Typed:
    if it.function == "read":
        return read(operands[0], operands[1], *operands[2:])
    if it.function == "cast":
        return cast(operands[0], it.dtype)
    return apply(it.function, *operands)


def promoted(*operands: Typed | Value) -> tuple[Typed, ...]:
    """Converts the operands to one type. A Python number changes the type only if its kind is
    higher: a float makes ints floats, but an int leaves an int32 as it is."""
    kinds = {it.dtype for it in operands if isinstance(it, Typed)}
    for it in operands:
        if not isinstance(it, Typed):
            own = typed_constant(it).dtype
            if DTYPES.index(own) > max((_category(kind) for kind in kinds), default=-1):
                kinds.add(own)
            elif own == LONG:
                kinds.add(LONG)
    dtype = max(kinds, key=DTYPES.index)
    return tuple(cast(it, dtype) for it in operands)


def _category(dtype: str) -> int:
    """Returns the index in DTYPES of the highest type of the same kind (bool, int or float)."""
    return DTYPES.index(LONG if dtype == INT else dtype)


def all_parts(expressions: Iterable[Typed | None]) -> Iterator[Typed]:
    """Yields the parts of several expressions, without duplicates."""
    seen: set[Typed] = set()
    for expression in expressions:
        for it in expression.parts() if expression is not None else ():
            if it not in seen:
                seen.add(it)
                yield it


# --- simplification -------------------------------------------------------------------------------


def _simplified(function: str, given: tuple[Typed, ...]) -> Typed | None:
    """Returns a simpler expression with the same value for all operands, including NaN and
    infinities; None if no such expression is known."""
    if all(it.function == "constant" for it in given):
        return _folded(function, given)
    first, last = given[0], given[-1]
    if len(given) == 2:
        if first is last and (found := _of_twins(function, first)) is not None:
            return found
        found = None
        if last.function == "constant":
            found = _with_constant(function, first, last)
        elif first.function == "constant":
            found = _after_constant(function, first, last)
        if found is not None:
            return found
    if function == "not" and first.function == "not":
        return first.arguments[0]
    if function == "not" and first.function in ("less", "less_equal"):
        one, other = first.arguments
        if one.dtype in (INT, LONG):
            return apply("less_equal" if first.function == "less" else "less", other, one)
    if function == "not" and first.function in ("equal", "not_equal"):
        opposite = "not_equal" if first.function == "equal" else "equal"
        return apply(opposite, *first.arguments)
    if function == "negative" and first.function == "negative":
        return first.arguments[0]
    return None


def _folded(function: str, given: tuple[Typed, ...]) -> Typed:
    """Returns the operator's value for constants, as a constant."""
    result = computed(function, [(it.operands[0], it.dtype) for it in given])
    is_whole = isinstance(result, int) and not isinstance(result, bool)
    return typed_constant(result, given[0].dtype if is_whole else None)


def _of_twins(function: str, it: Typed) -> Typed | None:
    """Returns the simplified result for two equal operands; None if there is none."""
    if function in ("and", "or", "minimum", "maximum"):
        return it
    if it.dtype == FLOAT:
        return None
    if function in ("equal", "less_equal"):
        return typed_constant(True)
    if function in ("not_equal", "less"):
        return typed_constant(False)
    if function in ("subtract", "xor"):
        return typed_constant(0, it.dtype)
    return None


def _with_constant(function: str, it: Typed, last: Typed) -> Typed | None:
    """Returns the simplified result for a constant second operand; None if there is none."""
    value, is_whole = last.operands[0], it.dtype in (INT, LONG)
    if it.dtype == BOOL:
        return _with_bool(function, it, value)
    if value == 0 and function in ("add", "subtract", "or", "xor", "left_shift", "right_shift"):
        return it
    if value == 1 and (function in ("multiply", "divide") or function == "floor_divide"):
        return it if is_whole or function != "floor_divide" else None
    if not is_whole:
        return None
    if value == 0 and function in ("multiply", "and"):
        return last
    if function == "subtract":
        return apply("add", it, typed_constant(-value, it.dtype))
    if function == "add" and it.function == "add" and it.arguments[1].function == "constant":
        total = it.arguments[1].operands[0] + value
        return apply("add", it.arguments[0], typed_constant(total, it.dtype))
    return None


def _with_bool(function: str, it: Typed, value: bool) -> Typed | None:
    if function == "and":
        return it if value else typed_constant(False)
    if function == "or":
        return typed_constant(True) if value else it
    if function in ("equal", "not_equal", "xor"):
        return it if value == (function == "equal") else apply("not", it)
    return None


def _after_constant(function: str, first: Typed, last: Typed) -> Typed | None:
    """Returns the simplified result for a constant first operand of an operator that is not
    commutative; None if there is none."""
    if function == "subtract" and first.operands[0] == 0:
        return apply("negative", last)
    return None


# --- strings -------------------------------------------------------------------------------------


def _formula(it: Typed) -> str:
    if it.function == "symbol":
        return str(it.operands[0])
    if it.function == "constant":
        return repr(it.operands[0])
    parts = [_formula(part) for part in it.arguments]
    if it.function == "read":
        return f"{it.operands[0]}[{', '.join(parts)}]"
    if it.function in INFIX:
        return f"({parts[0]} {INFIX[it.function]} {parts[1]})"
    if it.function in ("negative", "not"):
        return f"{'-' if it.function == 'negative' else '~'}{parts[0]}"
    name = it.dtype if it.function == "cast" else it.function
    return f"{name}({', '.join(parts)})"
