"""Values of another width than queries and keys, as models with latent attention have them."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.integrations.fallbacks import note
from flashsmith.integrations.traceable import is_tracing
from flashsmith.integrations.transformers_pages import CALLER


def equally_wide(
    query: Any, key: Any, value: Any, scale: float | None
) -> tuple[Any, Any, Any, float | None]:
    """Queries, keys and values of one width, the narrower padded with zeros, and the scale of the
    scores, whose default depends on the width. The output's further columns are zeros."""
    d, d_value = query.shape[-1], value.shape[-1]
    if d == d_value or key.shape[-1] != d:
        return query, key, value, scale
    if d_value < d:
        return query, key, torch.nn.functional.pad(value, (0, d - d_value)), scale
    query, key = (torch.nn.functional.pad(it, (0, d_value - d)) for it in (query, key))
    return query, key, value, d**-0.5 if scale is None else scale


def note_widths(query: Any, value: Any) -> None:
    """Warns, once, that attention of two widths was padded."""
    d, d_value = query.shape[-1], value.shape[-1]
    if d != d_value and not is_tracing():
        facts = f"d {d_value}, and query's is {d}; the narrower is padded with zeros"
        note(CALLER, "value", facts)
