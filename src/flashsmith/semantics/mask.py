"""Masks, as values: which keys a query sees.

A Mask is a name, and expressions for the first and the last key that a row sees. The kernels,
references, cost models and printed descriptions all use the masks defined here, so no other file
needs to know which masks exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.typed import INT, Typed, typed_symbol

# POSITION is the index of a row's own key, which is row + seq_k - seq_q (aligned to the bottom
# right). KEY is the index of a key.
POSITION, KEY = typed_symbol("position", INT), typed_symbol("key", INT)
# Two numbers of a call with a window: how many keys a row sees before and after its own key.
LEFT, RIGHT = LIMITS = typed_symbol("left", INT), typed_symbol("right", INT)
# A limit that no sequence reaches: csrc's kUnlimited.
UNLIMITED = 2**30


class Mask(str):
    """Which keys a row sees: an interval whose ends do not decrease from row to row.

    A Mask is a str, namely its name, so it compares equal to its name. Problem strings, tables and
    rows contain the name.

    Args:
        name: the word for the mask in problem strings, a Python identifier.
        first, last: the first and the last key that a row sees, as expressions of POSITION and the
            limits LEFT and RIGHT. None means the sequence's first or last key.
        first_row, last_row: the positions of the first and the last row that see a key, as
            expressions of KEY and the limits. None means the first or the last row.

    Raises:
        ArgumentError: the name is not an identifier, first is given without last_row or last
        without first_row (or the reverse), or an expression reads another symbol.
    """

    __slots__ = ("first", "first_row", "last", "last_row")

    first: Typed | None
    last: Typed | None
    first_row: Typed | None
    last_row: Typed | None

    def __new__(
        cls,
        name: str,
        first: Typed | None = None,
        last: Typed | None = None,
        first_row: Typed | None = None,
        last_row: Typed | None = None,
    ) -> Mask:
        if not name.isidentifier():
            raise ArgumentError(f"name={quoted(name)}: give a mask a Python identifier as name")
        if (first is None) != (last_row is None) or (last is None) != (first_row is None):
            raise ArgumentError(
                f"mask {name}: give first with last_row, and last with first_row: each pair is "
                "one edge of the mask, described from its rows and from its keys"
            )
        for ends, own in (((first, last), POSITION), ((first_row, last_row), KEY)):
            known = {it.operands[0] for it in (own, *LIMITS)}
            given = [end for end in ends if end is not None]
            strange = {name for end in given for name in end.symbols()} - known
            if strange:
                raise ArgumentError(
                    f"mask {name}: {', '.join(sorted(strange))} is unknown here; use "
                    f"{', '.join(sorted(known))}"
                )
            if wrong := [end for end in given if end.dtype != INT]:
                raise ArgumentError(
                    f"mask {name}: '{wrong[0]}' is {wrong[0].dtype}; an end is an index of a key "
                    "or a row, an int32 expression"
                )
        made = super().__new__(cls, name)
        made.first, made.last, made.first_row, made.last_row = first, last, first_row, last_row
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.first, self.last, self.first_row, self.last_row)

    @property
    def hides_earlier(self) -> bool:
        """Whether some keys are visible to earlier rows and hidden from later ones."""
        return self.first is not None

    @property
    def hides_later(self) -> bool:
        """Whether some keys are visible to later rows and hidden from earlier ones."""
        return self.last is not None

    @property
    def hides(self) -> bool:
        """Whether at least one key is hidden from some row."""
        return self.hides_earlier or self.hides_later

    @property
    def is_triangular(self) -> bool:
        """Whether each row sees all keys of the previous row and more, so that about half of all
        pairs are visible."""
        return self.hides_later and not self.hides_earlier

    @property
    def takes_limits(self) -> bool:
        """Whether calls pass limits for the mask, which say how many keys before and after its own
        key a row sees."""
        ends = (end for end in (self.first, self.last) if end is not None)
        return any(limit.operands[0] in end.symbols() for end in ends for limit in LIMITS)

    def keys(
        self,
        position: Any,
        seq_k: int,
        left: int = UNLIMITED,
        right: int = UNLIMITED,
        xp: Any = None,
    ) -> tuple[Any, Any]:
        """Returns the first key, and one past the last key, that rows at these positions see.

        Both lie within ``seq_k`` keys, and are equal where a row sees none. Positions are a number
        or, with ``xp``, an array.
        """
        values = {"position": position, "left": left, "right": right}
        zero = 0 * position
        first = zero if self.first is None else zero + _value(self.first, values, xp)
        end = zero + seq_k if self.last is None else zero + _value(self.last, values, xp) + 1
        first, end = _clipped(first, seq_k, xp), _clipped(end, seq_k, xp)
        return first, max(first, end) if xp is None else xp.maximum(first, end)

    def sees(
        self, position: Any, key: Any, left: int = UNLIMITED, right: int = UNLIMITED, xp: Any = None
    ) -> Any:
        """Whether rows at these positions see these keys: a bool or, with ``xp``, an array."""
        values = {"position": position, "left": left, "right": right}
        seen = key == key
        if self.first is not None:
            seen = seen & (key >= _value(self.first, values, xp))
        if self.last is not None:
            seen = seen & (key <= _value(self.last, values, xp))
        return seen


def _value(end: Typed, values: Mapping[str, Any], xp: Any) -> Any:
    return end.evaluate(values, xp=xp, exact=False)


def _clipped(value: Any, highest: int, xp: Any) -> Any:
    return min(max(value, 0), highest) if xp is None else xp.clip(value, 0, highest)


NONE = Mask("none")
CAUSAL = Mask("causal", last=POSITION, first_row=KEY)
WINDOW = Mask(
    "window",
    first=POSITION - LEFT,
    last=POSITION + RIGHT,
    first_row=KEY - RIGHT,
    last_row=KEY + LEFT,
)
# The built-in masks. Other masks must be registered.
MASKS: tuple[Mask, ...] = (NONE, CAUSAL, WINDOW)
_KNOWN: dict[str, Mask] = {str(mask): mask for mask in MASKS}


def known_masks() -> tuple[Mask, ...]:
    """Returns the built-in masks and the registered ones."""
    return tuple(_KNOWN.values())


def register_mask(mask: Mask) -> Mask:
    """Makes a mask's name usable in problem strings, tables and libraries; returns the mask.

    A mask may be registered more than once.

    Raises:
        ArgumentError: another mask has the name.
    """
    known = _KNOWN.setdefault(str(mask), mask)
    ends = ("first", "last", "first_row", "last_row")
    if any(getattr(known, end) != getattr(mask, end) for end in ends):
        raise ArgumentError(f"mask={quoted(mask)}: another mask has that name; choose another")
    return known


def mask_named(mask: str) -> Mask:
    """Returns the given Mask, which is registered first if it is new, or the known Mask of that
    name.

    A mask is equal to its name, and kernels are stored under that name, so two masks of the same
    name could not be distinguished.

    Raises:
        ArgumentError: no mask has the name, or another Mask has it.
    """
    if isinstance(mask, Mask):
        return register_mask(mask)
    found = _KNOWN.get(mask) if isinstance(mask, str) else None
    if found is None:
        raise ArgumentError(f"mask={quoted(mask)}: allowed are {', '.join(_KNOWN)}")
    return found
