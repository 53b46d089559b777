"""Stores the option ``bits`` for transformers' models, and raises the errors for calls that cannot
have canonical bits.

The canonical bits of a row depend on where the row's sequence begins. A rolling cache drops the
keys before a window, so the number of dropped keys must be known.
"""

from __future__ import annotations

from typing import Any

from flashsmith.integrations.pytorch_state import assume_constant_result
from flashsmith.runtime.bits import cannot_keep, resolve_bits

_asked: str | None = None

# Tracers record the result as a constant, because they cannot trace a read of the environment.
_resolved = assume_constant_result(resolve_bits)


def ask_for_bits(bits: Any) -> None:
    """Sets ``bits`` for all later calls to attention(). Raises ArgumentError for other values."""
    global _asked
    if bits is not None:
        resolve_bits(bits)
    _asked = bits


def asked_bits() -> str | None:
    """Returns the argument ``bits`` for calls to attention(); None means that FLASHSMITH_BITS
    decides."""
    return _asked


def wants_canonical() -> bool:
    """Whether bits must be canonical, because of the option ``bits`` or the environment
    variable."""
    return bool(_resolved(_asked))


def refuse_under_canonical(why: str) -> None:
    """Raises ArgumentError, with the reason ``why``, if bits must be canonical."""
    if wants_canonical():
        raise cannot_keep(_asked, why)


def refuse_rolling(argument: str, facts: str) -> None:
    """Raises ArgumentError if bits must be canonical. Canonical bits need the positions of the keys
    in their sequence, and the caller does not know these positions."""
    refuse_under_canonical(
        f"{argument}: {facts}; canonical bits need each key's position in its sequence: generate "
        "with a cache that keeps all keys"
    )
