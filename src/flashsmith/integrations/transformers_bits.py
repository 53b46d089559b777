"""Whose bits the attention of transformers' models has, and what cannot have canonical ones.

A row's bits depend on where its sequence begins. A rolling cache, which drops the keys that a
window has left behind, does not keep that.
"""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.runtime.bits import cannot_keep, resolve_bits

_asked: str | None = None

# A tracer records the answer as a constant, and does not read the environment.
_resolved = torch.compiler.assume_constant_result(resolve_bits)


def ask_for_bits(bits: Any) -> None:
    """Sets what attention() is asked for, from now on. Raises ArgumentError for what it cannot."""
    global _asked
    if bits is not None:
        resolve_bits(bits)
    _asked = bits


def asked_bits() -> str | None:
    """What attention() is asked for: None leaves it to FLASHSMITH_BITS."""
    return _asked


def refuse_under_canonical(why: str) -> None:
    """Raises ArgumentError where bits are to be canonical."""
    if _resolved(_asked):
        raise cannot_keep(_asked, why)


def refuse_rolling(argument: str, facts: str) -> None:
    """The same of keys that are not known to be a sequence's first ones."""
    refuse_under_canonical(
        f"{argument}: {facts}; canonical bits need all keys of a sequence, from its first on: "
        "generate with a cache that keeps them"
    )
