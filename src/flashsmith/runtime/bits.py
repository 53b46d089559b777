"""Whose bits a call's rows have: by its keyword ``bits``, or where that is None FLASHSMITH_BITS."""

from __future__ import annotations

from typing import Any

from flashsmith import env
from flashsmith.errors import ArgumentError
from flashsmith.semantics.signature import check_bits
from flashsmith.semantics.sizes import FREE


def resolve_bits(bits: Any) -> str:
    """The word of a Problem's bits: 'canonical', or '' for free.

    Raises ArgumentError where ``bits``, or the variable where it is None, is something else.
    """
    return check_bits(bits, env.bits())


def named_bits(word: str) -> dict[str, str]:
    """The keyword that gives a call a Problem's bits, whatever FLASHSMITH_BITS says; none where
    these are free and the variable says nothing."""
    return {"bits": word or FREE} if word or env.bits() else {}


def cannot_keep(bits: Any, why: str) -> ArgumentError:
    """The error of a call that asks for canonical bits, in a way that cannot keep them."""
    if bits is not None:
        return ArgumentError(f"bits={bits!r}: {why}; give bits='free'")
    return ArgumentError(
        f"{env.BITS.name}={env.bits()}: {why}; give bits='free' to this call, or unset the variable"
    )
