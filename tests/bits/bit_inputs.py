"""What a sequence's tensors hold: ordinary numbers, and numbers at which orders show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from oracle import CHUNK

Draw = Callable[[np.random.Generator, tuple[int, ...], tuple[int, ...]], tuple[Any, Any, Any]]


def _random(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    return rng.standard_normal(q), rng.standard_normal(k), rng.standard_normal(k)


def _outliers(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """A few rows, and a few elements, stand out."""
    drawn = _random(rng, q, k)
    for x in drawn:
        x *= np.where(rng.random((*x.shape[:-1], 1)) < 0.02, 12.0, 1.0)
        x *= np.where(rng.random(x.shape) < 0.002, 1e3, 1.0)
    return drawn


def _equal(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """All keys alike, and all values."""
    row = rng.standard_normal(k[-1])
    return rng.standard_normal(q), np.broadcast_to(row, k), np.broadcast_to(row[::-1], k)


def _zeros(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Of either sign."""
    return tuple(np.where(rng.random(shape) < 0.5, 0.0, -0.0) for shape in (q, k, k))  # type: ignore[return-value]


def _subnormal(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Less than the smallest normal fp16, down to its smallest step."""
    return tuple(rng.integers(-40, 41, shape) * 2.0**-24 for shape in (q, k, k))  # type: ignore[return-value]


def _fading(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Later keys have so much more weight that what they leave of the first 64 keys' negative
    values underflows, where the row is divided by its sum."""
    keys, values, queries = np.zeros(k), np.zeros(k), np.zeros(q)
    octaves = 127 * np.log(2) * q[-1] ** 0.5
    queries[..., 0], keys[:, 128:, :, 0] = 64, octaves / 64
    values[:, :64] = -(2.0**-24)
    return queries, keys, values


def _lost(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Scores so large that their products with the scale have no bits behind the point: the
    first chunk's largest has a probability of 0, and the next one's a finite one."""
    keys, values, queries = np.zeros(k), rng.standard_normal(k), np.full(q, 6e4)
    queries[..., 16:] = 0  # sums are exact: tensor cores take so many columns at once
    sigma = np.float32(q[-1] ** -0.5) * np.float32(np.log2(np.e))
    elements = np.arange(6e4, 4e4, -32)
    exact = np.float64(sigma) * 16 * 6e4 * elements
    apart = exact - exact.astype(np.float32)
    first = elements[np.argmax(apart < -200)]
    keys[:, 5:6] = first  # there may be fewer
    keys[:, CHUNK + 6 :] = elements[np.argmax((np.abs(apart) < 50) & (elements < first))]
    return queries, keys, values


def _cancelling(rng: Any, q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Chunks' sums of values that nearly cancel each other: what a merge rounds is all that is
    left."""
    keys, queries = np.zeros(k), np.zeros(q)
    queries[..., 0], keys[:, CHUNK:, :, 0] = 1, 1.37
    weight = np.exp(1.37 * q[-1] ** -0.5) * (k[1] - CHUNK) / CHUNK
    values = np.broadcast_to(rng.standard_normal((k[0], 1, *k[2:])), k).copy()
    values[:, CHUNK:] *= -1 / weight
    return queries, keys, values


KINDS: dict[str, Draw] = {
    "random": _random,
    "outliers": _outliers,
    "equal": _equal,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "fading": _fading,
    "lost": _lost,
    "cancelling": _cancelling,
}


def draw(
    kind: str, seed: int, dtype: Any, q: tuple[int, ...], k: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of shapes (batch, length, heads, d), finite in the dtype."""
    largest = 6e4
    drawn = KINDS[kind](np.random.default_rng(seed), q, k)
    q_, k_, v_ = (np.clip(x, -largest, largest).astype(dtype) for x in drawn)
    return q_, k_, v_
