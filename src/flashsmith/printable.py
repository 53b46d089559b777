"""Escapes untrusted text for printing, so that no control character reaches a terminal."""

from __future__ import annotations

# The largest length of a quote in a message. A longer quote would not help to find the mistake.
QUOTED_CHARACTERS = 400


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` with everything that is not printable escaped: '\\x1b' for an escape character.

    These are control and formatting characters (ANSI sequences, carriage returns, bidirectional
    marks), line separators, lone surrogates and unassigned code points: all characters for which
    str.isprintable() is false. With ``lines``, line feeds and tabs are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char in "\n\t") else _escaped(char)
        for char in text
    )


def quoted(value: object, most: int = QUOTED_CHARACTERS) -> str:
    """repr(value) for an error message: cut off after ``most`` characters. It never raises."""
    if isinstance(value, str):
        if len(value) <= most:
            return repr(value)
        return f"{value[:most]!r}... ({len(value):,} characters)"
    try:
        text = repr(value)
    except Exception:  # an unknown class's __repr__ raised, or an int has thousands of digits
        bits = f" of {value.bit_length():,} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{bits}>"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
