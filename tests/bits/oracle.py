"""canonical-1 as a program: what docs/bits.md says a row's output and log-sum-exp are, bit by bit.

The tensor cores' sums are ptxlab's, and ex2, lg2 and rcp NumPy's, which stand for the GPU's in the
emulator. Nothing else is shared with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsmith.families.canonical import CHUNK
from ptxlab.machine.numeric import fma32, maximum_number
from ptxlab.machine.tensor_cores import OPERAND_TYPES, TENSOR_CORES

f4 = np.float32
LN2, LOG2E, LARGEST = f4(0.693147180559945309), f4(1.44269504088896341), np.finfo(f4).max
STEP = 16  # keys, or columns, that an mma takes


@dataclass(frozen=True)
class Rows:
    """Some of a head's rows over its sequence: q (rows, d), k (keys, d) and v (keys, d_v) in 16
    bits, and which keys each row sees, (rows, keys)."""

    q: Any
    k: Any
    v: Any
    sees: Any
    scale: float
    softcap: float = 0.0
    sink: float | None = None
    arch: int = 90  # 90 for sm_90

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse): (rows, d_v) in the inputs' dtype, (rows,) in float32."""
        with np.errstate(all="ignore"):
            return self._end(*self._merged())

    @property
    def sigma(self) -> Any:
        return f4(self.softcap or self.scale) * LOG2E

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        d, d_v = self.q.shape[1], self.v.shape[1]
        if max(d, d_v) > 256:
            return 32
        is_long = max(d, d_v) <= 128 and (d == d_v or min(d, d_v) <= 64)
        return (64 if is_long else 32) * (2 if self.arch >= 90 else 1)

    def mma(self, a: Any, b: Any, c: Any) -> Any:
        """c + a b in steps of 16, ascending."""
        if not c.size:
            return c
        kind = OPERAND_TYPES["f16" if self.q.dtype == np.float16 else "bf16"]
        a, b = (np.ascontiguousarray(x, f4)[None] for x in (a, b))
        return TENSOR_CORES[self.arch].multiply_add(a, b, c[None], kind, STEP)[0]

    def _chunk(self, keys: slice) -> tuple[Any, Any, Any]:
        """The offset, sum and O of a chunk's keys."""
        rows, d = len(self.q), self.v.shape[1]
        tile = self.tile
        floor = f4(-3e38)
        m = np.full(rows, maximum_number(floor * (f4(1) / self.sigma), floor))
        lanes, o = np.zeros((rows, 4), f4), np.zeros((rows, d), f4)
        for first in range(keys.start, keys.stop, tile):
            there = slice(first, min(first + tile, len(self.k)))
            s = self._scores(there)
            before, m = m, maximum_number(m, np.fmax.reduce(s, axis=1, initial=-np.inf))
            offset = m * self.sigma
            factor = np.where(m > before, np.exp2(before * self.sigma - offset), f4(1))[:, None]
            p = np.zeros((rows, tile), f4)
            p[:, : s.shape[1]] = np.exp2(fma32(s, self.sigma, -offset[:, None]))
            pairs = p.reshape(rows, tile // STEP, 2, 4, 2)  # (key // 8) % 2, lane class, key % 2
            added = pairs[:, :, 0] + pairs[:, :, 1]
            terms = added[..., 0] + added[..., 1]
            of_tile = terms[:, 0]
            for step in range(1, tile // STEP):
                of_tile = of_tile + terms[:, step]
            lanes = lanes * factor + of_tile
            v = np.zeros((tile, d), self.v.dtype)
            v[: s.shape[1]] = self.v[there]
            o = self.mma(p.astype(self.q.dtype), v, o * factor)
        total = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
        return m * self.sigma, total, o

    def _scores(self, keys: slice) -> Any:
        rows, d = self.q.shape
        q, k = (np.pad(x, ((0, 0), (0, -d % STEP))) for x in (self.q, self.k[keys]))
        s = self.mma(q, k.T, np.zeros((rows, len(k)), f4))
        if self.softcap:
            s = tanh(s * (f4(2) * LOG2E * (f4(self.scale) / f4(self.softcap))))
        return np.where(self.sees[:, keys], s, f4(-np.inf))

    def _merged(self) -> tuple[Any, Any, Any]:
        """The same of all chunks, each of which joins those before it."""
        rows, d = len(self.q), self.v.shape[1]
        so_far = np.zeros(rows, f4), np.zeros(rows, f4), np.zeros((rows, d), f4)
        for first in range(0, len(self.k), CHUNK):
            so_far = _merge(so_far, self._chunk(slice(first, min(first + CHUNK, len(self.k)))))
        return so_far

    def _end(self, base: Any, total: Any, o: Any) -> tuple[Any, Any]:
        empty = (total == 0)[:, None]
        base, weight = np.where(empty[:, 0], -LARGEST, base), f4(1)
        base_ln = base * LN2
        if self.sink is not None:
            sink = f4(self.sink)
            log2 = np.clip(sink * LOG2E, -LARGEST, LARGEST)  # NaN stays
            joined = maximum_number(base, log2)
            weight = np.exp2(base - joined)
            total = fma32(total, weight, np.exp2(log2 - joined))
            base_ln = np.where(joined == log2, sink, base_ln)
        factor = (weight * (f4(1) / total))[:, None]
        o = np.where(empty, f4(0), o * factor + f4(0))
        return o.astype(self.q.dtype), fma32(np.log2(total), LN2, base_ln)


def tanh(y: Any) -> Any:
    """Of y / (2 log2(e))."""
    square = y * y
    p = fma32(square, f4(6.420915e-4), f4(-1.38712712e-2))
    p = fma32(square, p, f4(0.34657344))
    large = fma32(f4(-2), f4(1) / (np.exp2(y) + f4(1)), f4(1))
    return np.where(np.abs(y) < f4(0.7213475), y * p, large)


def _merge(before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Of two states, each an offset, a sum and O; without a key on one side the other stands."""
    offset = maximum_number(before[0], after[0])
    w, w_after = np.exp2(before[0] - offset), np.exp2(after[0] - offset)
    none, none_after = before[1] == 0, after[1] == 0
    total = fma32(w_after, after[1], w * before[1])
    o = fma32(w_after[:, None], after[2], w[:, None] * before[2])
    return (
        np.where(none_after, before[0], np.where(none, after[0], offset)),
        np.where(none_after, before[1], np.where(none, after[1], total)),
        np.where(none_after[:, None], before[2], np.where(none[:, None], after[2], o)),
    )


def attention(
    *tensors: Any,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Any = None,
    arch: int = 90,
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of (batch, length, heads, d) tensors q, k and v, as of flashsmith.attention()."""
    q, k, v = tensors
    (batch, seq_q, heads, d), (_, seq_k, heads_k, _) = q.shape, k.shape
    left, right = window
    apart = np.arange(seq_k) - (np.arange(seq_q) + seq_k - seq_q)[:, None]  # key - position
    sees = np.full((seq_q, seq_k), True)
    if causal or right is not None:
        sees &= apart <= (0 if causal else right)
    if left is not None:
        sees &= apart >= -left
    o = np.empty((batch, seq_q, heads, v.shape[-1]), q.dtype)
    lse = np.empty((batch, heads, seq_q), f4)
    for b, head in np.ndindex(batch, heads):
        of_k = head // (heads // heads_k)
        sink = None if sinks is None else sinks[head]
        o[b, :, head], lse[b, head] = Rows(
            *(q[b, :, head], k[b, :, of_k], v[b, :, of_k], sees),
            *(d**-0.5 if scale is None else scale, softcap, sink, arch),
        ).result()
    return o, lse
