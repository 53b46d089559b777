"""Warns of fallbacks to PyTorch, once for each reason, and counts them."""

from __future__ import annotations

import re
import threading
import warnings
from functools import lru_cache
from typing import NamedTuple

from flashsmith.errors import ArgumentError


class FallbackWarning(UserWarning):
    """PyTorch computed an attention that flashsmith's kernels cannot compute; the message says
    why."""


class Reason(NamedTuple):
    """Why flashsmith does not serve a call: the argument at fault, and what is wrong with it."""

    argument: str
    facts: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.facts}"

    def error(self) -> ArgumentError:
        """Makes an error of the reason, for callers who want no fallback."""
        return ArgumentError(f"{self}; strict=False leaves such calls to PyTorch")


_lock = threading.Lock()
_warned: set[tuple[str, str, str]] = set()
_count = 0


def note_fallback(caller: str, argument: str, facts: str) -> None:
    """Counts a fallback of ``caller``, and warns of it once per caller and reason.

    Facts that differ only in numbers, for example in a length, count as one reason. The arguments
    are the two fields of a Reason, because a tracer can pass strings but no other objects.
    """
    global _count
    with _lock:
        _count += 1
    if _is_new(caller, argument, facts):
        message = f"{caller} leaves this call to PyTorch: {argument}: {facts} (said once)"
        warnings.warn(message, FallbackWarning, stacklevel=3)


def note(caller: str, argument: str, facts: str) -> None:
    """Warns, once per caller and reason, that a call ignores a request or has an extra cost."""
    if _is_new(caller, argument, facts):
        warnings.warn(f"{caller}: {argument}: {facts} (said once)", UserWarning, stacklevel=3)


def _is_new(caller: str, argument: str, facts: str) -> bool:
    reason = caller, argument, _without_numbers(facts)
    with _lock:
        known = reason in _warned
        _warned.add(reason)
    return not known


@lru_cache(maxsize=1024)
def _without_numbers(facts: str) -> str:
    return re.sub(r"\d+", "", facts)


def fallback_count() -> int:
    """Returns how often this process fell back to PyTorch; calls traced by torch.compile count
    once."""
    return _count


def forget_warnings() -> None:
    """Forgets which warnings were given, so that the next fallback for a known reason warns
    again."""
    with _lock:
        _warned.clear()
