"""Reads untrusted records (JSON objects and rows of CSV files) into dataclasses.

msgspec checks every value against the type of its field. Infinities and NaN, which JSON does not
have, are stored as words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from flashsmith.printable import quoted

# The largest value that is accepted. No count or measurement is larger, and the limit keeps sums
# and ratios of accepted values finite.
LARGEST = 10**18
MOST_CHARACTERS = 100_000
_Record = TypeVar("_Record")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_EXPECTED = re.compile(r"Expected `(.*)`, got `.*`")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


def for_json(value: Any) -> Any:
    """`value` as strict JSON: infinities and NaN, at any depth, become 'inf', '-inf' and 'nan'."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: for_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(part) for part in value]
    return value


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass, by the fields' names."""
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


@cache
def _may_be_none(cls: Any) -> frozenset[str]:
    return frozenset(name for name, hint in hints_of(cls).items() if type(None) in get_args(hint))


def read_record(
    cls: type[_Record], record: Any, columns: Mapping[str, str] = MappingProxyType({})
) -> _Record:
    """Builds a dataclass from ``record``, which is a JSON object or a row of strings.

    Numbers may be given as strings, including the words of for_json(); '' means None if the field
    allows None. Missing fields get their defaults, and unknown fields are ignored.

    ``columns`` maps fields to the names that they have in files. Raises ValueError, which names the
    field, its value and what is allowed.
    """
    import msgspec  # Takes 6 ms, and code that runs kernels does not need it

    if not isinstance(record, Mapping):
        raise ValueError(f"{quoted(record, 80)} is not an object")
    given = dict(record)
    for field, column in columns.items():
        if column in given:
            given[field] = given.pop(column)
    owner: Any = cls  # Hashable, which mypy cannot infer for a type variable
    optional = _may_be_none(owner)
    given = {
        name: None if value == "" and name in optional else value
        for name, value in given.items()
        if value is not None or name in optional
    }
    try:
        made = msgspec.convert(given, cls, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error), cls, given, columns)) from error
    if found := _outsized(made):
        path, value = found[0].lstrip("."), found[1]
        raise ValueError(
            f"{path}={quoted(value, 80)} is too large: texts have at most {MOST_CHARACTERS:,} "
            f"characters, whole numbers are at most {LARGEST:.0e}"
        )
    return made


def _in_words(said: str, cls: Any, value: Any, columns: Mapping[str, str]) -> str:
    """The message of msgspec, with the wrong value added."""
    said, _, path = said.partition(" - at `$")
    path = path.strip("`.")
    if missing := _MISSING.fullmatch(said):
        return f"{'.'.join(filter(None, (path, missing[1])))!r} is missing"
    hint = cls
    for step in _STEP.finditer(path):
        inner: list[Any] = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
        value = value[step[1] or int(step[2])]
        hint = hints_of(inner[0])[step[1]] if step[1] else hint
    path = columns.get(path, path)
    if expected := _EXPECTED.fullmatch(said):
        return f"{path}={quoted(value, 80)} is not of type {expected[1]}"
    if said.startswith("Invalid enum value"):
        return f"{path}={quoted(value, 80)}: allowed are {', '.join(map(str, get_args(hint)))}"
    if isinstance(value, str | int | float):
        return f"{path}={quoted(value, 80)}: {said}"
    return f"{path}: {said}" if path else said


def _outsized(value: Any) -> tuple[str, Any] | None:
    """The path and value of the first string or integer that is too large; None if there is
    none."""
    if isinstance(value, str):
        return ("", value) if len(value) > MOST_CHARACTERS else None
    if isinstance(value, int):
        return ("", value) if abs(value) > LARGEST else None
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    elif is_dataclass(value):
        parts = vars(value).items()
    for name, part in parts:
        if found := _outsized(part):
            step = f".{name}" if is_dataclass(value) else f"[{quoted(name, 40)}]"
            return step + found[0], found[1]
    return None
