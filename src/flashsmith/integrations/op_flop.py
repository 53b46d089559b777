"""Computes the FLOP of attention() and of its gradients from the arguments of the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flashsmith.operations.backward import gradients_word, n_columns


def _scores(
    q: Any, k: Any, cu_q: Any, cu_k: Any, causal: bool, left: int | None, right: int | None
) -> float:
    """Returns the number of scores of one head that are not masked, summed over sequences.

    Causal attention without a window counts half of all scores. Offsets without values (fake and
    meta tensors) count as one sequence.
    """
    batch, lengths = 1, [(q.shape[0], k.shape[0])]
    if cu_q is None:
        batch, lengths = q.shape[0], [(q.shape[1], k.shape[1])]
    elif not isinstance(cu_q, FakeTensor) and cu_q.device.type != "meta":
        lengths = list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
    total = 0.0
    for rows, keys in lengths:
        if left is None and right is None:
            total += rows * keys / (2 if causal else 1)
            continue
        places = torch.arange(rows) + keys - rows
        last = places + (0 if causal else keys if right is None else right)
        first = places - (rows + keys if left is None else left)
        total += (last.clamp(max=keys - 1) - first.clamp(min=0) + 1).clamp(min=0).sum().item()
    return batch * total


def flop(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_q: Any = None, cu_k: Any = None, *_: Any,
    causal: bool = False, window_left: int | None = None, window_right: int | None = None,
    **__: Any,
) -> int:  # fmt: skip
    """Returns the FLOP of the two GEMMs: 2 * heads * (d + d_v) per score of a head."""
    scores = _scores(q, k, cu_q, cu_k, causal, window_left, window_right)
    return int(2 * q.shape[-2] * (q.shape[-1] + v.shape[-1]) * scores)


def flop_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *packing: Any,
    **options: Any,
) -> int:  # fmt: skip
    """Returns the FLOP of the backward pass: of all five GEMMs, or only of the GEMMs that the
    requested gradients need."""
    needed = gradients_word(*options["needs"][:3])
    columns = n_columns(needed, q.shape[-1], v.shape[-1])
    both = q.shape[-1] + v.shape[-1]
    return flop(q, k, v, *packing, **options) * columns // both
