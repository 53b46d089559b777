"""Zero-padding for values whose d differs from the d of Q and K, as in latent attention."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.integrations.fallbacks import note
from flashsmith.integrations.traceable import is_tracing
from flashsmith.integrations.transformers_pages import CALLER


def equally_wide(
    query: Any, key: Any, value: Any, scale: float | None
) -> tuple[Any, Any, Any, float | None]:
    """Q, K and V zero-padded to one d, and the softmax scale.

    The default scale depends on d, so it is set explicitly if Q and K are padded. If V is padded,
    the additional output columns are zero.
    """
    d, d_value = query.shape[-1], value.shape[-1]
    if d == d_value or key.shape[-1] != d:
        return query, key, value, scale
    if d_value < d:
        return query, key, torch.nn.functional.pad(value, (0, d - d_value)), scale
    query, key = (torch.nn.functional.pad(it, (0, d_value - d)) for it in (query, key))
    return query, key, value, d**-0.5 if scale is None else scale


def note_widths(query: Any, value: Any) -> None:
    """Warns once that tensors of different d were padded."""
    d, d_value = query.shape[-1], value.shape[-1]
    if d != d_value and not is_tracing():
        facts = f"d {d_value}, and query's is {d}; the narrower is padded with zeros"
        note(CALLER, "value", facts)
