"""Finds the captures of functions: the numbers and tensors in cells, globals, defaults and
attributes.

Captures are found without calling the function. Their structure is a key: functions that differ
only in the values of captured numbers and tensors have the same key, and so the same trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

# Structures that are deeper or longer are opaque, and functions that capture them are traced in
# every call.
_DEEPEST, _LONGEST = 12, 256
_CONSTANTS = (
    type(None),
    bool,
    str,
    bytes,
    complex,
    type,
    ModuleType,
    BuiltinFunctionType,
    type(Ellipsis),
)
_FRAMEWORKS = ("torch", "numpy", "jax", "functools", "math", "builtins", "typing")


class Constant(int):
    """A captured int that is compiled in, such as a divisor or the index of a column."""


class Leaf(NamedTuple):
    """A captured value that may change from call to call: 'int', 'float' or 'array'."""

    kind: str
    value: Any


# The steps from a value to one that it captures: ('attribute', name) or ('item', key), in order.
Path = tuple[tuple[str, Any], ...]
# A function that reads the current content of the scanned function, object or list; and the content
# at the time of the scan.
Watch = tuple[Callable[[], "list[Any]"], "list[Any]"]


class Captures(NamedTuple):
    """The leaves of a value in a fixed order, a key for the rest of the value, and whether this key
    is complete. Values with the same complete key differ only in their leaves. ``watch`` has all
    objects that may change. ``paths`` lead to the leaves, and ``others`` lead to captured
    functions, flags and strings; both are empty unless requested."""

    key: Any
    leaves: tuple[Leaf, ...]
    is_complete: bool
    watch: tuple[Watch, ...]
    paths: tuple[Path, ...] = ()
    others: tuple[Path, ...] = ()


class _Shape(NamedTuple):
    """A value that holds other values, its children: the value's identity, the children and the
    paths to them, a function that copies the value with other children, and, if the children may
    change, a function that reads the current ones."""

    tag: Any
    children: list[Any]
    build: Callable[[list[Any]], Any]
    current: Callable[[], list[Any]] | None = None
    steps: Callable[[], list[Path]] | None = None


def is_unchanged(watch: tuple[Watch, ...]) -> bool:
    """Whether all captured objects are still the same."""
    for current, before in watch:
        now = current()
        if len(now) != len(before):
            return False
        for new, old in zip(now, before, strict=True):
            if new is not old:
                return False
    return True


def captures_of(value: Any, *, with_paths: bool = False) -> Captures:
    """Returns the captures of a function, or of a tuple of functions."""
    scan = _Scan()
    key = scan.key_of(value, 0, () if with_paths else None)
    found = tuple(scan.leaves), scan.is_complete, tuple(scan.watch)
    return Captures(key, *found, tuple(scan.paths), tuple(scan.others))


def follow(value: Any, path: Path) -> Any:
    """Returns the value at the end of a path. PyTorch's compiler traces this function, and guards
    the values that it reads."""
    for kind, key in path:
        value = getattr(value, key) if kind == "attribute" else value[key]
    return value


class _Scan:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.paths: list[Path] = []
        self.others: list[Path] = []
        self.is_complete = True
        self.watch: list[Watch] = []
        self._seen: dict[int, int] = {}

    def key_of(self, value: Any, depth: int, path: Path | None = None) -> Any:
        leaf = leaf_of(value)
        if leaf is not None:
            self.leaves.append(leaf)
            if path is not None:
                self.paths.append(path)
            return (leaf.kind, *_array_key(leaf.value)) if leaf.kind == "array" else leaf.kind
        if isinstance(value, (int, float, *_CONSTANTS)):
            if path is not None and isinstance(value, int | float | str | type(None)):
                self.others.append(path)
            return type(value), value
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        shape = _shape_of(value) if depth < _DEEPEST else None
        if shape is None:
            if not _is_constant(value):
                self.is_complete = False
                return "opaque"
            return "constant", value
        self._seen[id(value)] = len(self._seen)
        if shape.current is not None:
            self.watch.append((shape.current, shape.children))
        if path is None or shape.steps is None:
            return shape.tag, tuple([self.key_of(child, depth + 1) for child in shape.children])
        if isinstance(value, FunctionType):
            self.others.append(path)
        pairs = zip(shape.children, shape.steps(), strict=True)
        found = [self.key_of(child, depth + 1, path + step) for child, step in pairs]
        return shape.tag, tuple(found)


def rebuilt(value: Any, replacements: Iterator[Any]) -> Any:
    """Returns a copy of the value in which the leaves are replaced, in order. Functions are copied
    with new cells."""
    return _rebuilt(value, replacements, {}, 0)


def _rebuilt(value: Any, replacements: Iterator[Any], done: dict[int, Any], depth: int) -> Any:
    if leaf_of(value) is not None:
        return next(replacements)
    if isinstance(value, (int, float, *_CONSTANTS)):
        return value
    if id(value) in done:
        return done[id(value)]
    shape = _shape_of(value) if depth < _DEEPEST else None
    if shape is None:
        return value
    done[id(value)] = value  # a function may capture itself
    children = [_rebuilt(child, replacements, done, depth + 1) for child in shape.children]
    is_same = all(new is old for new, old in zip(children, shape.children, strict=True))
    done[id(value)] = value if is_same else shape.build(children)
    return done[id(value)]


def leaf_of(value: Any) -> Leaf | None:
    """Returns the Leaf for a value; None if the value is not a leaf."""
    kind = type(value)
    if kind is int or kind is float:
        return Leaf("float", value) if kind is float else _int_leaf(value)
    if isinstance(value, np.bool_):
        return None
    if isinstance(value, np.integer):
        return _int_leaf(int(value))
    if isinstance(value, np.floating):
        return Leaf("float", float(value))
    if is_symbolic(value):
        return Leaf("int" if kind.__name__ == "SymInt" else "float", value)
    return Leaf("array", value) if is_array(value) else None


def _int_leaf(value: int) -> Leaf | None:
    # Larger ints are constants, because the numbers of a call are int32.
    return Leaf("int", value) if -(2**31) <= value < 2**31 else None


def is_tensor(value: Any) -> bool:
    """Whether the value is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_symbolic(value: Any) -> bool:
    """Whether the value is an int or a float that PyTorch's tracers do not know yet, such as a size
    that torch.export treats as dynamic."""
    kind = type(value)
    return kind.__name__ in ("SymInt", "SymFloat") and kind.__module__ == "torch"


def is_array(value: Any) -> bool:
    """Whether the value is an array of PyTorch, NumPy or JAX."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        return True
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(value, "dtype")


def rank_of(value: Any) -> int:
    """Returns the number of an array's dimensions, 0 for a number."""
    # PyTorch's compiler cannot look for an attribute of a number that is an input of its graph.
    return 0 if isinstance(value, int | float) else len(getattr(value, "shape", ()))


def is_traced_by_jax(value: Any) -> bool:
    """Whether the value is an array that a transformation of JAX traces, which may have no
    value."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def _array_key(value: Any) -> tuple[Any, ...]:
    rank = len(value.shape)
    if rank:
        return type(value), str(value.dtype), rank
    # A tensor that requires grad is read by kernels. Other tensors on the host are numbers of the
    # call.
    needs_grad = bool(getattr(value, "requires_grad", False))
    return type(value), str(value.dtype), str(getattr(value, "device", "")), needs_grad


def _is_constant(value: Any) -> bool:
    """Whether the value is an immutable object of a framework, such as a dtype or a function, or an
    object that declares that it captures nothing."""
    kind = type(value)
    if getattr(kind, "captures_nothing", False):
        return True
    if kind.__module__.partition(".")[0] in _FRAMEWORKS and kind.__name__ in (
        *("dtype", "device", "layout", "builtin_function_or_method", "method_descriptor"),
        *("OpOverload", "OpOverloadPacket", "ufunc", "_ArrayFunctionDispatcher"),
    ):
        return True
    return isinstance(value, FunctionType)


def _shape_of(value: Any) -> _Shape | None:
    if isinstance(value, FunctionType):
        return _function_shape(value)
    if isinstance(value, MethodType):
        return _Shape(
            "method",
            [value.__func__, value.__self__],
            lambda it: MethodType(*it),
            steps=lambda: [(("attribute", it),) for it in ("__func__", "__self__")],
        )
    if isinstance(value, partial):
        names, n = tuple(value.keywords), len(value.args)
        return _Shape(
            ("partial", names, n),
            [value.func, *value.args, *value.keywords.values()],
            lambda it: partial(it[0], *it[1 : n + 1], **dict(zip(names, it[n + 1 :], strict=True))),
            steps=lambda: [
                (("attribute", "func"),),
                *_items("args", range(n)),
                *_items("keywords", names),
            ],
        )
    kind = type(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_make")
    if (kind in (tuple, list) or is_named) and len(value) <= _LONGEST:
        current = (lambda: list(value)) if kind is list else None
        build = getattr(kind, "_make", kind)
        places = range(len(value))
        return _Shape((kind, len(value)), list(value), build, current, lambda: _entries(places))
    if type(value) is dict and len(value) <= _LONGEST and all(type(it) is str for it in value):
        names = tuple(value)
        current = lambda: list(value.values())  # noqa: E731
        return _Shape(
            (dict, names), list(value.values()), _dict_of(names), current, lambda: _entries(names)
        )
    return _instance_shape(value)


def _entries(keys: Iterable[Any]) -> list[Path]:
    return [(("item", it),) for it in keys]


def _items(attribute: str, keys: Iterable[Any]) -> list[Path]:
    return [(("attribute", attribute), ("item", it)) for it in keys]


def _dict_of(names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    return lambda values: dict(zip(names, values, strict=True))


def _instance_shape(value: Any) -> _Shape | None:
    """Returns the shape of an instance of a plain class, for example a callable with numbers and
    tensors as attributes; None for other objects."""
    kind = type(value)
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or kind.__module__.partition(".")[0] in (*_FRAMEWORKS, "jaxlib"):
        return None
    if any("__slots__" in vars(base) for base in kind.__mro__[:-1]) or len(own) > _LONGEST:
        return None
    names = tuple(own)

    def build(values: list[Any]) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(zip(names, values, strict=True))
        return made

    return _Shape(
        ("instance", kind, names),
        list(own.values()),
        build,
        lambda: list(own.values()),
        lambda: [(("attribute", it),) for it in names],
    )


def _function_shape(function: FunctionType) -> _Shape | None:
    is_framework = (function.__module__ or "").partition(".")[0] in _FRAMEWORKS
    cells = [] if function.__closure__ is None else _contents(function.__closure__)
    if cells is None or (is_framework and not cells):
        return None
    code = function.__code__
    names = () if is_framework else _globals_of(code, function.__globals__)
    defaults, only = function.__defaults__ or (), function.__kwdefaults__ or {}
    counts = len(defaults), len(only), len(cells)
    closure, scope_now = function.__closure__ or (), function.__globals__

    def current() -> list[Any]:
        # The reader must not refer to the function, because a reference from a kept result would
        # keep the function alive.
        held = [*defaults, *only.values(), *(cell.cell_contents for cell in closure)]
        return held + [scope_now.get(name) for name in names]

    def build(values: list[Any]) -> FunctionType:
        at = [0, counts[0], sum(counts[:2]), sum(counts)]
        scope = {**function.__globals__, **dict(zip(names, values[at[3] :], strict=True))}
        cells = tuple(_cell(it) for it in values[at[2] : at[3]])
        made = FunctionType(code, scope, function.__name__, tuple(values[: at[1]]), cells)
        made.__kwdefaults__ = dict(zip(only, values[at[1] : at[2]], strict=True)) or None
        return made

    def steps() -> list[Path]:
        cells = [
            (*it, ("attribute", "cell_contents")) for it in _items("__closure__", range(counts[2]))
        ]
        return [
            *_items("__defaults__", range(counts[0])),
            *_items("__kwdefaults__", only),
            *cells,
            *_items("__globals__", names),
        ]

    return _Shape((code, tuple(only), counts, names), current(), build, current, steps)


def _contents(closure: tuple[Any, ...]) -> list[Any] | None:
    try:
        return [cell.cell_contents for cell in closure]
    except ValueError:  # a cell that has no value yet
        return None


def _cell(value: Any) -> Any:
    return (lambda: value).__closure__[0]  # type: ignore[index]


def _globals_of(code: CodeType, scope: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of globals that code, and the functions defined in it, may read."""
    found: dict[str, None] = {}
    todo = [code]
    while todo:
        it = todo.pop()
        found.update((name, None) for name in it.co_names if name in scope)
        todo.extend(inner for inner in it.co_consts if isinstance(inner, CodeType))
    return tuple(sorted(found))
