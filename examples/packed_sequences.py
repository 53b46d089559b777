#!/usr/bin/env python3
"""Computes sequences of different lengths in one call without padding (packed, or 'varlen')."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import flashsmith

LENGTHS = (90, 70, 100)
HEADS, D = 2, 64


def main() -> None:
    random = np.random.default_rng(0)
    total = sum(LENGTHS)
    q, k, v = (random.standard_normal((total, HEADS, D)).astype(np.float16) for _ in range(3))
    offsets = np.cumsum((0, *LENGTHS)).astype(np.int32)  # where each sequence begins, and the end

    packed = flashsmith.attention(q, k, v, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    for begin, end in pairwise(offsets):
        rows = slice(begin, end)
        alone = flashsmith.attention(q[None, rows], k[None, rows], v[None, rows], causal=True)
        difference = float(np.abs(packed[rows] - alone[0]).max())
        print(f"rows {begin} to {end - 1}: differs from the sequence alone by {difference:.1e}")
        assert difference < 2e-3


if __name__ == "__main__":
    main()
