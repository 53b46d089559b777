"""Attention in float64 by PyTorch's own operations, which differentiate it."""

from __future__ import annotations

from typing import Any

import torch


def exact_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **_: Any,
) -> tuple[Any, Any]:
    """attention()'s output and log-sum-exp, in its shapes."""
    if cu_seqlens_q is not None:
        starts = (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
        o, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        for b in range(len(starts[0]) - 1):
            rows, keys = (slice(*side[b : b + 2]) for side in starts)
            part, part_lse = exact_attention(
                *(q[None, rows], k[None, keys], v[None, keys]),
                causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks,
            )  # fmt: skip
            o = o.index_copy(0, torch.arange(len(q))[rows], part[0])
            lse = lse.index_copy(1, torch.arange(len(q))[rows], part_lse[0])
        return o, lse
    group = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(group, 2) for tensor in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    before = (i + k.shape[1] - q.shape[1]) - j
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(before, dtype=torch.bool)
    if left is not None:
        hidden |= before > left
    if right is not None:
        hidden |= -before > right
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        rows = (*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(rows)], -1)
    lse = scores.logsumexp(-1)
    # A row without keys has no weights, not those of 0/0.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights[..., : k.shape[1]], v), lse
