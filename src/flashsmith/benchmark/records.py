"""Records that others wrote, JSON's or a CSV file's, as the fields of a dataclass: every value is
checked by its field's type. And numbers that JSON lacks, infinities and NaN, as words."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from flashsmith.printable import quoted

# Beyond them nothing is counted or measured, and sums and ratios stay finite.
LARGEST = 10**18
MOST_CHARACTERS = 100_000
_LONGEST_NUMBER = 100
_Reader = Callable[[Any], Any]
_WHOLE = re.compile(r"-?\d{1,19}", re.ASCII)


def for_json(value: Any) -> Any:
    """`value` as strict JSON takes it, however deep: 'inf', '-inf' and 'nan' for those numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: for_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(part) for part in value]
    return value


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


@cache
def required_of(cls: type) -> tuple[str, ...]:
    """The fields of a dataclass that have no default."""
    return tuple(
        field.name
        for field in fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    )


def checked_fields(cls: Any, record: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The values of ``record``, an object of JSON, for the fields of a dataclass (or those named);
    others are passed over. Numbers that JSON lacks may be words, as for_json() writes them.

    Raises ValueError, which names the field, when one is missing, of another type or too large.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{quoted(record, 80)} is no object")
    hints = hints_of(cls)
    found = {}
    for name in names if names is not None else tuple(hints):
        if name not in record:
            raise ValueError(f"{name!r} is missing")
        found[name] = _checked(hints[name], record[name], name, _STRICT)
    return found


def checked_cells(
    cls: Any, record: Mapping[str, Any], field_of: Mapping[str, str]
) -> dict[str, Any]:
    """The values of ``record``, whose numbers may be texts, for the fields of a dataclass; other
    columns are passed over, and so is what is None. '' is None where a field may be that.

    ``field_of``: the fields of columns that have another name. Raises ValueError, which names the
    column, for a value that its field cannot hold.
    """
    hints, plain = hints_of(cls), _plain_fields(cls)
    found: dict[str, Any] = {}
    for column, value in record.items():
        field = field_of.get(column, column)
        if value is None or field not in hints:
            continue
        reader, optional = plain.get(field, (None, False))
        if optional and value == "":
            found[field] = None
        elif reader is not None and (made := reader(value)) is not None:
            found[field] = made
        else:
            found[field] = _checked(hints[field], value, column, _LENIENT)
    return found


@cache
def _plain_fields(cls: type) -> dict[str, tuple[_Reader | None, bool]]:
    """The readers of a class's texts and numbers, and whether those may be None: files have
    hundreds of thousands of cells."""
    plain: dict[str, tuple[_Reader | None, bool]] = {}
    for name, hint in hints_of(cls).items():
        members = [kind for kind in get_args(hint) if kind is not type(None)]
        optional = get_origin(hint) in (Union, UnionType)
        kind = members[0] if optional else hint
        if kind in _LENIENT:
            plain[name] = _LENIENT[kind], optional
    return plain


# --- values ---------------------------------------------------------------------------------------


def _checked(hint: Any, value: Any, name: str, readers: Mapping[Any, _Reader]) -> Any:
    kind, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        if value is None or (value == "" and readers is _LENIENT):
            return None
        (hint,) = (member for member in members if member is not type(None))
        return _checked(hint, value, name, readers)
    if kind is Literal:
        if value not in members:
            raise ValueError(f"{name}={quoted(value, 80)}: allowed are {', '.join(members)}")
        return value
    if kind is dict and isinstance(value, dict):
        return {
            key: _checked(members[1], part, f"{name}[{quoted(key, 40)}]", readers)
            for key, part in value.items()
        }
    if kind is tuple and isinstance(value, list):
        return tuple(_checked(members[0], part, name, readers) for part in value)
    found = readers[hint](value) if hint in readers else None
    if found is None:
        raise ValueError(f"{name}={quoted(value, 80)} is no {getattr(hint, '__name__', hint)}")
    return found


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    if isinstance(value, str) and len(value) <= MOST_CHARACTERS:
        with contextlib.suppress(UnicodeEncodeError):  # Parquet does not look
            value.encode()
            return value
    return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= LARGEST else None


def _number(value: Any) -> float | None:
    # NaN and infinities are numbers here, however they are written.
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if type(value) in (int, float) and not LARGEST < abs(value) < math.inf:
        return float(value)
    return None


def _whole_or_text(value: Any) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _whole(value)


def _number_or_text(value: Any) -> float | None:
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER and value.isascii():
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and abs(value) <= LARGEST:
        return float(value)
    return value if isinstance(value, float) else None


_STRICT: dict[Any, _Reader] = {str: _text, bool: _flag, int: _whole, float: _number}
_LENIENT: dict[Any, _Reader] = _STRICT | {int: _whole_or_text, float: _number_or_text}
