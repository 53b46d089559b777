"""The references of attention: in float64, and in the precision of a kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashsmith.verify.attention_semantics import NO_WINDOW, Attention, Lens, Ranges, Window
from flashsmith.verify.engine import Engine, engine_for
from flashsmith.verify.proof_inputs import Inputs, InputSpec, draw_sinks, make_inputs


@dataclass(frozen=True)
class References:
    """The two references of one problem.

    ``o`` is in float64, never rounded, with the rows of q and the columns of v. ``lse`` is the
    natural log-sum-exp and ``row_max`` the largest scaled and capped score, both in float64:
    (batch, heads, seq_q) or, if packed, (heads, total_q). ``same_precision`` is o as computed in
    16-bit arithmetic, in that dtype.

    ``tainted`` marks the finite elements of o that a kernel may return as NaN or inf, because it
    may load NaN or inf in v for a masked key. It is None if there are no such elements.
    """

    o: np.ndarray
    lse: np.ndarray
    same_precision: np.ndarray
    row_max: np.ndarray
    tainted: np.ndarray | None = None


def compute_references(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    lens_q: Lens | None = None,
    lens_k: Lens | None = None,
    ranges: Ranges | None = None,
    on_gpu: bool = False,
) -> References:
    """Computes both references for 16-bit q, k, v of shape (batch, seq, heads, d), or packed
    (total, heads, d) with lens_q and lens_k. k and v may have fewer heads, and v its own d.

    The same-precision reference computes as a textbook kernel does: scores and softmax in fp32 from
    the 16-bit inputs, weights rounded to the dtype before the product with v, sums in fp32, and o
    rounded to the dtype. With ``ranges`` (partial attention), o is not rounded. For a row that sees
    no key, or has only scores of -inf, o is 0, and the LSE is -inf or the sink of the head. If a
    score is NaN or +inf, o and the LSE are NaN. The row maximum is then +inf if a score is +inf,
    and NaN otherwise. ``on_gpu``: whether PyTorch computes on the GPU. The given and the returned
    arrays are on the host.
    """
    attention = Attention(scale, causal, window, softcap, lens_q, lens_k, ranges)
    return references_of(attention, q, k, v, sinks, on_gpu=on_gpu)


def references_of(
    attention: Attention,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sinks: np.ndarray | None = None,
    *,
    on_gpu: bool = False,
) -> References:
    """compute_references() for what ``attention`` describes."""
    rows, heads = q.shape[:-2], q.shape[-2]
    statistics = (*rows[:-1], heads, rows[-1])
    shape = (*rows, heads, v.shape[-1])
    tainted = None
    if attention.masked and not np.isfinite(v.astype(np.float32)).all():
        tainted = np.zeros(shape, bool)
    same = np.empty(shape, q.dtype if attention.ranges is None else np.float32)
    found = References(np.empty(shape), np.empty(statistics), same, np.empty(statistics), tainted)
    engine = engine_for(on_gpu)
    placed = tuple(map(engine.to_device, (q, k, v)))
    attention = attention.placed(engine.to_device)
    logits = None if sinks is None else engine.to_device(np.asarray(sinks, np.float64))
    with engine.exactly():
        for number, at in enumerate(attention.sequences(q.shape[0])):
            parts = placed[0][at.q], placed[1][at.k], placed[2][at.k]
            blocks = _Sequence(engine, attention, *parts, number)
            for block, o, same, lse, row_max, spoilt in blocks.run(logits):
                rows_at = _rows(at.q, block)
                found.o[rows_at], found.same_precision[rows_at] = o, same
                if tainted is not None and spoilt is not None:
                    tainted[rows_at] = spoilt
                found.lse[_statistics(rows_at)], found.row_max[_statistics(rows_at)] = lse, row_max
    return found


def joined(references: Iterable[References]) -> References:
    """Concatenates the references of (1, rows, heads, d) outputs and drops the batch dimension."""
    parts = list(references)
    return References(
        **{
            name: np.concatenate([getattr(part, name)[0] for part in parts], axis=axis)
            for name, axis in (("o", 0), ("same_precision", 0), ("lse", 1), ("row_max", 1))
        }
    )


def _rows(at: tuple[int | slice, ...], block: slice) -> tuple[int | slice, ...]:
    """The index that selects the rows ``block`` of the sequence at ``at`` from o."""
    (first,) = at
    if isinstance(first, int):
        return (first, block)
    return (slice(first.start + block.start, first.start + block.stop),)


def _statistics(rows: tuple[int | slice, ...]) -> tuple[Any, ...]:
    """The index that selects ``rows`` from lse and row_max, in which heads come before rows."""
    *batch, block = rows
    return (*batch, slice(None), block)


class _Sequence:
    """The references of one sequence, computed in blocks of rows.

    q, k, v are (seq, heads, d). Query heads that share a key head have their own dimension: the
    arrays below are (heads_k, group, rows, keys or d).
    """

    def __init__(
        self, engine: Engine, attention: Attention, q: Any, k: Any, v: Any, number: int = 0
    ) -> None:
        self.engine, self.attention, self.number = engine, attention, number
        self.seq_q, heads_q, d = q.shape
        self.seq_k, heads_k, _ = k.shape
        self.dtype, self.heads_q = q.dtype, heads_q
        self.q = engine.xp.moveaxis(q.reshape(self.seq_q, heads_k, heads_q // heads_k, d), 0, 2)
        self.k, self.v = (engine.xp.moveaxis(x, 0, 1)[:, None] for x in (k, v))
        # NaN and inf need special care in products with 0; most problems contain no NaN or inf.
        self.all_finite = bool(engine.xp.isfinite(engine.cast(v, "float32")).all())

    def run(self, sinks: Any) -> Iterator[tuple[slice, Any, Any, Any, Any, Any]]:
        """Yields (rows, o, same_precision, lse, row_max, tainted or None) as host arrays; o,
        same_precision and tainted are (rows, heads, d)."""
        for block in self._blocks():
            first, end = self.attention.visible_keys(
                np.arange(block.start, block.stop), self.seq_q, self.seq_k
            )
            # The products of a block leave out keys that none of its rows sees.
            keys = slice(int(first.min()), int(end.max()))
            seen = None
            if self.attention.masked:
                key = np.arange(keys.start, keys.stop)
                seen = self.engine.to_device((key >= first[:, None]) & (key < end[:, None]))
                at, xp = self.indices(block, keys), self.engine.xp
                by_program = self.attention.seen_by_program(at, xp)
                seen = seen if by_program is None else seen & by_program
            part = _Block(self, block, keys, seen, sinks)
            weights, lse, row_max = part.softmax("float64")
            o = part.heads_last(part.weighted(weights, row_max, "float64"))
            tainted = None
            if seen is not None and not self.all_finite:
                tainted = part.heads_last(part.tainted(row_max))
            weights, _, _ = part.softmax("float32")
            rounded = self.engine.cast(self.engine.cast(weights, self.dtype), "float32")
            same = part.weighted(rounded, row_max, "float32")
            if self.attention.ranges is None:
                same = self.engine.cast(same, self.dtype)
            lse, row_max = part.heads_first(lse), part.heads_first(row_max)
            yield block, o, part.heads_last(same), lse, row_max, tainted

    def indices(self, rows: slice, keys: slice) -> dict[str, Any]:
        """The arguments of a program's functions besides the score, as arrays that broadcast with
        scores."""
        at = {
            "b": np.array(self.number),
            "h": np.arange(self.heads_q).reshape(self.k.shape[0], -1, 1, 1),
            "q": np.arange(rows.start, rows.stop)[:, None],
            "k": np.arange(keys.start, keys.stop),
            "seq_q": np.array(self.seq_q),
            "seq_k": np.array(self.seq_k),
        }
        return {name: self.engine.to_device(array) for name, array in at.items()}

    def _blocks(self) -> Iterator[slice]:
        rows = max(1, self.engine.score_bytes // (8 * self.heads_q * max(1, self.seq_k)))
        for start in range(0, self.seq_q, rows):
            yield slice(start, min(start + rows, self.seq_q))


@dataclass(frozen=True)
class _Block:
    """Rows of a sequence, and the keys that they may see.

    ``seen`` is None if every row sees all these keys.
    """

    sequence: _Sequence
    rows: slice
    keys: slice
    seen: Any
    sinks: Any

    def weighted(self, weights: Any, row_max: Any, precision: str) -> Any:
        """The weighted sums of v for each row, over the keys that it sees; 0 where row_max is
        -inf."""
        engine = self.sequence.engine
        xp, values = engine.xp, engine.cast(self.sequence.v[:, :, self.keys], precision)
        if self.sequence.all_finite:
            return weights @ values
        if self.seen is None:
            o = weights @ values
        else:
            # A product also includes masked keys, for which 0 x NaN is NaN; so values that are not
            # finite are handled separately.
            def some(rows: Any, keys: Any) -> Any:
                rows = engine.cast(rows & self.seen, precision)
                return rows @ engine.cast(keys, precision) > 0

            seen = weights == weights  # If a weight is NaN, o is NaN in any case
            o = weights @ xp.where(xp.isfinite(values), values, xp.zeros_like(values))
            for sign in (math.inf, -math.inf):
                o = xp.where(some(seen, values == sign), o + sign, o)
            lost = some(weights == 0, ~xp.isfinite(values))  # 0 x inf is NaN
            o = xp.where(lost | some(seen, xp.isnan(values)), o + math.nan, o)
        return xp.where(row_max == -math.inf, xp.zeros_like(o), o)

    def tainted(self, row_max: Any) -> Any:
        """The elements of o that a masked key of the sequence may affect: (heads_k, group, rows,
        d)."""
        engine = self.sequence.engine
        bad = engine.cast(self.sequence.v, "float32")
        bad = engine.cast(~engine.xp.isfinite(bad), "float32")
        seen = engine.cast(self.seen, "float32") @ bad[:, :, self.keys]
        unseen = bad.sum(-2)[..., None, :] - seen > 0
        return unseen & (row_max != -math.inf)

    def softmax(self, precision: str) -> tuple[Any, Any, Any]:
        """Weights, LSE and row maximum, computed in ``precision``."""
        engine, attention = self.sequence.engine, self.sequence.attention
        xp = engine.xp
        q = engine.cast(self.sequence.q[:, :, self.rows], precision)
        k = engine.cast(self.sequence.k[:, :, self.keys], precision)
        scores = q @ xp.swapaxes(k, -1, -2)
        scores *= attention.scale
        scores = attention.score.apply(scores, attention.numbers, xp)
        if attention.program is not None:
            at = self.sequence.indices(self.rows, self.keys)
            scores = engine.cast(attention.changed_by_program(scores, at, xp), precision)
        if self.seen is not None:
            scores = xp.where(self.seen, scores, -math.inf)
        if self.keys.start == self.keys.stop:
            row_max = engine.full_like(q[..., :1], -math.inf)
        else:
            row_max = xp.amax(scores, axis=-1, keepdims=True)  # This is NaN if a score is NaN
            infinite = xp.any(scores == math.inf, axis=-1, keepdims=True)
            row_max = xp.where(infinite, engine.full_like(row_max, math.inf), row_max)
        sinks = None
        if self.sinks is not None:
            sinks = engine.cast(self.sinks, precision).reshape(*q.shape[:2], 1, 1)
        weights, lse = _normalised(engine, scores, row_max, sinks)
        return weights, lse, row_max

    def heads_last(self, x: Any) -> np.ndarray:
        """Converts (heads_k, group, rows, d) to (rows, heads_q, d), on the host."""
        rows, d = x.shape[2:]
        moved = self.sequence.engine.xp.moveaxis(x, 2, 0)
        return self.sequence.engine.to_host(moved.reshape(rows, self.sequence.heads_q, d))

    def heads_first(self, x: Any) -> np.ndarray:
        """Converts (heads_k, group, rows, 1) to (heads_q, rows), on the host."""
        return self.sequence.engine.to_host(x.reshape(self.sequence.heads_q, x.shape[2]))


def _normalised(engine: Engine, scores: Any, row_max: Any, sinks: Any) -> tuple[Any, Any]:
    """exp(scores) divided by the row's sum, and the logarithm of this sum, which includes the
    sink."""
    xp = engine.xp
    top = row_max if sinks is None else xp.maximum(row_max, sinks)
    # A row that sees no key has no maximum. If a score is +inf, its weight is NaN, because inf -
    # inf is NaN.
    known = xp.isfinite(row_max) | (row_max == math.inf)
    base = xp.where(xp.isfinite(top), top, xp.where(known, row_max, xp.zeros_like(row_max)))
    weights = xp.exp(scores - base)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - base)
    lse = base + xp.log(total)
    weights /= xp.where(total == 0, xp.ones_like(total), total)
    return weights, lse


@lru_cache(maxsize=4)
def inputs_and_references(
    spec: InputSpec, attention: Attention | None = None, on_gpu: bool = False
) -> tuple[Inputs, References]:
    """The inputs that ``spec`` describes, and the references of ``attention`` (None: plain
    attention) for them. The arrays are cached and read-only, because the configs of a set share
    them."""
    inputs = _tensors(replace(spec, sinks=False))
    if spec.sinks:
        inputs = replace(inputs, sinks=draw_sinks(spec))
    attention = attention or Attention(spec.scale, lens_q=spec.lens_q, lens_k=spec.lens_k)
    references = references_of(attention, inputs.q, inputs.k, inputs.v, inputs.sinks, on_gpu=on_gpu)
    for made in (inputs, references):
        for field in fields(made):
            array = getattr(made, field.name)
            if array is not None:
                array.flags.writeable = False
    return inputs, references


# Cached separately from the references, so that all masks and all threads can use one set of
# tensors.
@lru_cache(maxsize=16)
def _tensors(spec: InputSpec) -> Inputs:
    return make_inputs(spec)
