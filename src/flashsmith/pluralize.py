"""A number and its noun, for messages: '1 config', '7 configs'."""

from __future__ import annotations


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """The number and the noun. The plural ends in an s unless `plural` gives another form."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
