"""A spelling suggestion for error messages."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'causal'?" if one of `known` is close to `word`, otherwise nothing."""
    # Imported here, since only errors need it and the import takes about 10 ms.
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
