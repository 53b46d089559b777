"""Knob: one field of a config, declared once.

The field's declaration holds its type and neutral default, meaning, word in the short form, values
in legal configs, and each value's effect in the kernel. The short form, the parser, the rules of
supported values, the search and the explanation all read that declaration. A new knob is added at
the end of its class, with a zero default that means the behaviour without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

_FLAG = (False, True)
_COUNT = re.compile(r"(\w+?)_(\d+)")


def knob(
    meaning: str,
    *,
    values: tuple[Any, ...] = _FLAG,
    word: str | None = None,
    default: Any = MISSING,
    lowest: int = 1,
    always: bool = False,
    effect: Callable[[Any], str] | None = None,
    where: str = "",
) -> Any:
    """A dataclass field that is a knob.

    Args:
        meaning: what the knob is, for `flashsmith explain` and the docs.
        values: every value that the knob has in some legal config, in the order in which a search
            tries them; by default False and True. Members of an enumeration are written by name.
        word: its name in the short form; for an enumeration a prefix of the value's name. None if
            the tuple or a group of knobs contains it.
        default: the neutral value, which the short form omits; without one the knob is required.
        lowest: the smallest number that the class accepts.
        always: whether the short form contains the knob even at its neutral value.
        effect: a function that describes what the knob's value does in a given config; None means
            that ``meaning`` is shown.
        where: the name in csrc/ that implements the knob.
    """
    metadata = {
        "meaning": meaning,
        "values": values,
        "word": word,
        "lowest": lowest,
        "always": always,
        "effect": effect,
        "where": where,
    }
    return field(default=default, metadata=metadata)


class KnobGroup(NamedTuple):
    """Knobs that the short form combines in one word, such as load_0_2_2_tiles.

    word: the word with {} for each number. knobs: the knobs' names. letters: the letters that stand
    for the numbers in `form`. what: what errors call the knobs. example: numbers for an example in
    errors.
    """

    word: str
    knobs: tuple[str, ...]
    letters: tuple[str, ...]
    what: str
    example: tuple[int, ...]

    def write(self, values: tuple[int, ...]) -> str:
        """The word with these values."""
        return self.word.format(*values)

    @property
    def form(self) -> str:
        """The word with letters in place of the numbers."""
        return self.word.format(*self.letters)


def is_flag(declared: Field[Any]) -> bool:
    """Whether the knob is on or off rather than a number."""
    return declared.type in ("bool", bool)


def enumeration(declared: Field[Any]) -> type[IntEnum] | None:
    """The enumeration type of a knob; None for numbers, flags and the dtype."""
    values = declared.metadata["values"]
    if declared.name == "dtype" or not values or not isinstance(values[0], IntEnum):
        return None
    return type(values[0])


def feature_words(declared: Field[Any]) -> tuple[str, ...]:
    """The words of a knob in short forms; the word of a numeric knob is without its number."""
    word = declared.metadata["word"]
    if word is None:
        return ()
    members = enumeration(declared) or ()
    return tuple(f"{word}{member.name.lower()}" for member in members) or (word,)


def feature_of(config_class: Any, word: str) -> dict[str, Any] | None:
    """The fields that one feature word of a config class's short forms sets, with numbers as text.
    {} for the leading word, None for a word that is not a feature of the class."""
    if word and word == config_class.LEADING_WORD:
        return {}
    for group in config_class.GROUPS:
        if digits := re.fullmatch(group.word.replace("{}", r"(\d+)"), word, re.ASCII):
            return dict(zip(group.knobs, digits.groups(), strict=True))
    count = _COUNT.fullmatch(word)
    for declared in fields(config_class):
        name = declared.metadata["word"]
        if name is None:
            continue
        if members := enumeration(declared):
            for member in members:
                if word == f"{name}{member.name.lower()}":
                    return {declared.name: member}
        elif is_flag(declared):
            if word == name:
                return {declared.name: True}
        elif count and count.group(1) == name:
            return {declared.name: count.group(2)}
    return None
