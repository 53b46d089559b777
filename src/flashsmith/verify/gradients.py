"""The gradients of attention, computed from their formulas in float64 and in the precision of a
kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.engine import Engine, engine_for
from flashsmith.verify.gradient_tolerance import ExpectedGradients

# Above this fraction of a dtype's largest number, a result may overflow to inf in one summation
# order but not in another.
NEARLY_TOO_LARGE = 0.99
LOG2_E = math.log2(math.e)
# The number of products that a tensor core adds to a sum in one step: 8 on sm_80, 16 on sm_90.
TENSOR_CORE_PRODUCTS = 8
# For sm_90: the number of products in a step, and the lowest bit of each that is kept. The bit is
# relative to the largest power of two among the products and the previous sum.
ALIGNED_PRODUCTS = 16
ALIGNED_BIT = 2.0**-25
# The number of arrays as large as a block's scores that exist at the same time.
_ARRAYS_OF_SCORES = 8


class Rows(NamedTuple):
    """Where one sequence's rows are in the tensors.

    ``batch`` is the sequence's index in dense tensors (batch, seq, heads, d), or None for packed
    tensors (total, heads, d).
    """

    batch: int | None
    q: slice
    k: slice

    def of_queries(self, array: np.ndarray) -> np.ndarray:
        """The rows of this sequence in q, do, o or dq: (rows, heads, d)."""
        return (array if self.batch is None else array[self.batch])[self.q]

    def of_keys(self, array: np.ndarray) -> np.ndarray:
        """The rows of this sequence in k, v, dk or dv."""
        return (array if self.batch is None else array[self.batch])[self.k]

    def of_statistics(self, array: np.ndarray) -> np.ndarray:
        """This sequence's values of lse or dlse: (heads, rows)."""
        return (array if self.batch is None else array[self.batch])[:, self.q]


def compute_gradients(
    inputs: Mapping[str, np.ndarray],
    attention: Attention,
    sequences: Sequence[Rows],
    exact_o: np.ndarray,
    exact_lse: np.ndarray,
    *,
    unrounded: bool = False,
    on_gpu: bool = False,
    aligned: bool = False,
) -> ExpectedGradients:
    """The expected results of a backward kernel for ``inputs``, by the names of the operation.

    P = exp(scores - lse) and D = rowsum(do o) - dlse. dS = P (do v^T - D) holds without a softcap,
    which adds the factor 1 - tanh^2. Then dv = P^T do, dk = scale dS^T q, dq = scale dS k, and
    dsinks = -sum of exp(sink - lse) D over all rows. Heads that share a key head are summed.

    The exact gradients are computed in float64 from ``exact_o`` and ``exact_lse``, which may be
    over more keys than k has. The rounded gradients are computed from the o and lse in ``inputs``,
    which the kernel reads. For these gradients, P and dS are rounded to the dtype, sums and D are
    fp32, and the result is rounded to the dtype unless ``unrounded``. Scores are converted to base
    2 with constants that are rounded to fp32.

    Scores and dP are summed in two ways: as tensor cores do, which truncate the sum to fp32 after
    every 8 products, and in another order with rounding. For each element, the result with the
    larger error counts, because with few rows the error of one order may be small by chance.

    ``aligned`` adds a third way, that of sm_90, which truncates each product before adding it. It
    takes ten operations per product, so ``ExpectedGradients.further`` uses it only if a kernel does
    not pass with the first two.

    A row that sees no key, also because a program's mask hides all keys, or whose lse is -inf
    contributes nothing to dq, dk and dv, even if its do or q is NaN. Elements of do at which o is 0
    do not contribute to D. An lse of -inf is treated as +inf, which makes P 0.
    """
    dtype = inputs["q"].dtype
    engine = engine_for(on_gpu)
    placed = attention.placed(engine.to_device)
    found = ExpectedGradients.zeros(inputs, np.dtype(np.float32) if unrounded else dtype)
    precise = {**inputs, "o": exact_o, "lse": exact_lse}
    with engine.exactly():
        for number, rows in enumerate(sequences):
            if rows.q.stop == rows.q.start:
                continue
            at = rows, number
            exact = _SequenceGradients(engine, placed, at, precise, "float64")
            orders = [
                _SequenceGradients(engine, placed, at, inputs, "float32", product)
                for product in (_cut_product, _plain_product, _aligned_product)[: 2 + aligned]
            ]
            _enter(found, rows, exact, orders)
    if aligned:
        return found
    again = partial(compute_gradients, inputs, attention, sequences, exact_o, exact_lse)
    return replace(
        found, recompute=partial(again, unrounded=unrounded, on_gpu=on_gpu, aligned=True)
    )


def _enter(
    found: ExpectedGradients,
    rows: Rows,
    exact: _SequenceGradients,
    orders: Sequence[_SequenceGradients],
) -> None:
    """Computes the gradients of one sequence, exactly and with each summation order, and stores
    them in the arrays of the whole batch."""
    for one in (exact, *orders):
        one.run()
    for name, part in (("dq", rows.of_queries), ("dk", rows.of_keys), ("dv", rows.of_keys)):
        its_exact = exact.result(name)
        part(found.exact[name])[:] = its_exact
        results = [one.result(name) for one in orders]
        result = reduce(partial(_further_off, its_exact), results)
        part(found.rounded[name])[:] = result.astype(found.rounded[name].dtype)
        part(found.idle[name])[:] = exact.idle(name)
        largest = NEARLY_TOO_LARGE * _largest(found.rounded[name].dtype)
        for one, one_result in zip(orders, results, strict=True):
            part(found.tainted[name])[:] |= one.tainted(name)
            part(found.tainted[name])[:] |= np.abs(one_result) > largest
    if "dsinks" in found.exact:
        of_sinks, size = exact.of_sinks()
        found.exact["dsinks"][:] += of_sinks
        found.sinks_size[:] += size
        found.rounded["dsinks"][:] += orders[0].of_sinks()[0]


def _further_off(exact: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each element, the value that is not finite or, if both are finite, the one that is
    further from ``exact``."""
    further = np.abs(other - exact) > np.abs(one - exact)
    return np.where(further | ~np.isfinite(other), other, one)


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


# --- a b in fp32, a (..., rows, d) and b (..., d, keys) -------------------------------------------
# These products matter: where dP and D cancel, as in a row that sees one key, only their errors
# remain.

_Product = Callable[[Engine, Any, Any], Any]


def _plain_product(engine: Engine, a: Any, b: Any) -> Any:
    """The product with rounded fp32 sums, in the array library's order."""
    return a @ b


def _cut_product(engine: Engine, a: Any, b: Any) -> Any:
    """The product as tensor cores compute it: after every TENSOR_CORE_PRODUCTS products, the sum is
    truncated to fp32."""
    a, b = engine.cast(a, "float64"), engine.cast(b, "float64")
    products = TENSOR_CORE_PRODUCTS
    sums = a[..., :products] @ b[..., :products, :]
    engine.truncate(sums)
    for first in range(products, a.shape[-1], products):
        some = slice(first, first + products)
        sums += a[..., some] @ b[..., some, :]
        engine.truncate(sums)
    return engine.cast(sums, "float32")


def _aligned_product(engine: Engine, a: Any, b: Any) -> Any:
    """The product as tensor cores of sm_90 compute it: 16 products and the previous sum are
    truncated at a common bit and added, and the result is truncated to fp32."""
    xp = engine.xp
    a, b = engine.cast(a, "float64"), engine.cast(b, "float64")
    exact = a @ b
    a_size, b_size = engine.power_of_two(a), engine.power_of_two(b)
    sums = xp.zeros_like(exact)
    for first in range(0, a.shape[-1], ALIGNED_PRODUCTS):
        some = range(first, min(first + ALIGNED_PRODUCTS, a.shape[-1]))
        largest = engine.power_of_two(sums)
        for i in some:
            largest = xp.maximum(largest, a_size[..., i : i + 1] * b_size[..., i : i + 1, :])
        unit = xp.where(largest == 0.0, 1.0, largest) * ALIGNED_BIT
        units = xp.trunc(sums / unit)
        for i in some:
            units += xp.trunc(a[..., i : i + 1] * b[..., i : i + 1, :] / unit)
        sums = units * unit
        engine.truncate(sums)
    return engine.cast(xp.where(xp.isfinite(exact), sums, exact), "float32")


class _SequenceGradients:
    """The gradients of one sequence in one precision, computed in blocks of rows.

    Query heads that share a key head form a dimension: arrays are (heads_k, group, rows, keys or
    d), where group is 1 for k and v.
    """

    def __init__(
        self,
        engine: Engine,
        attention: Attention,
        at: tuple[Rows, int],
        inputs: Mapping[str, np.ndarray],
        precision: str,
        product: _Product = _plain_product,
    ) -> None:
        """``at``: the sequence's rows and its number.

        ``product``: the way in which S and dP are summed.
        """
        rows, self.number = at
        self.engine, self.attention, self.precision = engine, attention, precision
        self.product = product
        self.dtype = inputs["q"].dtype
        k = rows.of_keys(inputs["k"])
        self.seq_q, self.heads_q, d = rows.of_queries(inputs["q"]).shape
        self.seq_k, self.heads_k, _ = k.shape
        self.group = self.heads_q // self.heads_k
        self.q, self.do, self.o = (
            self._by_group(rows.of_queries(inputs[name])) for name in ("q", "do", "o")
        )
        self.k, self.v = (self._by_group(rows.of_keys(inputs[name])) for name in ("k", "v"))
        lse = self._statistic(rows.of_statistics(inputs["lse"]))
        self.lse = engine.xp.where(lse == -math.inf, engine.full_like(lse, math.inf), lse)
        self.dlse = None
        if "dlse" in inputs:
            self.dlse = self._statistic(rows.of_statistics(inputs["dlse"]))
        self.sinks = None
        if "sinks" in inputs:
            self.sinks = self._placed(inputs["sinks"].reshape(self.heads_k, self.group, 1, 1))
        first, end = attention.visible_keys(np.arange(self.seq_q), self.seq_q, self.seq_k)
        self.first, self.end = first, end
        self.seeing = (end > first)[:, None]
        self.some_row_sees = _covered(first, end, self.seq_k)
        # Marks the rows that contribute: (heads_k, group, rows, 1).
        self.attended = engine.to_device(self.seeing) & self._shown_some_key()
        self.alive = self.attended & (self.lse != math.inf)
        self.dq = self._zeros(self.heads_k, self.group, self.seq_q, d)
        self.dk = self._zeros(self.heads_k, self.seq_k, d)
        self.dv = self._zeros(self.heads_k, self.seq_k, self.v.shape[-1])
        self.taints = {
            "dq": np.zeros((self.heads_k, self.group, self.seq_q, 1), bool),
            "dk": np.zeros((self.heads_k, self.seq_k, 1), bool),
            "dv": np.zeros((self.heads_k, self.seq_k, 1), bool),
        }
        self._find_nonfinite()

    # --- arrays ----------------------------------------------------------------------------------

    def _placed(self, array: np.ndarray) -> Any:
        return self.engine.cast(self.engine.to_device(np.ascontiguousarray(array)), self.precision)

    def _by_group(self, array: np.ndarray) -> Any:
        """Converts (rows, heads, d) to (heads_k, group, rows, d)."""
        rows, heads, d = array.shape
        group = heads // self.heads_k
        return self._placed(array.reshape(rows, self.heads_k, group, d).transpose(1, 2, 0, 3))

    def _statistic(self, array: np.ndarray) -> Any:
        """Converts (heads, rows) to (heads_k, group, rows, 1)."""
        return self._placed(array.reshape(self.heads_k, self.group, self.seq_q, 1))

    def _zeros(self, *shape: int) -> Any:
        return self.engine.to_device(np.zeros(shape, self.precision))

    def _shown_some_key(self) -> Any:
        """For each row, whether the program's mask, if there is one, leaves at least one key
        visible: (heads_k, group, rows, 1)."""
        shown = np.ones((self.heads_k, self.group, self.seq_q, 1), bool)
        for rows in self._blocks():
            indices = self._indices(rows, slice(0, self.seq_k))
            seen = self.attention.seen_by_program(indices, self.engine.xp)
            if seen is None:
                break
            seen = self.engine.to_host(seen)
            keys = np.arange(self.seq_k)
            within = (keys >= self.first[rows, None]) & (keys < self.end[rows, None])
            shown[:, :, rows] = (seen & within).any(-1, keepdims=True)
        return self.engine.to_device(shown)

    def _find_nonfinite(self) -> None:
        """Marks the gradients that may be NaN or inf because the sequence's inputs contain NaN or
        inf: dq because kernels also load masked keys, dk and dv because any row may contribute."""
        xp = self.engine.xp
        keys = ~(_all_finite(xp, self.k) & _all_finite(xp, self.v))
        rows = ~(_all_finite(xp, self.q) & _all_finite(xp, self.do) & _all_finite(xp, self.o))
        lse = ~xp.isfinite(self.lse)
        if self.dlse is not None:
            lse = lse | ~xp.isfinite(self.dlse)
        rows = (rows | lse) & self.alive
        # Rows that see keys but have an lse of -inf. A kernel multiplies their values by 0, which
        # gives NaN if a value is not finite.
        lost = self.attended & ~self.alive
        lost_bad = lost & ~(_all_finite(xp, self.q) & _all_finite(xp, self.do))
        self.taints["dq"] |= self.engine.to_host(lost_bad)
        rows = rows | lost_bad
        bad_keys: Any = self.engine.to_host(keys).any((1, 2))
        bad_rows: Any = self.engine.to_host(rows).any((1, 2))
        self.taints["dq"] |= bad_keys[:, None, None]
        lost_some: Any = self.engine.to_host(lost)
        bad_rows = bad_rows | (bad_keys & lost_some.any((1, 2)))
        for name in ("dk", "dv"):
            self.taints[name] |= bad_rows[:, None]
        self.all_finite = not (bad_keys.any() or bad_rows.any())

    # --- gradients -------------------------------------------------------------------------------

    def run(self) -> None:
        """Computes dq, dk and dv."""
        for rows in self._blocks():
            live = self.seeing[rows, 0]
            if live.any():
                first, end = self.first[rows][live].min(), self.end[rows][live].max()
                self._add_block(rows, slice(int(first), int(end)))

    def _blocks(self) -> Iterator[slice]:
        bytes_of_row = 8 * _ARRAYS_OF_SCORES * self.heads_q * max(1, self.seq_k)
        rows = max(1, self.engine.score_bytes // bytes_of_row)
        for start in range(0, self.seq_q, rows):
            yield slice(start, min(start + rows, self.seq_q))

    def _add_block(self, rows: slice, keys: slice) -> None:
        xp, scale = self.engine.xp, self.attention.scale
        alive, indices = self.alive[:, :, rows], self._indices(rows, keys)
        seen = self._seen(rows, keys, indices)
        q, do = (xp.where(alive, x[:, :, rows], 0.0) for x in (self.q, self.do))
        k, v = self.k[:, :, keys], self.v[:, :, keys]

        scores, factor, slope = self._scores(q, k, indices)
        exponents = self._exponents(scores, factor, self.lse[:, :, rows])
        weights = xp.where(seen, xp.exp2(exponents), 0.0)
        d_scores = weights * (self._product(do, v) - self._row_sums(rows, do))
        if slope is not None:
            d_scores = self.engine.cast(d_scores * slope, self.precision)
        d_scores = xp.where(seen, d_scores, 0.0)
        if self.precision == "float32":
            too_large: Any = self.engine.to_host(
                xp.abs(d_scores) > NEARLY_TOO_LARGE * _largest(self.dtype)
            )
            self.taints["dq"][:, :, rows] |= too_large.any(-1, keepdims=True)
            self.taints["dk"][:, keys] |= too_large.any((1, 2))[..., None]
            weights, d_scores = self._rounded(weights), self._rounded(d_scores)

        certain = (
            None if self.all_finite else self._certainly_nonfinite(weights, d_scores, seen, do)
        )
        if certain is not None and self.precision == "float64":
            # The matrix products include masked pairs, which would contribute 0 x NaN = NaN.
            weights, d_scores, q, do, k = (
                xp.where(xp.isfinite(x), x, 0.0) for x in (weights, d_scores, q, do, k)
            )
        dq = (d_scores @ k) * scale
        dk = (xp.swapaxes(d_scores, -1, -2) @ q).sum(1) * scale
        dv = (xp.swapaxes(weights, -1, -2) @ do).sum(1)
        if certain is not None:
            dq, dk, dv = (
                x + xp.where(lost, math.nan, 0.0)
                for x, lost in zip((dq, dk, dv), certain, strict=True)
            )
        self.dq[:, :, rows] = dq
        self.dk[:, keys] += dk
        self.dv[:, keys] += dv

    def _seen(self, rows: slice, keys: slice, indices: Mapping[str, Any]) -> Any:
        """Marks the pairs of a row and a key that contribute; the array broadcasts to (heads_k,
        group, rows, keys)."""
        seen = self.alive[:, :, rows]
        if self.attention.masked:
            key = np.arange(keys.start, keys.stop)
            visible = (key >= self.first[rows, None]) & (key < self.end[rows, None])
            seen = seen & self.engine.to_device(visible)
        by_program = self.attention.seen_by_program(indices, self.engine.xp)
        return seen if by_program is None else seen & by_program

    def _scores(self, q: Any, k: Any, indices: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Returns the scores after softcap and program, the factor that turns them into logits,
        and the derivative of the logits with respect to q k times the scale (None if it is 1)."""
        xp, score = self.engine.xp, self.attention.score
        scores, factor, slope = self._product(q, k), self.attention.scale, None
        if not score.is_plain:
            numbers = {"score": scores * factor, **self.attention.numbers}
            scores, factor, slope = (
                it.evaluate(numbers, xp=xp, exact=False)
                for it in (score.body, score.factor, score.slope)
            )
        if self.attention.program is None:
            return scores, factor, slope
        natural = scores * factor
        its_slope = self.attention.slope_of_program(natural, indices, xp)
        if its_slope is not None:
            slope = its_slope if slope is None else slope * its_slope
        scores = self.attention.changed_by_program(natural, indices, xp)
        return self.engine.cast(scores, self.precision), 1.0, slope

    def _indices(self, rows: slice, keys: slice) -> dict[str, Any]:
        """The arguments of a program's functions other than the score."""
        if self.attention.program is None:
            return {}
        at = {
            "b": np.array(self.number),
            "h": np.arange(self.heads_q).reshape(self.heads_k, -1, 1, 1),
            "q": np.arange(rows.start, rows.stop)[:, None],
            "k": np.arange(keys.start, keys.stop),
            "seq_q": np.array(self.seq_q),
            "seq_k": np.array(self.seq_k),
        }
        return {name: self.engine.to_device(array) for name, array in at.items()}

    def _product(self, a: Any, b: Any) -> Any:
        """a b^T."""
        return self.product(self.engine, a, self.engine.xp.swapaxes(b, -1, -2))

    def _exponents(self, scores: Any, factor: float, lse: Any) -> Any:
        """The exponents of P, in base 2.

        Kernels compute score x factor log2(e) - log2(e) lse in one fma; both constants are rounded
        to fp32. For scores in the thousands, this rounding is most of the error of P.
        """
        if self.precision == "float64":
            return (scores * factor - lse) * LOG2_E
        cast, log2_e = self.engine.cast, np.float32(LOG2_E)
        lse_log2 = cast(lse * float(log2_e), "float64")
        exponents = cast(scores, "float64") * float(np.float32(factor) * log2_e) - lse_log2
        return cast(exponents, self.precision)

    def _row_sums(self, rows: slice, do: Any) -> Any:
        """D = rowsum(do o) - dlse; elements where o is 0 are left out of the sum."""
        xp, o = self.engine.xp, self.o[:, :, rows]
        sums = xp.sum(xp.where(o == 0.0, 0.0, do * o), axis=-1, keepdims=True)
        return sums if self.dlse is None else sums - self.dlse[:, :, rows]

    def _rounded(self, array: Any) -> Any:
        placed = self.dtype if self.engine.xp is np else str(self.dtype)
        return self.engine.cast(self.engine.cast(array, placed), self.precision)

    def _certainly_nonfinite(
        self, weights: Any, d_scores: Any, seen: Any, do: Any
    ) -> tuple[Any, Any, Any]:
        """Marks the rows of dq, and of dk and dv, for which this block rules out finite values in
        any kernel."""
        xp, cast = self.engine.xp, self.engine.cast
        bad = ~xp.isfinite(d_scores)
        of_dq = xp.any(bad, axis=-1)[..., None]
        of_dk = xp.any(xp.any(bad, axis=-2), axis=1)[..., None]
        pairs = cast(seen & xp.isfinite(weights), "float32")
        bad_do = cast(~xp.isfinite(do), "float32")
        bad_do = (xp.swapaxes(pairs, -1, -2) @ bad_do).sum(1) > 0
        of_dv = xp.any(xp.any(~xp.isfinite(weights), axis=-2), axis=1)[..., None]
        return of_dq, of_dk, of_dv | bad_do

    def of_sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """This sequence's contribution to dsinks, and the sums of exp(sink - lse) sum |do o| that
        bound the error."""
        xp = self.engine.xp
        share = xp.where(self.sinks == -math.inf, 0.0, xp.exp(self.sinks - self.lse))
        products = xp.where(self.o == 0.0, 0.0, self.do * self.o)
        size = (share * xp.sum(xp.abs(products), axis=-1, keepdims=True)).sum(2)
        sums = xp.sum(products, axis=-1, keepdims=True)
        if self.dlse is not None:
            sums = sums - self.dlse
        host = self.engine.to_host
        return -host((share * sums).sum(2)).reshape(-1), host(size).reshape(-1)

    # --- results ---------------------------------------------------------------------------------

    def result(self, name: str) -> np.ndarray:
        """One gradient as a host array (rows, heads, d)."""
        return self._rows_first(self.engine.to_host(getattr(self, name)))

    def tainted(self, name: str) -> np.ndarray:
        """Marks the elements that a kernel may return as NaN or inf although they are finite here:
        (rows, heads, 1)."""
        return self._rows_first(self.taints[name])

    def idle(self, name: str) -> np.ndarray:
        """Marks the rows that see no key (for dq) or the keys that no row sees (for dk and dv):
        (rows, 1, 1)."""
        return ~(self.seeing[:, 0] if name == "dq" else self.some_row_sees)[:, None, None]

    def _rows_first(self, array: np.ndarray) -> np.ndarray:
        if array.ndim == 4:
            array = array.reshape(self.heads_q, *array.shape[2:])
        return np.moveaxis(array, 0, 1)


def _all_finite(xp: Any, array: Any) -> Any:
    return xp.all(xp.isfinite(array), axis=-1)[..., None]


def _covered(first: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    """For each of ``count`` keys, whether it is in at least one range."""
    ranges = np.zeros(count + 1, np.int64)
    some = end > first
    np.add.at(ranges, first[some], 1)
    np.add.at(ranges, end[some], -1)
    return np.cumsum(ranges[:-1]) > 0
