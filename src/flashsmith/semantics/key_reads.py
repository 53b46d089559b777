"""Finds reads whose index increases with the key, such as reads of a table of distances or of a
bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashsmith.semantics.program import SCORE, K, Q
from flashsmith.semantics.ranges import factors_of_indices
from flashsmith.semantics.typed import INT, Typed, apply, read, typed_symbol


@dataclass(frozen=True)
class KeyRead:
    """A read with an index that is a sum of the key and of terms that do not depend on the key; the
    sum may be clamped.

    read: the read.
    dim: the dimension whose index depends on the key; no other index does.
    index: the index of that dimension.
    unclamped: the index without its clamps, a sum of q, k and ints that depend on neither. For a
        run of consecutive keys: if no clamp changes the index of the first and of the last key,
        none changes any index between them; if both have the same index, all keys between them have
        it.
    """

    read: Typed
    dim: int
    index: Typed
    unclamped: Typed

    @property
    def depends_on_query(self) -> bool:
        """Whether rows read different elements for the same keys."""
        return factors_of_indices(self.unclamped) != (0, 1)


def key_reads(root: Typed | None) -> list[KeyRead]:
    """Returns the key reads in an expression, without duplicates."""
    found = (_key_read(it) for it in ([] if root is None else root.reads()))
    return [it for it in found if it is not None]


def with_symbols(root: Typed, reads: list[KeyRead]) -> tuple[Typed, dict[Typed, KeyRead]]:
    """Replaces the index of each key read by a symbol. Returns the new expression, and a dict from
    each symbol to its key read."""
    symbols = {typed_symbol(f"along{i}", INT): it for i, it in enumerate(reads)}
    others = {}
    for symbol, it in symbols.items():
        name, dtype, *indices = it.read.operands
        indices[it.dim] = symbol
        others[it.read] = read(name, dtype, *indices)
    return root.replace(others), symbols


def _key_read(it: Typed) -> KeyRead | None:
    dims = [dim for dim, index in enumerate(it.arguments) if K in index.parts()]
    if len(dims) != 1 or SCORE in it.parts():
        return None
    (dim,) = dims
    index = it.arguments[dim]
    unclamped = _unclamped(index) if index.dtype == INT else None
    if unclamped is None or factors_of_indices(unclamped) not in _ALONG_KEYS:
        return None
    return KeyRead(it, dim, index, unclamped)


# The factors of q and k in the indices that make consecutive keys read consecutive elements.
_ALONG_KEYS = [(q, k) for q in (-1, 0, 1) for k in (-1, 1)]


def _unclamped(it: Typed) -> Typed | None:
    """Returns a sum with its clamps removed; None if the expression is not a sum, clamped or
    not."""
    if factors_of_indices(it) is not None:
        return it
    if it.function in ("minimum", "maximum"):
        return _without_bound(it.arguments)
    if it.function == "where":
        # A clamp is a choice between a bound and the value that is compared with the bound.
        condition, *values = it.arguments
        is_clamp = condition.function == "less" and set(condition.arguments) == set(values)
        return _without_bound(values) if is_clamp else None
    if it.function in ("add", "subtract"):
        one, other = it.arguments
        if _is_fixed(one) == _is_fixed(other):
            return None
        inner = _unclamped(other if _is_fixed(one) else one)
        if inner is None:
            return None
        return apply(it.function, *((one, inner) if _is_fixed(one) else (inner, other)))
    if it.function == "negative":
        inner = _unclamped(it.arguments[0])
        return None if inner is None else apply("negative", inner)
    return None


def _without_bound(operands: Sequence[Typed]) -> Typed | None:
    values = [it for it in operands if not _is_fixed(it)]
    return _unclamped(values[0]) if len(values) == 1 else None


def _is_fixed(it: Typed) -> bool:
    """Whether the value is the same for all queries and keys."""
    return not {Q, K} & set(it.parts())
