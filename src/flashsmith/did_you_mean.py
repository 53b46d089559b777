"""A suggestion for a word that was mistyped, for error messages."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'causal'?" where one of `known` is close to `word`, else nothing."""
    # Needed by errors alone; it takes a hundredth of a second to import.
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
