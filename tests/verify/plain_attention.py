"""Attention as its definition reads, row by row in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def attend(
    query: Sequence[float],
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    scale: float,
    softcap: float,
    sink: float | None,
) -> tuple[list[float], float, float]:
    """(o, lse, row_max) of one query over the keys it sees."""
    logits = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    if softcap:
        logits = [softcap * math.tanh(logit / softcap) for logit in logits]
    everything = logits if sink is None else [*logits, sink]
    row_max = max(logits, default=-math.inf)
    if not everything:
        return [0.0] * len(query), -math.inf, row_max
    lse = math.log(sum(map(math.exp, everything)))
    o = [0.0] * len(query)
    for logit, value in zip(logits, values, strict=True):
        weight = math.exp(logit - lse)
        o = [total + weight * x for total, x in zip(o, value, strict=True)]
    return o, lse, row_max


def sees(i: int, j: int, seq_q: int, seq_k: int, causal: bool, window: tuple) -> bool:
    """Whether query i sees key j, both aligned to the bottom right."""
    before = (seq_k - j) - (seq_q - i)  # how far the key lies before the query's own place
    left, right = window
    if causal and before < 0:
        return False
    if left is not None and before > left:
        return False
    return right is None or -before <= right


def plain_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    window: tuple = (None, None),
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """o (seq_q, heads, d), lse and row_max (heads, seq_q) of one sequence, (seq, heads, d) each."""
    seq_q, heads, _ = q.shape
    seq_k, heads_k, _ = k.shape
    o, lse, row_max = np.empty(q.shape), np.empty((heads, seq_q)), np.empty((heads, seq_q))
    for i, h in np.ndindex(seq_q, heads):
        head_k = h // (heads // heads_k)
        seen = [j for j in range(seq_k) if sees(i, j, seq_q, seq_k, causal, window)]
        o[i, h], lse[h, i], row_max[h, i] = attend(
            q[i, h].tolist(),
            [k[j, head_k].tolist() for j in seen],
            [v[j, head_k].tolist() for j in seen],
            scale,
            softcap,
            None if sinks is None else float(sinks[h]),
        )
    return o, lse, row_max
