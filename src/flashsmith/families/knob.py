"""Knob: a field of a config. A single declaration contains everything that is known about the knob.

The declaration contains the knob's type, neutral default, meaning, word in short forms and values
in legal configs, and a description of what each value does in the kernel. It is used to write and
parse short forms, by the rules about supported values, by the search and by `flashsmith explain`.
Add a new knob at the end of its class. Its default must be 0, with which the kernels do the same as
without the knob.
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
        meaning: a description of the knob, for `flashsmith explain` and the documentation.
        values: all values that the knob has in legal configs, in the order in which a search tries
            these values; the default is False and True.
        word: the name of the knob in short forms. If its values are an enumeration, the word is
            followed by the name of the value. None if the knob is in the tuple or in a group of
            knobs.
        default: the neutral value, which short forms leave out. A knob without a default has no
            neutral value, so every caller must give it.
        lowest: the smallest number that is accepted.
        always: whether short forms contain the knob even if its value is the neutral one.
        effect: a function that takes a config and returns a description of what the config's value
            of the knob does. If it is None, ``meaning`` is shown instead.
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
    letters: the letters that `form` puts in the place of the numbers.
    what: the name of the group in errors.
    example: the numbers that errors show as an example.
    """

    word: str
    knobs: tuple[str, ...]
    letters: tuple[str, ...]
    what: str
    example: tuple[int, ...]

    def write(self, values: tuple[int, ...]) -> str:
        """The group's word, with these values as its numbers."""
        return self.word.format(*values)

    @property
    def form(self) -> str:
        """The group's word, with a letter in place of each number."""
        return self.word.format(*self.letters)


def is_flag(declared: Field[Any]) -> bool:
    """Whether the knob is on or off, and not a number."""
    return declared.type in ("bool", bool)


def enumeration(declared: Field[Any]) -> type[IntEnum] | None:
    """The enumeration to which a knob's values belong; None if the knob is a number, a flag or the
    dtype."""
    values = declared.metadata["values"]
    if declared.name == "dtype" or not values or not isinstance(values[0], IntEnum):
        return None
    return type(values[0])


def feature_words(declared: Field[Any]) -> tuple[str, ...]:
    """The words that stand for a knob in short forms, each without the number that may follow
    it."""
    word = declared.metadata["word"]
    if word is None:
        return ()
    members = enumeration(declared) or ()
    return tuple(f"{word}{member.name.lower()}" for member in members) or (word,)


def feature_of(config_class: Any, word: str) -> dict[str, Any] | None:
    """The config's fields that one feature of a short form (`word`) sets, with their values;
    numbers are strings.

    Returns {} if `word` is the leading word, and None if the class has no such feature.
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
