"""Resolves a call's keyword ``bits``; if it is None, the value of FLASHSMITH_BITS is used."""

from __future__ import annotations

from typing import Any

from flashsmith import env
from flashsmith.errors import ArgumentError
from flashsmith.semantics.signature import check_bits
from flashsmith.semantics.sizes import FREE


def resolve_bits(bits: Any) -> str:
    """Returns the value of ``Problem.bits``: 'canonical', or '' if the kernel may produce any bits.

    Raises ArgumentError when ``bits`` (or FLASHSMITH_BITS, when ``bits`` is None) has any other
    value.
    """
    return check_bits(bits, env.bits())


def named_bits(word: str) -> dict[str, str]:
    """Returns the keyword ``bits``, by name, with the value that gives a problem ``word`` as its
    ``Problem.bits`` for any value of FLASHSMITH_BITS.

    Empty when the bits are free and the variable is not set.
    """
    return {"bits": word or FREE} if word or env.bits() else {}


def cannot_keep(bits: Any, why: str) -> ArgumentError:
    """Returns the error for a call that requests canonical bits but, for the reason ``why``, cannot
    have them."""
    if bits is not None:
        return ArgumentError(f"bits={bits!r}: {why}; give bits='free'")
    return ArgumentError(
        f"{env.BITS.name}={env.bits()}: {why}; give bits='free' to this call, or unset the variable"
    )
