"""Records of JSON as the fields of a dataclass: each value is checked by its field's type."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from flashsmith.printable import quoted

# Beyond them nothing is counted or measured, and sums and ratios stay finite.
LARGEST = 10**18
MOST_CHARACTERS = 100_000


def checked_fields(cls: Any, record: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The values of ``record`` for the fields of a dataclass (or those named); others are passed
    over. Numbers that JSON lacks may be words, as for_json() writes them.

    Raises ValueError, which names the field, when one is missing, of another type or too large.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{quoted(record, 80)} is no object")
    hints = _hints(cls)
    found = {}
    for name in names if names is not None else tuple(field.name for field in fields(cls)):
        if name not in record:
            raise ValueError(f"{name!r} is missing")
        found[name] = _checked(hints[name], record[name], name)
    return found


@lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _checked(hint: Any, value: Any, name: str) -> Any:
    kind, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        if value is None and type(None) in members:
            return None
        (hint,) = (member for member in members if member is not type(None))
        return _checked(hint, value, name)
    if kind is Literal:
        if value not in members:
            raise ValueError(f"{name} is {quoted(value, 80)}; it is one of {', '.join(members)}")
        return value
    if kind is dict and isinstance(value, dict):
        return {
            key: _checked(members[1], part, f"{name}[{quoted(key, 40)}]")
            for key, part in value.items()
        }
    if kind is tuple and isinstance(value, list):
        return tuple(_checked(members[0], part, name) for part in value)
    return _plain(hint, value, name)


def _plain(hint: Any, value: Any, name: str) -> Any:
    if hint is float and value in ("inf", "-inf", "nan"):
        return float(value)
    fits = {
        str: isinstance(value, str) and len(value) <= MOST_CHARACTERS,
        bool: isinstance(value, bool),
        int: type(value) is int and abs(value) <= LARGEST,
        # NaN and infinities are numbers here, however they are written.
        float: type(value) in (int, float) and not LARGEST < abs(value) < math.inf,
    }
    if not fits.get(hint, False):
        raise ValueError(
            f"{name} is {quoted(value, 80)}, not {_KINDS.get(hint, 'what it must be')}"
        )
    return value


_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number below 1e18",
    float: "a number below 1e18",
}
