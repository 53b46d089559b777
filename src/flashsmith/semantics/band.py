"""Bands: masks under which row i sees the keys from i - left to i + right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flashsmith.semantics.program import K, Q
from flashsmith.semantics.typed import BOOL, INT, Typed

# Sums with a larger constant may overflow an int32, so masks that contain one are not treated as
# bands.
_MOST = 2**28


class _Linear(NamedTuple):
    """A linear sum: the coefficient of each symbol, keyed by the symbol's name, and a constant."""

    of: Mapping[str, int]
    constant: int

    def plus(self, other: _Linear, factor: int = 1) -> _Linear:
        names = {**self.of, **other.of}
        of = {it: self.of.get(it, 0) + factor * other.of.get(it, 0) for it in names}
        total = self.constant + factor * other.constant
        return _Linear({it: n for it, n in of.items() if n}, total)

    def value(self, numbers: Mapping[str, int]) -> int:
        return self.constant + sum(n * numbers[name] for name, n in self.of.items())


class Band(NamedTuple):
    """The limits of a band. ``left`` and ``right`` are lists of linear sums of a call's numbers;
    the smallest sum in a list is the limit on its side. An empty list means no limit on this
    side."""

    left: tuple[_Linear, ...]
    right: tuple[_Linear, ...]

    def limits(self, numbers: Mapping[str, int]) -> tuple[int | None, int | None] | None:
        """Returns how many keys before and after its own index a row sees, in a call with these
        numbers.

        None if a number is so large that the mask's own arithmetic may overflow.
        """
        if any(abs(value) > _MOST for value in numbers.values()):
            return None
        left, right = (
            min((it.value(numbers) for it in side), default=None)
            for side in (self.left, self.right)
        )
        return left, right


def band_of(mask: Typed) -> Band | None:
    """Returns the band that equals a mask for any lengths and numbers; None if no such band is
    known.

    Recognises conjunctions of two kinds of comparisons. In the first kind, the compared sums
    contain q and k once each, with opposite signs, and otherwise only int numbers. In the second
    kind, the absolute value of such a sum is compared with int numbers.
    """
    left: list[_Linear] = []
    right: list[_Linear] = []
    todo = [mask]
    while todo:
        it = todo.pop()
        if it.function == "and" and it.dtype == BOOL:
            todo.extend(it.arguments)
        elif it.function == "constant" and it.operands[0] is True:
            continue
        elif it.function in ("less", "less_equal"):
            if not _add_comparison(it, left, right):
                return None
        else:
            return None
    return Band(tuple(left), tuple(right))


def _add_comparison(it: Typed, left: list[_Linear], right: list[_Linear]) -> bool:
    """Adds the limit that a comparison expresses; returns False if it expresses none."""
    low, high = it.arguments
    strict = int(it.function == "less")
    if low.function == "abs" and low.dtype == INT:
        found = [_side(inner, high, strict) for inner in _both_signs(low.arguments[0])]
    else:
        found = [_side(_linear(low), high, strict)]
    for side in found:
        if side is None:
            return False
        (left if side[0] == "left" else right).append(side[1])
    return True


def _both_signs(it: Typed) -> list[_Linear | None]:
    own = _linear(it)
    return [own, None if own is None else _Linear({}, 0).plus(own, -1)]


def _side(low: _Linear | None, high: Typed, strict: int) -> tuple[str, _Linear] | None:
    """Returns the side and the limit that low <= high expresses (or low < high, if ``strict`` is
    1); None if the comparison expresses no limit."""
    own = _linear(high)
    if low is None or own is None:
        return None
    rest = own.plus(low, -1).plus(_Linear({}, -strict))  # 0 <= rest
    factors = rest.of.get("q", 0), rest.of.get("k", 0)
    limit = _Linear({name: n for name, n in rest.of.items() if name not in "qk"}, rest.constant)
    if factors == (1, -1):  # k <= q + limit
        return "right", limit
    if factors == (-1, 1):  # k >= q - limit
        return "left", limit
    return None


def _linear(it: Typed) -> _Linear | None:
    """Returns the expression as a sum of int32 symbols and constants; None if it is not such a
    sum."""
    if it.dtype != INT:
        return None
    if it.function == "constant":
        return _Linear({}, it.operands[0]) if abs(it.operands[0]) <= _MOST else None
    if it.function == "symbol":
        is_usable = it in (Q, K) or str(it.operands[0]).startswith("number")
        return _Linear({it.operands[0]: 1}, 0) if is_usable else None
    if it.function not in ("add", "subtract", "negative"):
        return None
    parts = [_linear(part) for part in it.arguments]
    if any(part is None for part in parts):
        return None
    total = _Linear({}, 0)
    for part, factor in zip(parts, _FACTORS[it.function], strict=True):
        assert part is not None
        total = total.plus(part, factor)
    return total


_FACTORS = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)}
