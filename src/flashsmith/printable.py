"""Text that others wrote, made fit to be printed: no control character reaches a terminal."""

from __future__ import annotations

# Longer texts say no more about what is wrong with them.
QUOTED_CHARACTERS = 200


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` with everything that is not printable escaped: '\\x1b' for an escape character.

    That is control and formatting characters (ANSI sequences, carriage returns, bidirectional
    marks), line separators, lone surrogates and unassigned code points: what str.isprintable()
    says no to. ``lines``: line feeds stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else _escaped(char) for char in text
    )


def quoted(text: str, most: int = QUOTED_CHARACTERS) -> str:
    """``text`` in quotes for an error message, escaped as repr() does, and cut off where it has
    more than ``most`` characters."""
    if len(text) <= most:
        return repr(text)
    return f"{text[:most]!r}... ({len(text):,} characters)"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
