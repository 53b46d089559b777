"""Analyses typed expressions: whether they can be negative, their factors, and what they depend
on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from flashsmith.semantics.program import INDICES, K, Q, is_uniform
from flashsmith.semantics.typed import BOOL, FLOAT, INT, LONG, Typed, cast

# Sums with larger constants may overflow an int32.
_MOST = 2**28


def is_not_negative(it: Typed) -> bool:
    """Whether an int is known to be at least 0."""
    if it in INDICES:
        return True
    if it.function == "constant":
        return bool(it.operands[0] >= 0)
    if it.function == "read":
        return it.operands[1] in ("uint8", "bool")
    parts = it.arguments
    if it.function == "cast":
        return parts[0].dtype == BOOL or (
            parts[0].dtype in (INT, LONG) and is_not_negative(parts[0])
        )
    if it.function == "maximum":
        return any(map(is_not_negative, parts))
    if it.function in ("minimum", "and") and it.dtype != BOOL:
        found = map(is_not_negative, parts)
        return any(found) if it.function == "and" else all(found)
    if it.function in ("floor_divide", "remainder"):
        is_positive = parts[1].function == "constant" and parts[1].operands[0] > 0
        return is_positive and (it.function == "remainder" or is_not_negative(parts[0]))
    if it.function == "where":
        return is_not_negative(parts[1]) and (
            is_not_negative(parts[2]) or _is_at_least(parts[0], parts[1], parts[2])
        )
    if it.function == "add":
        # A sum of two indices is far below the largest int32.
        return all(part in INDICES or _is_small(part) for part in parts)
    return False


def _is_small(it: Typed) -> bool:
    return it.function == "constant" and 0 <= it.operands[0] <= _MOST


def _is_at_least(condition: Typed, bound: Typed, value: Typed) -> bool:
    """Whether the condition is value < bound, so that where(condition, bound, value) is a clamp."""
    return condition.function == "less" and condition.arguments == (value, bound)


def factors_of_indices(it: Typed) -> tuple[int, int] | None:
    """Returns the factors of q and k, if the expression is a sum of q, k and ints that depend on
    neither; otherwise None."""
    q, k = factor_of(Q, it), factor_of(K, it)
    return None if q is None or k is None else (q, k)


def factor_of(symbol: Typed, it: Typed) -> int | None:
    """Returns the factor of a symbol, if the expression is a sum whose other terms are ints that do
    not depend on the symbol; otherwise None."""
    if it is symbol:
        return 1
    if it.function in ("add", "subtract", "negative"):
        signs = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)}[it.function]
        total = 0
        for sign, part in zip(signs, it.arguments, strict=True):
            factor = factor_of(symbol, part)
            if factor is None:
                return None
            total += sign * factor
        return total
    return None if symbol in it.parts() else 0


def keys_alike(mask: Typed | None) -> int:
    """Returns the largest number that divides every key index at which the mask may differ from the
    mask at the previous key, such as the block size of a block mask; 1 if nothing is known."""
    found = 0
    for it in () if mask is None else mask.parts():
        if K not in it.arguments:
            continue
        size = it.arguments[-1]
        if it.function != "floor_divide" or it.arguments[0] is not K or size is K:
            return 1
        if size.function != "constant" or size.operands[0] <= 0:
            return 1
        found = math.gcd(found, size.operands[0])
    return min(found or _MOST, _MOST)


def number_expressions(roots: Iterable[Typed], dtypes: Collection[str]) -> list[Typed]:
    """Returns the largest subexpressions of these types that depend only on numbers of the call.
    Subexpressions that are just a number are left out."""
    found: dict[Typed, None] = {}
    for root in roots:
        for it in root.parts():
            for part in it.arguments:
                is_computed = part.function not in ("symbol", "constant") and part.symbols()
                if is_computed and part.dtype in dtypes and is_uniform(part) and not is_uniform(it):
                    found[part] = None
    return list(found)


def with_products(root: Typed) -> Typed:
    """Returns the expression with two changes for kernels.

    Division by an expression of numbers becomes multiplication by its inverse. A square of a
    distance, (q - k) * (q - k), that is converted to float is computed in float, because an int32
    square would wrap around from a distance of 46,341 on.
    """
    made: dict[Typed, Typed] = {}
    for it in root.parts():
        own = it.replace({part: made[part] for part in it.arguments if made[part] is not part})
        if own.function == "divide" and own.arguments[1].symbols() and is_uniform(own.arguments[1]):
            over, under = own.arguments
            if not is_uniform(over):
                own = over * (1.0 / under)
        if own.function == "cast" and own.dtype == FLOAT and _is_square(own.arguments[0]):
            (side, _) = own.arguments[0].arguments
            own = cast(side, FLOAT) * cast(side, FLOAT)
        made[it] = own
    return made[root]


def _is_square(it: Typed) -> bool:
    if it.function != "multiply" or it.dtype != INT or it.arguments[0] is not it.arguments[1]:
        return False
    return factors_of_indices(it.arguments[0]) not in (None, (0, 0))
