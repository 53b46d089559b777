"""Attention of one sequence in float64, written densely with PyTorch, for random_calls.py.

It shares no code with flashsmith: masks are matrices, functions are called as they are, and
gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Meaning:
    """What a call computes, for all of its sequences.

    ``scale`` has one factor per head of q. ``bias`` is (batch or 1, heads or 1, q, k).
    """

    scale: torch.Tensor
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    score: Function | None = None
    mask: Function | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Where a sequence's queries are.

    ``end`` is the position after the last key, which the last query has if masks are aligned;
    ``first`` is the q_idx of the first query for functions.
    """

    sequence: int
    end: int
    first: int


@dataclass(frozen=True)
class Result:
    """(queries, heads, d) outputs, (heads, queries) log-sum-exps, and the sum of |p v|."""

    o: torch.Tensor
    lse: torch.Tensor
    magnitude: torch.Tensor


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meaning: Meaning, place: Place
) -> Result:
    """Attention of q (queries, heads, d) over k and v (keys, heads_k, d and d of v)."""
    queries, heads, _ = q.shape
    keys, heads_k, _ = k.shape
    group = heads // heads_k
    k, v = (it.repeat_interleave(group, 1) for it in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * meaning.scale[:, None, None]
    if meaning.softcap:
        scores = meaning.softcap * torch.tanh(scores / meaning.softcap)
    row = torch.arange(queries, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)[None, :]
    at = row + place.end - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    left, right = meaning.window
    if meaning.causal:
        visible &= column <= at
    if left is not None:
        visible &= column >= at - left
    if right is not None:
        visible &= column <= at + right
    head = torch.arange(heads, device=q.device)[:, None, None]
    sequence = torch.tensor(place.sequence, device=q.device)
    indices = (sequence, head, (row + place.first)[None], column[None])
    if meaning.score is not None:
        scores = meaning.score(scores, *indices)
    if meaning.bias is not None:
        some = meaning.bias[place.sequence if len(meaning.bias) > 1 else 0]
        scores = scores + some[:, :queries, :keys].double()
    shown = visible[None].expand(heads, -1, -1)
    if meaning.mask is not None:
        shown = shown & meaning.mask(*indices)
    scores = scores.masked_fill(~shown, -math.inf)
    if meaning.sinks is not None:
        sink = meaning.sinks.double()[:, None, None].expand(-1, queries, 1)
        scores = torch.cat((scores, sink), -1)
    largest = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1)
    if not scores.shape[-1]:
        empty = q.new_zeros(queries, heads, v.shape[-1])
        return Result(empty, q.new_full((heads, queries), -math.inf), empty)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    powers = (scores - largest).exp()
    total = powers.sum(-1, keepdim=True)
    p = (powers / total.masked_fill(total == 0, 1.0))[..., :keys]
    o = torch.einsum("hqk,khd->qhd", p, v)
    magnitude = torch.einsum("hqk,khd->qhd", p.detach(), v.detach().abs())
    return Result(o, (total.log() + largest)[..., 0], magnitude)
