"""Knob: a field of a config, whose single declaration contains everything about it.

The declaration contains the type and the neutral default, the meaning, the word in short forms, the
values in legal configs, and what each value does in the kernel. Short forms, the parser, the rules
about supported values, the search and `flashsmith explain` all use it. Add a new knob at the end of
its class. Its default must be 0 and mean that nothing changes.
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
    """Declares a dataclass field that is a knob.

    Args:
        meaning: what the knob is, for `flashsmith explain` and the documentation.
        values: all values that the knob has in legal configs, in the order in which a search tries
            them; the default is False and True. Members of an enumeration are given by name.
        word: the name of the knob in short forms; for an enumeration, a prefix of the names of its
            values. None if the knob is in the tuple or in a group of knobs.
        default: the neutral value, which short forms leave out; a knob without default must be
            given.
        lowest: the smallest number that is accepted.
        always: whether short forms contain the knob even if it has its neutral value.
        effect: a function that takes a config and describes what the value of the knob does in it;
            None: ``meaning`` is shown.
        where: the name of the code in csrc/ that implements the knob.
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
    """Several knobs that a short form combines into one word, such as load_0_2_2_tiles.

    word: the word, with {} in place of each number.
    knobs: the names of the knobs.
    letters: for `form`, a letter for each number.
    what: the name of these knobs in errors.
    example: numbers that errors use as an example.
    """

    word: str
    knobs: tuple[str, ...]
    letters: tuple[str, ...]
    what: str
    example: tuple[int, ...]

    def write(self, values: tuple[int, ...]) -> str:
        """The word for these values."""
        return self.word.format(*values)

    @property
    def form(self) -> str:
        """The word with a letter in place of each number."""
        return self.word.format(*self.letters)


def is_flag(declared: Field[Any]) -> bool:
    """Whether the knob is on or off, and not a number."""
    return declared.type in ("bool", bool)


def enumeration(declared: Field[Any]) -> type[IntEnum] | None:
    """The enumeration type of a knob's values; None if the knob is a number, a flag or the
    dtype."""
    values = declared.metadata["values"]
    if declared.name == "dtype" or not values or not isinstance(values[0], IntEnum):
        return None
    return type(values[0])


def feature_words(declared: Field[Any]) -> tuple[str, ...]:
    """The words that stand for a knob in short forms, without the numbers that may follow them."""
    word = declared.metadata["word"]
    if word is None:
        return ()
    members = enumeration(declared) or ()
    return tuple(f"{word}{member.name.lower()}" for member in members) or (word,)


def feature_of(config_class: Any, word: str) -> dict[str, Any] | None:
    """The fields that a feature of a short form sets, with numbers as strings.

    Returns {} for the leading word, and None if the class has no such feature.
    """
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
