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

BOOL, INT, LONG, FLOAT = DTYPES = ("bool", "int32", "int64", "float32")
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
# Operators by the type of their result. 'same' is the operands' own type.
_UNARY = {
    **dict.fromkeys(("negative", "abs"), "same"),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid"), FLOAT),
    **dict.fromkeys(
        ("sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "round", "trunc"), FLOAT
    ),
    "not": "same",
}
_BINARY = {
    **dict.fromkeys(("add", "subtract", "multiply", "minimum", "maximum"), "same"),
    **dict.fromkeys(("divide", "floor_divide", "remainder"), "same"),
    **dict.fromkeys(("and", "or", "xor", "left_shift", "right_shift"), "same"),
    **dict.fromkeys(("less", "less_equal", "equal", "not_equal"), BOOL),
}
OPERATORS = (*_UNARY, *_BINARY, "where", "cast")
COMMUTATIVE = {"add", "multiply", "minimum", "maximum", "and", "or", "xor", "equal", "not_equal"}
_LOGICAL = ("and", "or", "xor", "not", "equal", "not_equal")
_WHOLE = ("and", "or", "xor", "not", "left_shift", "right_shift")


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
        from flashsmith.semantics.typed_text import infix  # it imports this file

        return infix(self)

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
        """All expressions inside this one, each once, arguments before what uses them."""
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
        """The names of the symbols, without duplicates."""
        return tuple(it.operands[0] for it in self.parts() if it.function == "symbol")

    def reads(self) -> list[Typed]:
        """The reads from tensors, each once."""
        return [it for it in self.parts() if it.function == "read"]

    def evaluate(
        self, values: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, xp: Any = None
    ) -> Any:
        """The value in float64 and exact integers: see typed_values.evaluate()."""
        from flashsmith.semantics.typed_values import evaluate  # it imports this file

        return evaluate(self, values, tensors or {}, xp)

    def replace(self, others: Mapping[Typed, Typed]) -> Typed:
        """The expression with every key of ``others`` replaced by its value."""
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
        """Whether the values are equal. '==' compares expressions, not values."""
        return apply("equal", self, other)


# --- construction --------------------------------------------------------------------------------

_NODES: WeakValueDictionary[Any, Typed] = WeakValueDictionary()
_NODES_LOCK = Lock()


def _node(function: str, operands: tuple[Any, ...], dtype: str) -> Typed:
    """The one object for this expression."""
    kinds = tuple(type(it) for it in operands)
    # 0.0 and -0.0 are equal but not the same, and so are True and 1.
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
    """A value that is known only when the expression is computed."""
    return _node("symbol", (name,), dtype)


def typed_constant(value: Value, dtype: str | None = None) -> Typed:
    """A number, of the type that fits its Python type unless ``dtype`` is given.

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
                raise ArgumentError(f"value={quoted(value)}: an int64 cannot hold it")
            whole = wrapped(whole)
        return _node("constant", (whole,), dtype)
    return _node("constant", (bool(value) if dtype == BOOL else float(value),), dtype)


def wrapped(value: int, bits: int = 32) -> int:
    """The int that two's complement arithmetic of so many bits gives."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


def read(name: str, dtype: str, *indices: Typed | Value) -> Typed:
    """The element of the tensor ``name``, whose element type is ``dtype``, at these indices.

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
    """An expression as it is, and a number as a constant."""
    return value if isinstance(value, Typed) else typed_constant(value)


def cast(value: Typed | Value, dtype: str) -> Typed:
    """The value as another type: towards zero from float to int, != 0 to bool."""
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
    """``yes`` where the condition holds, else ``no``."""
    test = cast(condition, BOOL)
    one, other = promoted(yes, no)
    if one is other:
        return one
    if test.function == "constant":
        return one if test.operands[0] else other
    return _node("where", (test, one, other), one.dtype)


def apply(function: str, *operands: Typed | Value) -> Typed:
    """The operator ``function`` of these operands, whose types are promoted as PyTorch does.

    Raises ArgumentError for an operator that the types do not have, such as a shift of floats.
    """
    if function == "where":
        return where(*operands)
    kind = _UNARY.get(function) or _BINARY.get(function)
    if kind is None or len(operands) != (1 if function in _UNARY else 2):
        raise ArgumentError(f"function={quoted(function)}: allowed are {', '.join(OPERATORS)}")
    given = promoted(*operands)
    dtype = given[0].dtype
    if function in _WHOLE and dtype == FLOAT:
        raise ArgumentError(f"{function} of '{given[0]}': floats have no bits; convert them to int")
    if function in ("divide", *(name for name, kind in _UNARY.items() if kind == FLOAT)):
        if function in ("floor", "ceil", "round", "trunc") and dtype in (INT, LONG):
            return given[0]
        given = tuple(cast(it, FLOAT) for it in given)
    elif dtype == BOOL and function not in _LOGICAL:
        if function in ("add", "maximum"):
            function = "or"
        elif function in ("multiply", "minimum"):
            function = "and"
        else:
            given = tuple(cast(it, INT) for it in given)
    if kind == "same":
        kind = given[0].dtype
    from flashsmith.semantics.typed_rules import simplified  # it imports this file

    if function in COMMUTATIVE and _order(given[0]) > _order(given[1]):
        given = given[::-1]
    simple = simplified(function, given)
    return _node(function, given, kind) if simple is None else simple


def _order(it: Typed) -> tuple[bool, str]:
    """Where a commutative operator has this operand: constants last."""
    return it.function == "constant", ""


def _rebuilt(it: Typed, operands: tuple[Any, ...]) -> Typed:
    if it.function == "read":
        return read(operands[0], operands[1], *operands[2:])
    if it.function == "cast":
        return cast(operands[0], it.dtype)
    return apply(it.function, *operands)


def promoted(*operands: Typed | Value) -> tuple[Typed, ...]:
    """The operands with one type. A Python number changes the type only if its kind is higher: a
    float makes ints floats, but an int leaves an int32 as it is."""
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
    """The rank in DTYPES of the highest type of the same kind."""
    return DTYPES.index(LONG if dtype == INT else dtype)


def all_parts(expressions: Iterable[Typed | None]) -> Iterator[Typed]:
    """The parts of several expressions, each once."""
    seen: set[Typed] = set()
    for expression in expressions:
        for it in expression.parts() if expression is not None else ():
            if it not in seen:
                seen.add(it)
                yield it
