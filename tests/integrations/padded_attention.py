"""attention() in a few lines of PyTorch, for tests of what is built around it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch


def visible(length_q: int, length_k: int, causal: bool, window: tuple[Any, Any]) -> torch.Tensor:
    """(length_q, length_k): which keys a query sees; aligned to the bottom right."""
    left, right = window
    offset = torch.arange(length_k) - (torch.arange(length_q) + length_k - length_q)[:, None]
    seen = torch.ones(length_q, length_k, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    if causal:
        seen &= offset <= 0
    return seen


class _Rounded(torch.autograd.Function):
    """Rounding to a dtype: of the value, or of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Any, dtype: Any, of_gradient: bool) -> Any:
        ctx.dtype = dtype if of_gradient else value.dtype
        return value.clone() if of_gradient else value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.to(ctx.dtype).to(gradient.dtype), None, None


def one_sequence(
    q: Any, k: Any, v: Any, seen: Any, softcap: float, scale: Any, sinks: Any, change: Any = None
) -> Any:
    """(length, heads, d) tensors; in float32, but for the factors of matrix products: as in kernels
    these have q's dtype, forward and backward."""
    dtype = q.dtype
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (scale or q.shape[-1] ** -0.5)
    scores = _Rounded.apply(scores, dtype, True)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if change is not None:
        scores = change(scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", _Rounded.apply(weights, dtype, False), v)


def _changed(score_mod: Any, b: int, scores: Any) -> Any:
    heads, rows, keys = (torch.arange(n) for n in scores.shape)
    return score_mod(scores, torch.tensor(b), heads[:, None, None], rows[:, None], keys)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[Any, Any] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Any = None,
    score_mod: Any = None,
    emulate: bool = False,
) -> Any:
    """What flashsmith.attention() computes; a mask is a bool tensor."""
    output = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if cu_seqlens_q is None:
        pieces = [(index, index) for index in range(q.shape[0])]
    else:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert (starts_q[-1], starts_k[-1]) == (q.shape[0], k.shape[0])
        assert max_seqlen_q == max(b - a for a, b in pairwise(starts_q))
        assert max_seqlen_k == max(b - a for a, b in pairwise(starts_k))
        pieces = [
            (slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2]))
            for i in range(len(starts_q) - 1)
        ]
    for at_q, at_k in pieces:
        seen = visible(q[at_q].shape[0], k[at_k].shape[0], causal, window)
        if mask is not None:
            assert mask.dtype is torch.bool
            assert cu_seqlens_q is None
            seen = seen & mask[at_q if mask.shape[0] > 1 else 0]
        change = None if score_mod is None else partial(_changed, score_mod, at_q)
        o = one_sequence(q[at_q], k[at_k], v[at_k], seen, softcap, scale, sinks, change)
        output[at_q] = o.to(q.dtype)
    return output


def attention_to_front(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lens: Any,
    *,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    **keywords: Any,
) -> Any:
    """attention_with_cache() of packed queries over a cache without pages."""
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
    rows = [
        attention(q[None, begin:end], k_cache[i, None, :n], v_cache[i, None, :n], **keywords)[0]
        for i, (n, (begin, end)) in enumerate(zip(lens.tolist(), pairwise(starts), strict=True))
    ]
    return torch.cat(rows)


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lens: Any,
    *,
    page_table: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    **keywords: Any,
) -> Any:
    """attention_with_cache() with pages, which appends to them."""
    rows, page = q.reshape(-1, *q.shape[-2:]), k_cache.shape[1]
    begins = range(rows.shape[0] + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    o = torch.empty_like(rows)
    for i, (begin, end) in enumerate(pairwise(begins)):
        keys = torch.arange(int(lens[i]) + end - begin)
        places = page_table[i].long()[keys // page], keys % page
        read = []
        for cache, new in ((k_cache, k), (v_cache, v)):
            new_places = tuple(place[int(lens[i]) :] for place in places)
            cache[new_places] = new.reshape(-1, *new.shape[-2:])[begin:end]
            read.append(cache[places][None])
        o[begin:end] = attention(rows[None, begin:end], *read, **keywords)[0]
    return o.view(q.shape)
