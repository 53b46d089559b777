#!/usr/bin/env python3
"""Computes causal attention with grouped heads on NumPy arrays and compares it with float64.

This needs neither a GPU nor PyTorch: for host arrays the emulator executes the same kernel.
"""

from __future__ import annotations

import numpy as np

import flashsmith


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in float64. Tensors have the shapes that attention() takes."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    k, v = (array.repeat(q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    position = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]  # aligned bottom right
    scores[..., np.arange(k.shape[1]) > position] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


def main() -> None:
    random = np.random.default_rng(0)
    q = random.standard_normal((2, 100, 8, 64)).astype(np.float16)  # (batch, seq_q, heads_q, d)
    k, v = (random.standard_normal((2, 300, 2, 64)).astype(np.float16) for _ in range(2))

    o, lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)

    error = float(np.abs(o - reference(q, k, v)).max())
    print(f"o {o.shape} {o.dtype}, log-sum-exp {lse.shape} {lse.dtype}")
    print(f"largest error against float64: {error:.1e}")
    assert error < 2e-3


if __name__ == "__main__":
    main()
