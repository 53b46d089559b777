"""The masks of transformers' models, in the smallest sufficient form.

None: nothing is hidden except by causality or window. (batch, keys), boolean: False for padding,
and narrower than the keys where a cache of fixed size is not filled yet. (batch, keys),
integer: which of the sequences packed into a line a key belongs to.

Of a cache of fixed size that is not filled yet, and where nothing is padding, (batch, 1, 1, 1)
int32: how many keys each line has, where that is known on the device only; or (batch, 1, keys, 0):
how many, by its shape. Neither is read from the device. transformers passes masks of four
dimensions on as they are.

Anything else stays a (batch, 1, queries, keys) mask, which only PyTorch's attention can apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from flashsmith.integrations.pytorch_state import transform
from flashsmith.integrations.traceable import is_tracing

MaskFunction = Callable[..., Any]


def flashsmith_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Any = None,
    *,
    device: Any = "cpu",
    **keywords: Any,
) -> Any:
    """transformers calls this once per forward pass; returns one of the forms above."""
    sequences = _sequence_numbers(mask_function)
    if sequences is not None and attention_mask is None:
        return sequences
    kind = _kind(mask_function)
    if kind == "causal" and attention_mask is None and not isinstance(q_offset, int):
        filled = (q_offset + q_length - kv_offset).clamp(max=kv_length)
        return filled.to(device, torch.int32).expand(batch_size).reshape(batch_size, 1, 1, 1)
    if kind is None or (is_tracing() and isinstance(q_offset, torch.Tensor)):
        keywords.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **keywords,
        )
    real = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if real is not None:
        real = real[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)
    if kind == "causal":
        # Without the unfilled part the last query sees the last key, as attention() aligns masks.
        filled = int(q_offset) + q_length - kv_offset
        if filled < kv_length:
            if real is None:
                return torch.empty(batch_size, 1, filled, 0, dtype=torch.bool, device=device)
            return real[:, :filled]
    # Whether anything is hidden must be read from the GPU, which a tracer cannot do.
    if real is None or (_may_ask() and bool(real.all())):
        return None
    return real


def filled_keys(mask: Any) -> tuple[int | None, Any]:
    """How many keys of a cache of fixed size there are, by a mask's shape, or, (batch,) int32, on
    the device; None for what the mask does not say."""
    if mask is None or mask.dim() != 4:
        return None, None
    if mask.shape[-1] == 0:
        return mask.shape[2], None
    if mask.dtype is torch.int32 and mask.shape[1:] == (1, 1, 1):
        return None, mask.reshape(-1)
    return None, None


def _may_ask() -> bool:
    tracing = is_tracing()
    return not tracing and transform(tracing) is None


def _closure(function: MaskFunction) -> dict[str, Any]:
    """The variables that a nested function holds on to."""
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _parts(function: MaskFunction) -> dict[str, MaskFunction]:
    """The masks that and_masks() joined into one, by the name of what made each."""
    if is_tracing() or getattr(function, "__name__", "") != "and_mask":
        return {}
    joined = _closure(function).get("mask_functions", ())
    return {part.__qualname__.partition(".")[0]: part for part in joined}


def _kind(function: MaskFunction) -> str | None:
    """'causal' or 'bidirectional' for those masks, with or without a window: what a layer's own
    arguments (is_causal, sliding_window) say again. None for every other pattern."""
    if function is causal_mask_function:
        return "causal"
    if function is bidirectional_mask_function:
        return "bidirectional"
    parts = set(_parts(function))
    if parts == {"sliding_window_overlay", "causal_mask_function"}:
        return "causal"
    if parts == {"sliding_window_bidirectional_overlay", "bidirectional_mask_function"}:
        return "bidirectional"
    return None


def _sequence_numbers(function: MaskFunction) -> Any:
    """Where several sequences share a line, (batch, keys) numbers of them; else None."""
    parts = _parts(function)
    numbered = parts.pop("packed_sequence_mask_function", None)
    if numbered is None or len(parts) != 1:
        return None
    ((name, within),) = parts.items()
    # Newer versions count positions from each sequence's start; within one that is the same mask.
    if name == "remap_positions_for_packed_sequence":
        within = _closure(within)["mask_function"]
    return None if _kind(within) is None else _closure(numbered)["packed_sequence_mask"]
