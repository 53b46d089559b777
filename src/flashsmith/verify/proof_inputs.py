"""Seeded inputs for proofs: plain random inputs, and inputs that are difficult for a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem
from flashsmith.verify.attention_semantics import Attention, Lens

# The largest |scaled score| of 'large_scores'. When rounded to bf16, it must not exceed 1,000.
LARGE_SCORE = 990.0
# How far the first tile's scaled scores are below (or above) the other tiles' scores.
TILE_GAP = 200.0
# The largest scaled score of 'far_scores'. From four times this value on, the largest probability
# is not exactly 1: it is computed as 2^e, where e is the rounding error of the logit, and rounded
# to 16 bits.
FAR_SCORE = 4e3
# For 'growing_maxima': the standard deviation of the scaled scores within a tile of keys.
GROWING_NOISE = 0.1


def check_seed(seed: int) -> None:
    """Raises ArgumentError unless `seed` can seed random numbers."""
    if seed < 0:
        raise ArgumentError(f"seed={seed!r}: give a whole number, at least 0")


@dataclass(frozen=True)
class InputSpec:
    """Everything that determines a set of inputs. Equal specs give equal bits.

    ``heads``: the number of query heads.
    ``heads_k``: None stands for ``heads``.
    ``first_tile``: the B_c of the kernel. Two kinds of inputs lower or raise the scores of as many
        first keys, so that the running maximum changes exactly between two tiles. In a third kind,
        scores grow from tile to tile.
    ``lens_q``, ``lens_k``: if given, each sequence is drawn like a batch of one and packed after
        the previous one; batch, seq_q and seq_k are ignored.
    """

    kind: str
    dtype: DType
    batch: int
    seq_q: int
    seq_k: int
    heads: int
    d: int
    scale: float
    seed: int = 0
    first_tile: int = 0
    heads_k: int | None = None
    lens_q: Lens | None = None
    lens_k: Lens | None = None
    sinks: bool = False
    d_v: int = 0  # 0 stands for d

    @classmethod
    def of(
        cls, problem: Problem, attention: Attention, kind: str, seed: int, sinks: Any, tile: int = 0
    ) -> InputSpec:
        """The spec for the tensors of a problem; ``tile`` becomes first_tile."""
        sizes = problem.batch, problem.seq_q, problem.seq_k, problem.heads_q, problem.d
        lens = attention.lens_q, attention.lens_k
        given = kind, problem.dtype, *sizes, attention.scale, seed, tile, problem.heads_k, *lens
        return cls(*given, sinks=bool(sinks), d_v=problem.d_v)

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.heads // (self.heads_k or self.heads)


@dataclass(frozen=True)
class Inputs:
    """q, k and v, (batch, seq, heads, d) or, if packed, (total, heads, d), in the dtype of the
    kernel; ``sinks`` (heads,) in fp32, or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None = None


def numpy_dtype(dtype: DType) -> np.dtype:
    """The NumPy dtype for a dtype of kernels (for bf16, ml_dtypes' type)."""
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.BF16 else np.float16)


def default_scale(d: int) -> float:
    """1 / sqrt(d), the usual scale of attention."""
    return 1.0 / math.sqrt(d)


Draw = tuple[np.ndarray, np.ndarray, np.ndarray]


def _normal(rng: np.random.Generator, spec: InputSpec) -> Draw:
    q = rng.standard_normal((spec.batch, spec.seq_q, spec.heads, spec.d), dtype=np.float32)
    heads_k = spec.heads // spec.group
    k, v = (
        rng.standard_normal((spec.batch, spec.seq_k, heads_k, d), dtype=np.float32)
        for d in (spec.d, spec.d_v or spec.d)
    )
    return q, k, v


def _large_scores(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """All rows of q and k have the same norm, so that scores lie between -LARGE_SCORE and
    LARGE_SCORE and reach both."""
    q, k, v = _normal(rng, spec)
    radius = math.sqrt(LARGE_SCORE / spec.scale)
    q *= radius / np.linalg.norm(q, axis=-1, keepdims=True)
    k *= radius / np.linalg.norm(k, axis=-1, keepdims=True)
    k[:, 0] = q[:, 0, :: spec.group]
    k[:, -1] = -q[:, -1, :: spec.group]
    return q, k, v


def _constant(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """Each head is constant, so all weights are equal, and the output is the constant of v."""
    q, k, v = _normal(rng, spec)
    levels = rng.choice([-1.5, -0.75, 0.375, 0.5, 1.25], size=(3, spec.batch, 1, spec.heads, 1))
    for array, level in zip((q, k, v), levels, strict=True):
        array[:] = level[:, :, : array.shape[2]]
    return q, k, v


def _one_hot(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """Row i attends only to key pi(i), so that a wrong column, row or permutation of v cannot
    average out."""
    q, k, v = _normal(rng, spec)
    k[:] = rng.choice(np.array([-1.0, 1.0], dtype=np.float32), size=k.shape)
    chosen = rng.permutation(np.arange(spec.seq_q) % spec.seq_k)
    # The product of a key with itself is d, and with another key it is rarely above d / 2. So the
    # score of the chosen key, 60 nats, is usually at least 30 nats above all other scores.
    q[:] = np.repeat(k[:, chosen], spec.group, axis=2) * (60.0 / (spec.scale * spec.d))
    return q, k, v


def _shifted_first_tile(rng: np.random.Generator, spec: InputSpec, gap: float) -> Draw:
    """All queries have a direction in common.

    Only keys of the first tile have it, or the opposite direction if ``gap`` is negative.
    """
    q, k, v = _normal(rng, spec)
    direction = rng.choice(np.array([-1.0, 1.0], dtype=np.float32), size=spec.d)
    direction /= math.sqrt(spec.d)
    along = np.float32(math.sqrt(abs(gap) / spec.scale))
    for array in (q, k):
        array -= (array @ direction)[..., None] * direction
    q += along * direction
    k[:, : spec.first_tile] += math.copysign(along, gap) * direction
    return q, k, v


def _low_first_tile(rng: np.random.Generator, spec: InputSpec) -> Draw:
    return _shifted_first_tile(rng, spec, -TILE_GAP)


def _high_first_tile(rng: np.random.Generator, spec: InputSpec) -> Draw:
    return _shifted_first_tile(rng, spec, TILE_GAP)


def _growing_maxima(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """The scores of a row grow from tile to tile of keys, beginning with the last tile. From one
    tile to the next they grow by 0.75 to 0.95 times log2(B_c / 16) octaves. A kernel that rescales
    lazily adopts a new maximum if the key with this maximum has enough weight in the sums so far,
    or if the maximum has grown too much. Here the key's weight is just too small, so that only the
    bound on the maximum's growth makes the kernel rescale."""
    q, k, v = _normal(rng, spec)
    tile = spec.first_tile
    direction = rng.choice(np.array([-1.0, 1.0], dtype=np.float32), size=spec.d)
    direction /= math.sqrt(spec.d)
    for array in (q, k):
        array -= (array @ direction)[..., None] * direction
    q *= GROWING_NOISE / (spec.scale * math.sqrt(spec.d))
    along = np.float32(math.sqrt(math.log(max(2.0, tile / 16)) / spec.scale))
    q += rng.uniform(0.75, 0.95, q.shape[:-1]).astype(np.float32)[..., None] * along * direction
    visited = (spec.seq_k - 1) // tile - np.arange(spec.seq_k) // tile
    k += (visited.astype(np.float32) * along)[:, None, None] * direction
    return q, k, v


def _nonfinite(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """There are a few NaN and infinities: in v, in a row of q, and (in one of three problems) in a
    key. The gaps between the elements of the arrays contain more NaN."""
    q, k, v = _normal(rng, spec)
    values = np.array([math.nan, math.inf, -math.inf], dtype=np.float32)
    for array, places in ((v, 4), (q, 1), (k, int(rng.integers(3) == 0))):
        for _ in range(places):
            array[tuple(rng.integers(array.shape))] = rng.choice(values)
    return q, k, v


def _lost_keys(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """All keys from a random key on have scores of -inf, and so do half of the keys before it.
    Kernels visit the last keys first."""
    q, k, v = _normal(rng, spec)
    q[:] = np.abs(q) + 0.1
    lost = np.arange(spec.seq_k) >= spec.seq_k - rng.integers(1, spec.seq_k + 1)
    lost |= rng.integers(2, size=spec.seq_k) == 0
    k[:, lost] = -math.inf
    return q, k, v


def _huge(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """Values at the end of the range of the dtype. q is large and k is small, so that scores are
    moderate; v is as large as its fp32 sums allow."""
    q, k, v = _normal(rng, spec)
    large, largest_v = (1e4, 8e3) if spec.dtype is DType.FP16 else (1e18, 1e30)
    return q * np.float32(large), k / np.float32(large), v * np.float32(largest_v)


def _far_scores(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """Like 'one_hot', but with scores up to FAR_SCORE.

    Each row attends to one key, and every sum is exact in fp32.
    """
    q, k, v = _one_hot(rng, spec)
    largest = math.sqrt(FAR_SCORE / (spec.scale * spec.d))
    # The largest power of two in fp16 is 2^15.
    size = np.float32(2.0 ** min(14, math.floor(math.log2(largest))))
    return np.sign(q) * size, np.sign(k) * size, v


_DRAWS: dict[str, Callable[[np.random.Generator, InputSpec], Draw]] = {
    "random": _normal,
    "large_scores": _large_scores,
    "constant": _constant,
    "one_hot": _one_hot,
    "low_first_tile": _low_first_tile,
    "high_first_tile": _high_first_tile,
    "growing_maxima": _growing_maxima,
    "nonfinite": _nonfinite,
    "lost_keys": _lost_keys,
    "huge": _huge,
    "far_scores": _far_scores,
}

INPUT_KINDS = tuple(_DRAWS)
# Kinds of inputs that depend on the B_c of the kernel.
TILE_KINDS = ("low_first_tile", "high_first_tile", "growing_maxima")


def make_inputs(spec: InputSpec) -> Inputs:
    """Draws the inputs that ``spec`` describes.

    Raises ArgumentError for an unknown kind. Also raised for the kinds in TILE_KINDS if the first
    tile has all keys, because there is no later tile.
    """
    if spec.kind not in _DRAWS:
        raise ArgumentError(f"inputs={spec.kind!r}: allowed are {', '.join(INPUT_KINDS)}")
    longest = max(spec.lens_k, default=0) if spec.lens_k is not None else spec.seq_k
    if spec.kind in TILE_KINDS and not 0 < spec.first_tile < longest:
        raise ArgumentError(
            f"inputs={spec.kind!r}: the first tile has {spec.first_tile} of {longest} keys; "
            "give a seq of at least two key tiles"
        )
    rng = np.random.default_rng(spec.seed)
    drawn = [_draw(rng, one) for one in _sequences(spec)]
    if spec.lens_q is None:
        ((q, k, v),) = drawn
    else:
        q, k, v = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    if spec.kind == "nonfinite":
        q, k, v = (_amid_nan(array, 8 * (1 + i)) for i, array in enumerate((q, k, v)))
    return Inputs(q, k, v, draw_sinks(spec) if spec.sinks else None)


def _amid_nan(array: np.ndarray, columns: int) -> np.ndarray:
    """The array as a view of a larger array of NaN, with one more batch, row and head, and
    ``columns`` more columns."""
    more = (*(size + 1 for size in array.shape[:-1]), array.shape[-1] + columns)
    inside = tuple(slice(size) for size in array.shape)
    whole = np.full(more, math.nan, array.dtype)
    whole[inside] = array
    return whole[inside]


def _sequences(spec: InputSpec) -> list[InputSpec]:
    """The dense problems that are drawn separately: the problem itself, or each packed sequence."""
    if spec.lens_q is None or spec.lens_k is None:
        return [spec]
    return [
        replace(spec, batch=1, seq_q=seq_q, seq_k=seq_k)
        for seq_q, seq_k in zip(spec.lens_q, spec.lens_k, strict=True)
    ]


def _draw(rng: np.random.Generator, spec: InputSpec) -> Draw:
    """The arrays of one dense problem in its dtype; for a packed sequence, without the batch
    dimension."""
    # Without queries or keys there are no scores, and the kind has no effect.
    kind = spec.kind if spec.batch and spec.seq_q and spec.seq_k else "random"
    q, k, v = (array.astype(numpy_dtype(spec.dtype)) for array in _DRAWS[kind](rng, spec))
    return (q, k, v) if spec.lens_q is None else (q[0], k[0], v[0])


def draw_sinks(spec: InputSpec) -> np.ndarray:
    """For each head a logit in fp32 that is about as large as the largest score of a row, so that
    both the sink and the keys have weight."""
    rng = np.random.default_rng([spec.seed, spec.heads])
    return rng.normal(1.0, 2.0, spec.heads).astype(np.float32)
