"""Finds score and mask functions by name, for commands and problem strings.

A name is a value of flashsmith.scores or flashsmith.masks, or 'module:function'. Values are
combined as in Python: 'alibi+softcap', 'documents&causal', '~window(9)'. The arguments of a value
are numbers, and tensors that are described by dtype and sizes: 'documents(int32[b,s])'. In sizes,
b, h, q and k stand for the sizes of the problem, and s is the same as k. If a value is named
without arguments, it gets its usual ones. The description of a tensor alone stands for a bias or a
mask: 'float32[b,h,q,k]', 'bool[q,k]'.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith import masks, scores
from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.operations.operation import load_attribute
from flashsmith.printable import quoted
from flashsmith.semantics.typed import READABLE

Function = Callable[..., Any]
# The usual arguments of each value; '' if the value takes none.
SCORES = {
    "alibi": "float32[h]",
    "relative": "float32[h,2*k-1], k-1",
    "t5": "float32[32,h], bidirectional=True",
    "squared_distance": "0.001",
    "softcap": "20.0",
    "bias": "float32[b,h,q,k]",
}
MASKS = {
    "causal": "",
    "window": "128",
    "documents": "int64[s]",
    "prefix_lm": "64",
    "prefix_tree": "int64[s], int64[s]",
    "chunks": "128",
    "window_and_global": "128, 0, 4",
    "image_blocks": "int64[s]",
    "intervals": "int32[q,2]",
    "blocks": "bool[(q+127)//128,(k+127)//128], 128",
}
# Masks whose tensors contain the indices of keys, not numbers of documents.
_OF_KEYS = ("intervals", "prefix_tree")
_N_DOCUMENTS = 4
_LOADED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}


class Sizes(NamedTuple):
    """The sizes of a call's scores; if sequences are packed, the lengths are those of the longest
    ones."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int


Wrap = Callable[[np.ndarray], Any]


def score_named(text: str, sizes: Sizes, seed: int = 0, wrap: Wrap = np.asarray) -> Function:
    """The score function that a string such as 'alibi+softcap' or 'package.module:function' names.

    Tensors that are arguments of values are drawn as NumPy arrays with ``seed``; ``wrap`` converts
    the arrays to tensors.

    Raises ArgumentError if the string is not of this form, if a module or function cannot be
    loaded, or if a value refuses its arguments.
    """
    return _Text("score", text, sizes, seed, wrap).function()


def mask_named(text: str, sizes: Sizes, seed: int = 0, wrap: Wrap = np.asarray) -> Any:
    """The mask function that a string such as 'documents(int32[b,s])&causal' names, or the bool
    tensor of 'bool[q,k]'.

    The other arguments and the errors are those of score_named().
    """
    made = _Text("mask", text, sizes, seed, wrap)
    found = made.tensor()
    return made.function() if found is None else found


def bias_named(text: str, sizes: Sizes, seed: int = 0, wrap: Wrap = np.asarray) -> Any:
    """The tensor that a string such as 'float32[b,h,q,k]' describes.

    The other arguments and the errors are those of score_named().
    """
    found = _Text("bias", text, sizes, seed, wrap).tensor()
    if found is None:
        raise ArgumentError(f"bias={quoted(text)}: give a tensor, such as float32[b,h,q,k]")
    return found


class _Text:
    """A string that names a function or a tensor, and the values that names in the string stand
    for."""

    def __init__(self, what: str, text: str, sizes: Sizes, seed: int, wrap: Wrap) -> None:
        self.what, self.text, self.wrap = what, text, wrap
        self.usual = SCORES if what == "score" else MASKS
        self.values = scores if what == "score" else masks
        self.made = scores.ScoreValue if what == "score" else masks.MaskValue
        batch, heads, seq_q, seq_k = sizes
        self.sizes = {"b": batch, "h": heads, "q": seq_q, "k": seq_k, "s": seq_k}
        self.draw = np.random.default_rng(seed)
        self.loaded: dict[str, str] = {}

    def function(self) -> Function:
        found = self._combined(self._parsed(self._without_paths()))
        if not callable(found):
            raise self._error(f"{quoted(found)} is not a function")
        return found

    def tensor(self) -> Any:
        """The tensor that the string describes; None if it does not describe a tensor."""
        node = self._parsed(self._without_paths())
        return self._argument(node, _N_DOCUMENTS) if isinstance(node, ast.Subscript) else None

    def _error(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"{self.what}={quoted(self.text)}: {why}{'' if why.endswith('?') else ';'} give a name "
            f"({', '.join(self.usual)}), with "
            f"arguments as in {'alibi(float32[h])' if self.what == 'score' else 'chunks(64)'}, or "
            "'module:function'"
        )

    def _without_paths(self) -> str:
        """The string with an identifier in place of each module:function."""

        def replaced(match: re.Match[str]) -> str:
            name = f"_loaded{len(self.loaded)}"
            self.loaded[name] = match.group()
            return name

        return _LOADED.sub(replaced, self.text)

    def _parsed(self, text: str) -> ast.expr:
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            raise self._error("not readable") from None

    def _combined(self, node: ast.expr) -> Any:
        """The function that results from an expression of names, +, &, | and ~."""
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            one, other = self._combined(node.left), self._combined(node.right)
            try:
                return _BINARY[type(node.op)](self._value(one), other)
            except TypeError:
                raise self._error(f"{self.what}s have no such operator") from None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self._value(self._combined(node.operand))
        if isinstance(node, ast.Name):
            if node.id in self.loaded:
                return self._load(self.loaded[node.id])
            usual = self._parsed(f"_({self.usual[self._known(node.id)]})")
            assert isinstance(usual, ast.Call)
            return self._made(node.id, usual)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._made(self._known(node.func.id), node)
        raise self._error("not a name or a value with its arguments")

    def _value(self, function: Any) -> Any:
        """Wraps a function so that it has the operators of values."""
        return function if isinstance(function, self.made) else self.made(function)

    def _load(self, path: str) -> Any:
        try:
            return load_attribute(path, self.what)
        except ArgumentError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"{self.what}={quoted(path)}: its module raised {type(error).__name__} ({error}); "
                "run the module alone to see where"
            ) from error

    def _known(self, name: str) -> str:
        if name not in self.usual:
            raise self._error(f"{quoted(name)} is unknown{did_you_mean(name, self.usual)}")
        return name

    def _made(self, name: str, call: ast.Call) -> Any:
        most = self.sizes["k"] + 1 if name in _OF_KEYS else _N_DOCUMENTS
        given = [self._argument(it, most) for it in call.args]
        named = {str(it.arg): self._argument(it.value, most) for it in call.keywords}
        try:
            return getattr(self.values, name)(*given, **named)
        except TypeError as error:
            raise self._error(str(error)) from None

    def _argument(self, node: ast.expr, most: int) -> Any:
        """The argument that a node stands for: a number, None, a bool, or a drawn tensor."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self.wrap(self._array(node.value.id, [self._number(it) for it in sizes], most))
        return self._number(node)

    def _number(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | None):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.sizes:
            return self.sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](self._number(node.left), self._number(node.right))
        raise self._error(f"{quoted(ast.unparse(node))} is not a number or a tensor")

    def _array(self, dtype: str, shape: list[Any], most: int) -> np.ndarray:
        """Draws an array of this dtype and shape. Floats are around 0; integers do not decrease
        along a row."""
        if dtype not in READABLE:
            raise self._error(
                f"{quoted(dtype)} is no dtype of tensors, which are {', '.join(READABLE)}"
            )
        if not all(isinstance(it, int) and it > 0 for it in shape):
            raise self._error(f"{shape} has sizes that are not whole numbers from 1")
        if dtype == "bool":
            return self.draw.random(shape) < 0.7
        if "float" in dtype:
            values = self.draw.standard_normal(shape) / 4
            return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return np.sort(self.draw.integers(0, most, shape), axis=-1).astype(dtype)
