"""Symbols: a traced function computes with these instead of numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from flashsmith.errors import ArgumentError, TraceError
from flashsmith.pluralize import pluralize
from flashsmith.semantics.typed import FLOAT, READABLE, Typed, read
from flashsmith.tracing.refusals import NeedsValue, refuse, source_line
from flashsmith.tracing.torch_functions import FUNCTIONS, METHODS, REFUSED

_ONE_ELEMENT = "a function computes one element: give the tensor an index for each dimension"


class Symbol:
    """The value of an expression while a function is traced; to the function it is a 0-dimensional
    tensor.

    ``trace`` collects the tensors that the function reads. PyTorch's functions reach a symbol
    through __torch_function__, and NumPy's through __array_ufunc__ and __array_function__.
    """

    __slots__ = ("expression", "trace")

    def __init__(self, expression: Typed, trace: Any) -> None:
        self.expression = expression
        self.trace = trace

    def __repr__(self) -> str:
        return f"<traced {self.expression}>"

    def __pos__(self) -> Symbol:
        return self

    # --- values that a symbol does not have ---

    def _value(self, operation: str, instead: str) -> NoReturn:
        numbers = self.trace.numbers_of(self.expression)
        if numbers:
            raise NeedsValue(numbers)
        refuse(operation, instead)

    def __bool__(self) -> bool:
        self._value(
            f"the truth value of '{self.expression}', which 'if', 'and', 'or', 'not' and chained "
            "comparisons need,",
            "write torch.where(condition, a, b) for a choice, and &, | and ~ for and, or and not",
        )

    def __index__(self) -> int:
        self._value(
            f"the use of '{self.expression}' as an index or a count",
            "read a tensor by it: make a list a tensor, and capture a NumPy array as a variable",
        )

    def __float__(self) -> float:
        self._value(f"float() of '{self.expression}'", "write x.float()")

    def __int__(self) -> int:
        self._value(f"int() of '{self.expression}'", "write x.int()")

    def item(self) -> NoReturn:
        """Always raises an error, because a symbol has no value."""
        self._value(f"item() of '{self.expression}'", "leave it out: the result stays a tensor")

    def __iter__(self) -> NoReturn:
        self._value(f"a loop over '{self.expression}'", "it is one number; index a tensor instead")

    def __len__(self) -> int:
        self._value(f"len() of '{self.expression}'", "it is one number and has no length")

    def __getitem__(self, index: Any) -> Symbol:
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        refuse(f"an index of '{self.expression}'", "it is one number; index a tensor by it instead")

    # --- a tensor's attributes ---

    @property
    def dtype(self) -> Any:
        """PyTorch's dtype for the expression's type."""
        import torch

        return getattr(torch, self.expression.dtype)

    @property
    def device(self) -> Any:
        """The device on which the function may make constants."""
        import torch

        return torch.device("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        """No dimensions."""
        return ()

    ndim = 0

    def dim(self) -> int:
        """No dimensions."""
        return 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FUNCTIONS:
            otherwise = "use an operation of docs/programs.md, or precompute a tensor and read it"
            self._value(
                f"the attribute '{name}' of '{self.expression}'", REFUSED.get(name, otherwise)
            )
        method = METHODS.get(name, name)
        return lambda *args, **keywords: self.trace.call(method, (self, *args), keywords)

    # --- functions of PyTorch and NumPy ---

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        symbol = _first_symbol((*args, *(kwargs or {}).values()))
        return symbol.trace.call_torch(function, args, kwargs or {})

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **keywords: Any) -> Any:
        if method != "__call__":
            refuse(f"numpy.{function.__name__}.{method}", "compute one element")
        return self.trace.call(function.__name__, args, keywords)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self.trace.call(function.__name__, args, kwargs)


def _first_symbol(values: Any) -> Symbol:
    for value in values:
        if isinstance(value, Symbol):
            return value
        if isinstance(value, tuple | list):
            try:
                return _first_symbol(value)
            except LookupError:
                continue
    raise LookupError("no symbol")


def _add_operators() -> None:
    """Python's operators call the functions of the same names."""
    names = {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "pow": "pow",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "lshift": "bitwise_left_shift",
        "rshift": "bitwise_right_shift",
    }
    compared = ("lt", "le", "gt", "ge", "eq", "ne")

    def forward(name: str) -> Callable[..., Any]:
        def method(self: Symbol, *others: Any) -> Any:
            return self.trace.call(name, (self, *others), {})

        return method

    def reverse(name: str) -> Callable[..., Any]:
        return lambda self, other: self.trace.call(name, (other, self), {})

    for python, name in names.items():
        setattr(Symbol, f"__{python}__", forward(name))
        setattr(Symbol, f"__r{python}__", reverse(name))
    for matmul in ("__matmul__", "__rmatmul__"):
        setattr(Symbol, matmul, forward("matmul"))
    for name in compared:
        setattr(Symbol, f"__{name}__", forward(name))
    for python, name in (("neg", "neg"), ("abs", "abs"), ("invert", "bitwise_not")):
        setattr(Symbol, f"__{python}__", forward(name))
    # Python removes __hash__ from a class that defines __eq__.
    type.__setattr__(Symbol, "__hash__", object.__hash__)


_add_operators()


class Captured:
    """A tensor that a function reads, and the indices that the function has applied to it so far.

    The object stands for a NumPy array that a traced function captures, or for a tensor that has
    fewer indices than dimensions so far, such as table[b] in table[b][q].
    """

    def __init__(self, tensor: Any, trace: Any, indices: tuple[Any, ...] = ()) -> None:
        self._tensor = tensor
        self._trace = trace
        self._indices = indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self._trace.read(self._tensor, (*self._indices, *more))

    @property
    def ndim(self) -> int:
        """The number of dimensions that have no index yet."""
        return len(self._tensor.shape) - len(self._indices)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions that have no index yet."""
        self._trace.is_reusable = False
        return tuple(self._tensor.shape[len(self._indices) :])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(
            f"'{name}' of a tensor that has {pluralize(self.ndim, 'dimension')} left",
            REFUSED.get(name, _ONE_ELEMENT),
        )

    def __matmul__(self, other: Any) -> Any:
        refuse("'@' of a tensor", REFUSED["matmul"])

    __rmatmul__ = __matmul__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        refuse(f"'{name}' of a tensor that has dimensions left", REFUSED.get(name, _ONE_ELEMENT))


def read_expression(name: str, dtype: str, indices: tuple[Typed, ...]) -> Typed:
    """Makes the expression that reads a traced tensor. Raises TraceError if programs cannot read
    this tensor."""
    if dtype not in READABLE:
        refuse(
            f"a read of {dtype} elements",
            f"allowed are {', '.join(READABLE)}: convert the tensor outside the function",
        )
    for index in indices:
        if index.dtype in (FLOAT, "bool"):
            refuse(f"the {index.dtype} index '{index}'", "convert it to whole numbers: x.int()")
    try:
        return read(name, dtype, *indices)
    except ArgumentError as error:
        raise TraceError(f"{error} ({source_line()})") from None
