"""Checks of traced functions that need no kernel: values are compared with calls to the original
functions on numbers, and derivatives with finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import SCORE, BoundProgram
from flashsmith.semantics.typed import FLOAT, Typed, typed_symbol

# A bound on the difference: the user's functions may compute in fp32, while expressions compute in
# float64.
VALUE_BOUND = 2e-5
# A bound on the error of a float64 difference quotient of a function that is not linear within the
# step.
SLOPE_BOUND = 1e-4
_STEP = 1e-6
# The name of the symbol that stands for the score, or for a read, while its value is varied.
_VARIED = typed_symbol("varied", FLOAT)


class Points(NamedTuple):
    """Random elements of a problem: scores, indices and sequence lengths, in the form in which
    expressions are evaluated on them."""

    values: dict[str, np.ndarray]

    @property
    def number(self) -> int:
        """The number of points."""
        return len(self.values["q"])

    @classmethod
    def drawn(cls, sizes: tuple[int, int, int, int], count: int, seed: int) -> Points:
        """Draws ``count`` points of a (batch, heads, seq_q, seq_k) problem, including its first and
        its last element."""
        rng = np.random.default_rng(seed)
        values: dict[str, np.ndarray] = {"score": rng.standard_normal(count) * 3}
        for name, size in zip("bhqk", sizes, strict=True):
            values[name] = rng.integers(0, size, count)
            values[name][:2] = 0, size - 1
        values["seq_q"], values["seq_k"] = (np.full(count, size) for size in sizes[2:])
        return cls(values)


class ValueCheck(NamedTuple):
    """The largest error relative to 1 + |value|, the bound on this error, and what is wrong ('' if
    nothing is)."""

    error: float
    bound: float
    reason: str = ""


def can_call() -> bool:
    """Whether the user's functions can be called on numbers. This requires PyTorch, because the
    numbers are passed as PyTorch tensors."""
    return find_spec("torch") is not None


def check_score(
    function: Callable[[Any, int, int, int, int], Any],
    bound: BoundProgram | None,
    points: Points,
) -> ValueCheck:
    """Calls a score function on each point's numbers and compares the results with the
    program's."""
    given = points.values
    found = given["score"]
    if bound is not None and bound.program.score is not None:
        found = _evaluated(bound, bound.program.score, given)
    return _compared(_called(function, points, scored=True), found, points)


def check_mask(
    function: Callable[[int, int, int, int], Any], seen: np.ndarray, points: Points
) -> ValueCheck:
    """Calls a mask function on each point's numbers and compares the results with the program's
    visible keys."""
    expected = _called(function, points, scored=False)
    if isinstance(expected, str):
        return ValueCheck(np.inf, 0.0, expected)
    wrong = np.flatnonzero(expected.astype(bool) != seen)
    reason = (
        ""
        if not len(wrong)
        else f"{_at(points, wrong[0])}: the function gives {bool(expected[wrong[0]])}"
    )
    return ValueCheck(float(len(wrong)), 0.0, reason)


def seen_by(bound: BoundProgram | None, points: Points) -> np.ndarray:
    """For each point, whether the program leaves its key visible."""
    if bound is None or bound.program.mask is None:
        return np.ones(points.number, bool)
    return _evaluated(bound, bound.program.mask, points.values).astype(bool)


def check_derivative(bound: BoundProgram, of: Typed, points: Points) -> ValueCheck:
    """Compares the derivative of a score function with its left and right difference quotients at
    each point. The derivative is with respect to ``of``, the score or a read. It may lie anywhere
    between the two quotients, since at a kink they differ."""
    score = bound.program.score
    assert score is not None
    given = points.values
    base = _evaluated(bound, of, given)
    varied = score.replace({of: _VARIED})
    step = _STEP * (1 + np.abs(base))
    at = {
        side: _evaluated(bound, varied, {**given, "varied": base + side * step})
        for side in (-1, 0, 1)
    }
    with np.errstate(invalid="ignore"):
        left, right = (at[0] - at[-1]) / step, (at[1] - at[0]) / step
    found = _evaluated(bound, derivative(score, of), given)
    size = 1 + np.maximum(np.abs(left), np.abs(right))
    low, high = np.minimum(left, right), np.maximum(left, right)
    known = np.isfinite(low) & np.isfinite(high)
    error = np.where(known, np.maximum(low - found, found - high) / size, 0)
    error = np.where(np.isnan(error), np.inf, np.maximum(error, 0))
    worst = int(np.argmax(error))
    reason = ""
    if error[worst] > SLOPE_BOUND:
        reason = (
            f"{_at(points, worst)}: the derivative by {of} is {found[worst]:g}, difference "
            f"quotients are {left[worst]:g} and {right[worst]:g}"
        )
    return ValueCheck(float(error[worst]), SLOPE_BOUND, reason)


def varied_parts(bound: BoundProgram) -> list[Typed]:
    """The variables with respect to which derivatives are checked: the score, and the reads of
    float tensors."""
    score = bound.program.score
    if score is None:
        return []
    parts = score.parts()
    return [it for it in parts if it is SCORE or (it.function == "read" and it.dtype == FLOAT)]


def _evaluated(
    bound: BoundProgram, expression: Typed, values: Mapping[str, np.ndarray]
) -> np.ndarray:
    numbers = zip(bound.program.numbers, bound.numbers, strict=True)
    tensors = zip(bound.program.reads, bound.tensors, strict=True)
    given = {**values, **{it.name: value for it, value in numbers}}
    found = expression.evaluate(given, {it.name: tensor for it, tensor in tensors})
    return np.broadcast_to(found, values["q"].shape).copy()


def _called(function: Callable[..., Any], points: Points, *, scored: bool) -> Any:
    """The function's values, or the message of the error that it raised."""
    found = _values_of(function, points, _tensor, scored=scored)
    if not isinstance(found, str):
        return found
    # A function that uses NumPy arrays may fail when these are mixed with tensors.
    other = _values_of(function, points, _scalar, scored=scored)
    return found if isinstance(other, str) and "IndexError" not in other else other


def _values_of(
    function: Callable[..., Any],
    points: Points,
    number: Callable[[str, Any], Any],
    *,
    scored: bool,
) -> Any:
    found = np.empty(points.number)
    names = ("score", "b", "h", "q", "k")[not scored :]
    for i in range(points.number):
        given = [number(name, points.values[name][i]) for name in names]
        try:
            found[i] = float(function(*given))
        except Exception as error:
            return (
                f"{_at(points, i)}: the function raises {type(error).__name__} ({error}) for "
                "numbers; an index outside a tensor reads the nearest element in kernels only"
            )
    return found


def _tensor(name: str, value: Any) -> Any:
    """The number as FlexAttention would pass it: a 0-d PyTorch tensor."""
    torch = import_module("torch")
    return torch.tensor(value.item(), dtype=torch.float64 if name == "score" else torch.int32)


def _scalar(name: str, value: Any) -> Any:
    return np.float64(value) if name == "score" else np.int32(value)


def as_tensor(array: np.ndarray) -> Any:
    """An array as a PyTorch tensor."""
    torch = import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array)


def _compared(expected: Any, found: np.ndarray, points: Points) -> ValueCheck:
    if isinstance(expected, str):
        return ValueCheck(np.inf, VALUE_BOUND, expected)
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(found - expected) / (1 + np.abs(expected)))
    error = np.where(np.isnan(error), np.inf, error)
    worst = int(np.argmax(error))
    reason = ""
    if error[worst] > VALUE_BOUND:
        reason = (
            f"{_at(points, worst)}: the function gives {expected[worst]:g}, the traced expression "
            f"{found[worst]:g}"
        )
    return ValueCheck(float(error[worst]), VALUE_BOUND, reason)


def _at(points: Points, i: int) -> str:
    values = points.values
    indices = ", ".join(f"{name} {values[name][i]}" for name in "bhqk")
    return f"at {indices}, score {values['score'][i]:.3g}"
