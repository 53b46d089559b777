"""Writes typed expressions as canonical text, and parses this text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.typed import DTYPES, READABLE, Typed, _node


def canonical(roots: Mapping[str, Typed]) -> str:
    """Returns a string that is the same for equal graphs: one line for each part, then one line for
    each root."""
    places: dict[Typed, int] = {}
    lines = []
    for root in roots.values():
        for it in root.parts():
            if it in places:
                continue
            words = [
                f"%{places[part]}" if isinstance(part, Typed) else repr(part)
                for part in it.operands
            ]
            places[it] = len(places)
            lines.append(f"{it.function}:{it.dtype}({', '.join(words)})")
    ends = [f"{name} = %{places[root]}" for name, root in roots.items()]
    return "\n".join([*lines, *ends])


_PART = re.compile(r"([a-z0-9_]+):([a-z0-9]+)\((.*)\)")
_ROOT = re.compile(r"([a-z]+) = %(\d+)")


def parse_canonical(text: str) -> dict[str, Typed]:
    """Returns the roots of a string that canonical() wrote. Raises ArgumentError for any other
    text."""
    parts: list[Typed] = []
    roots: dict[str, Typed] = {}
    try:
        for line in text.splitlines():
            if match := _ROOT.fullmatch(line):
                roots[match[1]] = parts[int(match[2])]
            elif match := _PART.fullmatch(line):
                parts.append(_part(match[1], match[2], match[3].split(", "), parts))
            else:
                raise ValueError(line)
    except (ValueError, IndexError) as error:
        raise ArgumentError(
            f"program={quoted(text)}: not the text of a program ({error}); give one that "
            "flashsmith wrote"
        ) from None
    return roots


def _part(function: str, dtype: str, words: Sequence[str], parts: Sequence[Typed]) -> Typed:
    if dtype not in DTYPES:
        raise ValueError(dtype)
    if function == "read" and words[1][1:-1] not in READABLE:
        raise ValueError(words[1])
    operands: list[Any] = []
    for word in words:
        if word.startswith("%"):
            operands.append(parts[int(word[1:])])
        elif word.startswith("'"):
            if not word[1:-1].isidentifier():
                raise ValueError(word)
            operands.append(word[1:-1])
        elif word in ("True", "False"):
            operands.append(word == "True")
        else:
            operands.append(float(word) if dtype == "float32" else int(word))
    return _node(function, tuple(operands), dtype)
