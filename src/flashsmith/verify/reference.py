"""What attention should give: in float64, and as the kernel's own precision allows at best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashsmith.verify.inputs import Inputs, InputSpec, make_inputs

# Scores held at once, bytes: a block of rows is processed so that long sequences fit in memory.
_SCORE_BYTES = 64 << 20


@dataclass(frozen=True)
class References:
    """The two references of one problem.

    ``o`` float64, never rounded, (batch, seq_q, heads, d); ``lse`` float64, natural logarithm,
    (batch, heads, seq_q); ``same_precision`` o as 16-bit arithmetic gives it, in the dtype.
    """

    o: np.ndarray
    lse: np.ndarray
    same_precision: np.ndarray


def _softmax(
    q: np.ndarray, k: np.ndarray, scale: float, precision: type[np.floating]
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (rows, keys) and LSE (rows,) of one head, computed in ``precision``."""
    scores = (q.astype(precision) @ k.astype(precision).T) * precision(scale)
    top = scores.max(axis=-1, keepdims=True)
    np.exp(scores - top, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= total
    return scores, (top + np.log(total))[:, 0]


def compute_references(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> References:
    """Both references for 16-bit q, k, v of shape (batch, seq, heads, d).

    The same-precision one follows a textbook kernel: fp32 scores and softmax from the 16-bit
    inputs, weights rounded to the dtype before the product with v, fp32 sums, o rounded.
    """
    batch, seq_q, heads, d = q.shape
    o = np.empty((batch, seq_q, heads, d))
    lse = np.empty((batch, heads, seq_q))
    same = np.empty((batch, seq_q, heads, d), dtype=q.dtype)
    rows = max(1, _SCORE_BYTES // (8 * k.shape[1]))
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, :, h], v[b, :, h]
            for start in range(0, seq_q, rows):
                block = slice(start, start + rows)
                queries = q[b, block, h]
                weights, lse[b, h, block] = _softmax(queries, keys, scale, np.float64)
                o[b, block, h] = weights @ values.astype(np.float64)
                weights, _ = _softmax(queries, keys, scale, np.float32)
                rounded = weights.astype(q.dtype).astype(np.float32)
                same[b, block, h] = (rounded @ values.astype(np.float32)).astype(q.dtype)
    return References(o, lse, same)


@lru_cache(maxsize=4)
def inputs_and_references(spec: InputSpec) -> tuple[Inputs, References]:
    """Inputs and references of ``spec``, read-only; kept, because a set of configs shares them."""
    inputs = make_inputs(spec)
    references = compute_references(inputs.q, inputs.k, inputs.v, spec.scale)
    arrays = (inputs.q, inputs.k, inputs.v)
    for array in (*arrays, references.o, references.lse, references.same_precision):
        array.flags.writeable = False
    return inputs, references
