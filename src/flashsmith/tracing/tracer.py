"""Calls score and mask functions with symbols, and binds the resulting program to its tensors and
numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError, TraceError
from flashsmith.printable import quoted
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.program import (
    SCORE,
    B,
    BoundProgram,
    H,
    K,
    Program,
    Q,
    Renamed,
    program_of,
)
from flashsmith.semantics.ranges import number_expressions, with_products
from flashsmith.semantics.typed import FLOAT, INT, Typed, as_typed, typed_symbol
from flashsmith.tracing.captures import (
    Captures,
    Leaf,
    Watch,
    captures_of,
    is_array,
    is_symbolic,
    is_tensor,
    is_traced_by_jax,
    rebuilt,
)
from flashsmith.tracing.refusals import NeedsValue, check_arguments, raised, refuse
from flashsmith.tracing.symbols import Captured, Symbol, read_expression
from flashsmith.tracing.torch_functions import FUNCTIONS, METHODS, REFUSED

Function = Callable[..., Any]
# Those of Python's names for operators that differ from PyTorch's names.
_DUNDER = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "rand": "bitwise_and",
    "ror": "bitwise_or",
    "rxor": "bitwise_xor",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "radd": "add",
    "rmul": "mul",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
_DTYPES = {"int": INT, "float": FLOAT}
_REVERSED = {"rtruediv": "div", "rfloordiv": "floor_divide", "rmod": "remainder", "rpow": "pow"}
_MOST_TRACES = 1024
# The number of sets of captured values for which a trace keeps the computed numbers.
_MOST_VALUES = 256


class Traced(NamedTuple):
    """The trace that functions share if they differ only in captured numbers and tensors.

    ``reads`` has the tensors, each as the index of a leaf, or as the object itself if it is not a
    leaf. ``sources`` maps names to the captured numbers, in the same form. ``numbers`` are
    expressions of captured numbers, whose values ``computed`` keeps. ``frozen`` are the leaves
    whose values the trace has as constants.
    """

    program: Program
    reads: tuple[Any, ...]
    numbers: tuple[Typed, ...]
    sources: dict[str, Any]
    computed: dict[tuple[Any, ...], tuple[int | float, ...]]
    frozen: tuple[tuple[int, Any], ...]
    is_reusable: bool

    def bound(self, leaves: tuple[Leaf, ...]) -> BoundProgram:
        """Returns the program with the tensors and numbers of these leaves."""
        tensors = self.tensors(leaves)
        own = {name: _number(_leaf_or_self(it, leaves)) for name, it in self.sources.items()}
        values = tuple(own.values())
        numbers = self.computed.get(values)
        if numbers is None:
            numbers = tuple(_computed(it, own) for it in self.numbers)
            if len(self.computed) >= _MOST_VALUES:
                self.computed.clear()
            self.computed[values] = numbers
        return BoundProgram(self.program, tensors, numbers)

    def tensors(self, leaves: tuple[Leaf, ...]) -> tuple[Any, ...]:
        """The tensors that the program reads, for these leaves."""
        return tuple(_leaf_or_self(it, leaves) for it in self.reads)


class _At(NamedTuple):
    """The index of a leaf."""

    leaf: int


def _leaf_or_self(it: Any, leaves: tuple[Leaf, ...]) -> Any:
    return leaves[it.leaf].value if isinstance(it, _At) else it


def _computed(expression: Typed, numbers: Mapping[str, int | float]) -> int | float:
    if expression.function == "symbol":
        return numbers[expression.operands[0]]
    return _number(expression.evaluate(numbers))


def _number(value: Any) -> int | float:
    found = value.item() if hasattr(value, "item") else value
    return found if isinstance(found, float) else int(found)


_TRACES: dict[Any, list[Traced]] = {}
_TRACES_LOCK = Lock()


class Trace(NamedTuple):
    """A program with the tensors and numbers of a call, and the objects on which they depend.

    ``watch`` is () if the program must be bound in each call.
    """

    bound: BoundProgram
    watch: tuple[Watch, ...]


def trace(score_mod: Function | None = None, mask_mod: Function | None = None) -> BoundProgram:
    """Returns the program of a score function and a mask function, with the tensors and numbers
    that they capture now.

    ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score, and ``mask_mod(b, h, q_idx,
    kv_idx)`` whether the query sees the key. They are FlexAttention's functions. b is the sequence,
    h the query head; indices are 0-dimensional int32 tensors to the functions, and the score a
    float32. One trace serves all functions that have the same code and differ only in the values of
    captured numbers and tensors.

    Raises:
        TraceError: a function does something that kernels cannot compute, such as a Python branch
        on an index. The message quotes the operation and its line.
        ArgumentError: there is no function, or one is not callable.
    """
    return watched_trace(score_mod, mask_mod).bound


def watched_trace(score_mod: Function | None, mask_mod: Function | None) -> Trace:
    """Returns the result of trace(), and the objects on which it depends."""
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not callable(function):
            raise ArgumentError(f"{name}={quoted(function)}: give a function, or None for none")
    functions = (score_mod, mask_mod)
    if score_mod is None and mask_mod is None:
        raise ArgumentError(
            "score_mod=None, mask_mod=None: give a score function, a mask function, or both"
        )
    captures = captures_of(functions)
    if captures.is_complete:
        for known in _TRACES.get(captures.key, ()):
            if all(captures.leaves[i].value == value for i, value in known.frozen):
                return Trace(known.bound(captures.leaves), _watch_of(captures))
    made = traced(functions, captures)
    if captures.is_complete and made.is_reusable:
        with _TRACES_LOCK:
            if len(_TRACES) >= _MOST_TRACES:
                _TRACES.clear()
            _TRACES.setdefault(captures.key, []).append(made)
        return Trace(made.bound(captures.leaves), _watch_of(captures))
    return Trace(made.bound(captures.leaves), ())


def _watch_of(captures: Captures) -> tuple[Watch, ...]:
    """Returns the objects to watch; () if a captured tensor is used as a number, because such a
    tensor may change in place."""
    is_number = any(it.kind == "array" and not it.value.shape for it in captures.leaves)
    return () if is_number else captures.watch


Compose = Callable[[Any], "tuple[Function | None, Function | None]"]


def traced(
    functions: Any, captures: Captures, compose: Compose = tuple, *, reads_scalars: bool = False
) -> Traced:
    """Traces functions. Captured numbers are symbols, except where the functions need their values:
    there they are constants.

    ``compose`` makes the score and the mask function from ``functions``, to which the captures
    belong. With reads_scalars, kernels read 0-dimensional tensors, which are then not treated as
    numbers.
    """
    numbers = frozenset(i for i, leaf in enumerate(captures.leaves) if leaf.kind != "array")
    frozen: frozenset[int] = frozenset()
    while True:
        run = Tracing(captures.leaves, frozen, reads_scalars=reads_scalars)
        try:
            roots = run.roots(functions, compose)
        except NeedsValue as needed:
            more = frozenset(int(name[1:]) for name in needed.names)
            if more <= frozen:
                raise AssertionError(f"values of {sorted(more)} are already known") from None
            frozen |= more
        except TraceError:
            raise
        except Exception as error:
            # The function may use a number in a way that a symbol does not support.
            if numbers <= frozen:
                raise raised(run.running, error) from error
            frozen = numbers
        else:
            return run.traced(roots)


class Tracing:
    """One call of functions with symbols: the tensors and numbers that they have read so far."""

    def __init__(
        self, leaves: tuple[Leaf, ...], frozen: frozenset[int], *, reads_scalars: bool = False
    ) -> None:
        self.is_reusable = True
        self.running = "a function"  # the name of the argument whose function is running
        self._reads_scalars = reads_scalars
        self._leaves = leaves
        self._frozen = frozen
        self._sources: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._places = {id(it.value): i for i, it in enumerate(leaves) if it.kind == "array"}

    def roots(self, functions: Any, compose: Compose) -> dict[str, Typed]:
        """Returns what the score and mask functions return for symbols, under the keys 'score' and
        'mask'."""
        made = rebuilt(functions, iter(map(self._replacement, *self._numbered())))
        score_mod, mask_mod = compose(made)
        indices = [Symbol(it, self) for it in (B, H, Q, K)]
        found = {}
        with _torch_mode(self):
            if score_mod is not None:
                found["score"] = self._result("score_mod", score_mod, Symbol(SCORE, self), *indices)
            if mask_mod is not None:
                found["mask"] = self._result("mask_mod", mask_mod, *indices)
        return found

    def traced(self, roots: Mapping[str, Typed]) -> Traced:
        """Makes the trace of these expressions. Raises ArgumentError if no program can compute
        them."""
        found, computed = self._program(roots)
        numbers = [computed.get(name) for name in found.numbers]
        return Traced(
            found.program,
            tuple(self._sources[name] for name in found.reads),
            tuple(
                typed_symbol(name, _DTYPES[kind.kind]) if it is None else it
                for name, it, kind in zip(
                    found.numbers, numbers, found.program.numbers, strict=True
                )
            ),
            {name: it for name, it in self._sources.items() if name[0] in "nv"},
            {},
            tuple((i, self._leaves[i].value) for i in sorted(self._frozen)),
            self.is_reusable,
        )

    def _program(self, roots: Mapping[str, Typed]) -> tuple[Renamed, dict[str, Typed]]:
        """Returns the program, and expressions of captured numbers for the numbers that it takes.

        The host computes parts that depend only on captured numbers, once per call. If the program
        would then take too many numbers, kernels compute these parts instead.
        """
        plain = {name: with_products(root) for name, root in roots.items()}
        parts = number_expressions(plain.values(), (INT, FLOAT))
        names = {it: typed_symbol(f"c{i}", it.dtype) for i, it in enumerate(parts)}
        try:
            made = {name: root.replace(names) for name, root in plain.items()}
            found = program_of(made.get("score"), made.get("mask"))
        except ArgumentError:
            return program_of(roots.get("score"), roots.get("mask")), {}
        return found, {name.operands[0]: it for it, name in names.items()}

    def _numbered(self) -> tuple[range, tuple[Leaf, ...]]:
        return range(len(self._leaves)), self._leaves

    def _replacement(self, i: int, leaf: Leaf) -> Any:
        """Returns the object that replaces leaf ``i`` in a rebuilt function."""
        if leaf.kind == "array":
            return leaf.value if is_tensor(leaf.value) else self._captured(leaf.value)
        if i in self._frozen:
            # A number that a tracer does not know yet gets a guard, or is refused by the tracer.
            return (int if leaf.kind == "int" else float)(leaf.value)
        return Symbol(self._number(f"n{i}", FLOAT if leaf.kind == "float" else INT, _At(i)), self)

    def _captured(self, array: Any) -> Any:
        return self.value_of(array) if not array.shape else Captured(array, self)

    def _number(self, name: str, dtype: str, source: Any) -> Typed:
        self._sources[name] = source
        return typed_symbol(name, dtype)

    def _result(self, name: str, function: Function, *arguments: Symbol) -> Typed:
        self.running = name
        check_arguments(name, function)
        value = function(*arguments)
        if value is None:
            wanted = "the new score" if name == "score_mod" else "whether the query sees the key"
            raise TraceError(f"{name} returned None; return {wanted}")
        try:
            return self._expression(value)
        except TypeError:
            raise TraceError(
                f"{name} returned {quoted(value)}; return one number, computed from the arguments"
            ) from None

    def numbers_of(self, expression: Typed) -> frozenset[str]:
        """Returns the names of the captured numbers in an expression that consists only of captured
        numbers and constants; the empty set for other expressions."""
        names = expression.symbols()
        known = all(isinstance(self._sources.get(it), _At) for it in names)
        if not known or expression.reads():
            return frozenset()
        return frozenset(names)

    def value_of(self, value: Any) -> Any:
        """Converts a 0-dimensional array to a symbol, and a NumPy number to a Python number."""
        if isinstance(value, np.generic):
            return value.item()
        if is_symbolic(value):
            refuse(
                f"the dynamic size {value}, which the function itself reads,",
                "read it outside the function, which then captures it as an int",
            )
        if not is_array(value) or value.shape:
            return value
        kind = dtype_name(value.dtype) or str(value.dtype)
        # These tensors are read by the kernel: as a number of the call, a tensor would have no
        # gradient.
        is_read = is_traced_by_jax(value) or (
            is_tensor(value)
            and (self._reads_scalars or value.device.type != "cpu" or value.requires_grad)
        )
        if is_read:
            return Symbol(read_expression(self._tensor_name(value), kind, ()), self)
        if kind == "bool":
            self.is_reusable = False
            return bool(value.item())
        place = self._places.get(id(value))
        name = f"v{len(self._sources)}" if place is None else f"n{place}"
        self.is_reusable &= place is not None
        dtype = FLOAT if "float" in kind else INT
        source = value.item() if place is None else _At(place)
        if dtype == INT and not -(2**31) <= int(value.item()) < 2**31:
            self.is_reusable = False
            return int(value.item())
        return Symbol(self._number(name, dtype, source), self)

    def _tensor_name(self, tensor: Any) -> str:
        if id(tensor) not in self._names:
            place = self._places.get(id(tensor))
            self.is_reusable &= place is not None
            name = f"t{len(self._names)}"
            self._names[id(tensor)] = name
            self._sources[name] = tensor if place is None else _At(place)
            self._sources[f"{name} itself"] = tensor  # so that no other object gets its id
        return self._names[id(tensor)]

    # --- operations ---

    def read(self, tensor: Any, indices: tuple[Any, ...]) -> Any:
        """Returns the element of a tensor at these indices. If an element needs more indices,
        returns the tensor with these indices added."""
        with _without_torch_mode():
            return self._read(tensor, indices)

    def _read(self, tensor: Any, indices: tuple[Any, ...]) -> Any:
        rank = len(tensor.shape)
        if any(it is None or it is Ellipsis or isinstance(it, slice) for it in indices):
            refuse(
                f"a slice of a tensor of shape {tuple(tensor.shape)}",
                "give one index for each dimension, or slice the tensor outside the function",
            )
        if len(indices) > rank:
            refuse(
                f"a read with {len(indices)} indices of a tensor of shape {tuple(tensor.shape)}",
                f"give {rank}, one for each dimension",
            )
        if len(indices) < rank:
            return Captured(tensor, self, indices)
        try:
            given = tuple(self._expression(it) for it in indices)
        except TypeError:
            refuse("an index that is not a number", "give one number for each dimension")
        kind = dtype_name(tensor.dtype) or str(tensor.dtype)
        return Symbol(read_expression(self._tensor_name(tensor), kind, given), self)

    def _expression(self, value: Any) -> Typed:
        """Converts an operand to an expression. Raises TypeError if the operand is not one
        number."""
        found = self.value_of(value)
        if isinstance(found, Symbol):
            return found.expression
        if isinstance(found, bool | int | float):
            return as_typed(found)
        raise TypeError(type(value).__name__)

    def call(self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Calls a function of PyTorch or NumPy, or a Python operator, by the name that PyTorch
        gives it."""
        with _without_torch_mode():
            return self._call(name, args, keywords)

    def _call(self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        function = FUNCTIONS.get(name)
        if function is None:
            self._need_values(args)
            instead = REFUSED.get(name, "see docs/programs.md for the operations that can be")
            refuse(f"'{name}'", instead)
        given = [self._operand(it, name, args) for it in args]
        named = {key: self._operand(it, name, args) for key, it in keywords.items()}
        try:
            return Symbol(function(*given, **named), self)
        except TraceError:
            raise
        except ArgumentError as error:
            refuse(f"'{name}'", str(error))
        except TypeError as error:
            self._need_values(args)
            refuse(
                f"'{name}' with these arguments",
                f"give it the arguments that PyTorch's function of one element takes ({error})",
            )

    def _operand(self, value: Any, name: str, args: tuple[Any, ...]) -> Any:
        found = self.value_of(value)
        if isinstance(found, Symbol):
            return found.expression
        if is_array(found):
            self._need_values(args)
            refuse(
                f"'{name}' with a tensor of shape {tuple(found.shape)}",
                "a function computes one element: give the tensor an index for each dimension",
            )
        if isinstance(found, Captured):
            Captured.__torch_function__(name, ())
        return found

    def _need_values(self, args: tuple[Any, ...]) -> None:
        """Raises NeedsValue if all symbols among the arguments are captured numbers."""
        names: set[str] = set()
        for it in args:
            for symbol in it if isinstance(it, tuple | list) else (it,):
                if isinstance(symbol, Symbol):
                    own = self.numbers_of(symbol.expression)
                    if not own and symbol.expression.symbols():
                        return
                    names |= own
                elif isinstance(symbol, Captured):
                    return
        if names:
            raise NeedsValue(frozenset(names))

    def call_torch(self, function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Calls a function of PyTorch that has a symbol among its arguments."""
        name = _torch_name(function)
        if name == "getitem" and not isinstance(args[0], Symbol):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if isinstance(args[0], Captured):
                return args[0][index]
            return self.read(args[0], index)
        if name in _REVERSED:
            return self.call(_REVERSED[name], args[::-1], keywords)
        return self.call(_DUNDER.get(name, name), args, keywords)


def _torch_name(function: Any) -> str:
    """Returns the name of a function, a tensor's method or a registered op."""
    name = getattr(function, "_qualified_op_name", None)
    if name is None:
        schema = getattr(function, "_schema", None)
        name = schema.name if schema is not None else getattr(function, "__name__", function)
    name = str(name).removeprefix("aten::")
    if hasattr(function, "__objclass__"):  # a tensor's method
        name = METHODS.get(name, name)
    return name.strip("_") if name.startswith("__") else name


def _has_symbol(values: Any) -> bool:
    return any(
        isinstance(it, Symbol | Captured) or (isinstance(it, tuple | list) and _has_symbol(it))
        for it in values
    )


def _without_torch_mode() -> contextlib.AbstractContextManager[Any]:
    """Returns a context for the trace's own operations on tensors, which are not traced."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch._C.DisableTorchFunction()


def _torch_mode(trace: Tracing) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that passes calls to PyTorch's functions on symbols to the trace.

    A tensor indexed by a symbol, tensor[index], arrives here too: without a mode, PyTorch would
    consult only the tensor's class.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = kwargs or {}
            if _has_symbol((*args, *given.values())):
                return trace.call_torch(function, args, given)
            # The result may depend on a tensor's values or shape.
            trace.is_reusable = False
            return function(*args, **given)

    return Mode()
