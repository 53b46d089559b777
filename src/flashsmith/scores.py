"""Scores as values: ALiBi, relative-position tables, T5, distances, softcap and bias tensors.

A value is a score function (score, b, h, q_idx, kv_idx) for ``attention(score_mod=...)`` and
``flex_attention``. ``a + b`` applies a, then b. Tensors and numbers are data: other values need no
recompilation. Distances count from q_idx; give ``positions='end'`` where seq_q and seq_k differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.tracing import table_reader
from flashsmith.tracing.captures import rank_of

__all__ = ["ScoreValue", "alibi", "bias", "relative", "softcap", "squared_distance", "t5"]


class ScoreValue:
    """A change of scores: a function (score, b, h, q_idx, kv_idx) that returns the new score.

    The function gets ``parts`` (its tensors, numbers and other functions) before the score, as in a
    MaskValue.
    """

    def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
        self.function = function
        self.parts = parts

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(*self.parts, score, b, h, q_idx, kv_idx)

    def __add__(self, other: Callable[..., Any]) -> ScoreValue:
        return ScoreValue(_one_after_another, self, other)


def _one_after_another(one: Any, other: Any, score: Any, *indices: Any) -> Any:
    return other(one(score, *indices), *indices)


def alibi(slopes: Any) -> ScoreValue:
    """score - slope |q - k|, with a slope for each query head: (heads,) or (batch, heads)."""
    if _rank("slopes", slopes, (1, 2), "(heads,) or (batch, heads)") == 1:
        return ScoreValue(_alibi, slopes)
    return ScoreValue(_alibi_of_batch, slopes)


def _alibi(slopes: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - slopes[h] * abs(q - k)


def _alibi_of_batch(slopes: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - slopes[b, h] * abs(q - k)


def relative(table: Any, center: int) -> ScoreValue:
    """score + table[h, center + k - q], for any function of k - q.

    Args:
        table: (heads, n) or (n,) of floats. Keys further away read the nearest element.
        center: the index of the element for k = q.
    """
    last = int(table.shape[-1]) - 1
    if _rank("table", table, (1, 2), "(heads, n) or (n,)") == 1:
        return ScoreValue(_of_distance, table, center, last)
    return ScoreValue(_of_distance_and_head, table, center, last)


def _of_distance(table: Any, center: Any, last: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + table[_within(k - q + center, last)]


def _of_distance_and_head(
    table: Any, center: Any, last: Any, s: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    return s + table[h, _within(k - q + center, last)]


def _within(index: Any, last: Any) -> Any:
    """The index clamped to 0..last. The order of the two clamps lets the sign analysis find that
    the result is not negative."""
    return index.clip(max=last).clip(min=0)


def t5(table: Any, *, bidirectional: bool, max_distance: int = 128) -> ScoreValue:
    """T5's relative position bias.

    Args:
        table: (buckets, heads) of floats, the model's embedding.
        bidirectional: whether keys after the query have separate buckets, as in encoders.
        max_distance: keys at least this far away share the last bucket.

    Raises ArgumentError for a table of the wrong rank.
    """
    _rank("table", table, (2,), "(buckets, heads)")
    distances = np.arange(-max_distance, max_distance + 1)
    buckets = _t5_buckets(distances, int(table.shape[0]), bidirectional, max_distance)
    # Kernels read a table faster if the values for neighbouring distances are adjacent in memory.
    return relative(table.T[:, buckets], max_distance)


def _t5_buckets(
    distances: np.ndarray, n_buckets: int, bidirectional: bool, max_distance: int
) -> np.ndarray:
    """The bucket of each distance k - q, as in T5: exact for near keys, then logarithmic."""
    offset = np.zeros_like(distances)
    if bidirectional:
        n_buckets //= 2
        offset = np.where(distances > 0, n_buckets, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    n_exact = n_buckets // 2
    # This is computed in fp32, as in the model, because some distances fall into other buckets in
    # another precision.
    far = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(n_exact))
    far = far / np.float32(np.log(max_distance / n_exact)) * np.float32(n_buckets - n_exact)
    far = np.minimum(n_exact + far.astype(np.int64), n_buckets - 1)
    found: np.ndarray = offset + np.where(distances < n_exact, distances, far)
    return found


def squared_distance(strength: Any) -> ScoreValue:
    """score - strength (q - k)^2; strength is a number or (heads,)."""
    if rank_of(strength) == 1:
        return ScoreValue(_squared_of_head, strength)
    return ScoreValue(_squared, strength)


def _squared_of_head(strength: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - strength[h] * ((q - k) * (q - k))


def _squared(strength: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - strength * ((q - k) * (q - k))


def softcap(cap: float) -> ScoreValue:
    """cap tanh(score / cap), like attention's own softcap, which is quicker."""
    return ScoreValue(_capped, cap)


def _capped(cap: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return cap * (s / cap).tanh()


def bias(tensor: Any) -> ScoreValue:
    """score + tensor[b, h, q, k], for a float tensor (batch or 1, heads or 1, seq_q, seq_k) or one
    without leading dimensions."""
    _rank("tensor", tensor, (2, 3, 4), "(batch or 1, heads or 1, seq_q, seq_k)")
    return ScoreValue(_plus, table_reader(tuple(tensor.shape)), tensor)


def _plus(at: Any, tensor: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + at(tensor, b, h, q, k)


def _rank(name: str, tensor: Any, ranks: tuple[int, ...], allowed: str) -> int:
    shape = tuple(getattr(tensor, "shape", ()))
    if len(shape) not in ranks:
        raise ArgumentError(f"{name}: shape {shape}; give a tensor {allowed}")
    return len(shape)
