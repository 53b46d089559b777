"""DecodeReference: the inputs for proofs of the operation `decode`, and the rule for its
outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem
from flashsmith.operations.decode import check_split
from flashsmith.printable import quoted
from flashsmith.runtime import OperationResult, run_operation
from flashsmith.verify.attention_semantics import Lens, row_slices
from flashsmith.verify.decode_inputs import (
    apart,
    draw_decode_inputs,
    draw_lengths,
    laid_out,
    queries_of,
    read_keys,
    write_keys,
)
from flashsmith.verify.forward_reference import check_lens, repeated_over_heads
from flashsmith.verify.operation_reference import OperationReference, ProofCase, ToDevice
from flashsmith.verify.problem_options import attention_of, options_by_limits, without_defaults
from flashsmith.verify.reference import References, references_of
from flashsmith.verify.stored_rows import TYPICAL_SCALES, scales_of, stored
from flashsmith.verify.tolerance import Comparison, Element, ExpectedOutputs, compare

ROTARY = ("", "halves", "interleaved")
LAYOUTS = ("dense", "interleaved", "heads first")
# The maximum number of K's elements that are held in float64 at once (128 MiB); a single head may
# exceed it.
MOST_EXPANDED = 1 << 24
# A bound on dropped keys, because a table with the angles of every position is drawn.
_MOST_DROPPED = 1 << 20


@dataclass(frozen=True)
class ExpectedDecode:
    """The expected o and LSE, with the rows of all sequences concatenated, and the expected caches
    after appending."""

    references: References
    lens_q: Lens
    k_cache: np.ndarray
    v_cache: np.ndarray


class DecodeReference(OperationReference):
    """Attention over a cache. It has the options of the operation, and also:

    - ``lens_q``: the number of queries of each packed sequence.
    - ``lens_k``: the number of keys of each sequence, including the appended ones; the longest
      sequence has the problem's seq_k.
    - ``append``: whether k and v are appended first.
    - ``rotary``: how k and q are rotated: 'halves', 'interleaved', or '' (not rotated).
    - ``rotary_half``: the number of pairs that are rotated; None means d / 2.
    - ``dropped``: the maximum number of keys that a sequence's cache has dropped before its first
      key; each sequence's number is drawn. With 0, the call has no kv_offset.
    - ``sinks``: whether the call has sinks.
    - ``capacity``: the number of keys (or pages) beyond those that the longest sequence needs.
    - ``layout``: how the caches are stored on the host: 'dense', 'interleaved' (k and v in one
      tensor) or 'heads first' (k and v have different strides, and so have the appended rows).

    Slots beyond a length, pages that are not assigned, and the ends of last pages are NaN.
    Sequences with equal beginnings share pages, and pages are in random order.
    """

    kinds = (
        "random", "large_scores", "constant", "one_hot", "far_scores", "nonfinite", "lost_keys",
        "huge",
    )  # fmt: skip
    # The tensors that calls append to.
    caches: tuple[str, ...] = ("k_cache", "v_cache")

    def options(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        scale: float | None = None,
        lens_q: Lens | None = None,
        lens_k: Lens | None = None,
        append: bool = False,
        rotary: str = "",
        rotary_half: int | None = None,
        rotary_dtype: str | None = None,
        dropped: int = 0,
        capacity: int = 0,
        layout: str = LAYOUTS[0],
        split: str | None = None,
        k_scale_value: float | None = None,
        v_scale_value: float | None = None,
        **asked: Any,
    ) -> dict[str, Any]:
        """Makes the options from ``asked``, which has the options of options_by_limits().

        Lengths that are not given are drawn; among them are 0, 1, and lengths near the boundaries
        of pages and parts.

        Raises ArgumentError if a call could not have these options.
        """
        _check_words(rotary, layout, dropped, append=append)
        found = options_by_limits(problem, seed=seed, **asked)
        if problem.semantics.packed:
            lens_q = lens_q or found["lens_q"]
        lens_k = _checked_lens_k(problem, lens_q, lens_k, seed, append=append)
        options = {
            "scale": scale,
            **{name: found[name] for name in ("softcap", "left", "right", "sinks")},
            "lens_q": lens_q,
            "lens_k": lens_k,
            "append": append,
            "rotary": rotary,
            "rotary_half": rotary_half,
            "rotary_dtype": rotary_dtype,
            "dropped": dropped,
            "capacity": capacity,
            "layout": layout if layout != LAYOUTS[0] else None,
            "split": None if split is None else check_split(split),
        }
        if problem.cache:
            given = {"k_scale_value": k_scale_value, "v_scale_value": v_scale_value}
            options |= TYPICAL_SCALES | {name: it for name, it in given.items() if it is not None}
        return without_defaults(options)

    def call_options(self, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
        known = super().call_options(problem, options)
        return known | {"rotary_interleaved": options.get("rotary") == "interleaved"}

    def meaning(self, problem: Problem, options: Mapping[str, Any]) -> str:
        lens_q, lens_k = queries_of(problem, options), options.get("lens_k", ())
        words = [f"lens {'+'.join(map(str, lens_q))}:{'+'.join(map(str, lens_k))}"]
        words += [f"scale {options['scale']:g}"] if "scale" in options else []
        if "left" in options or "right" in options:
            words += [f"window ({options.get('left')}, {options.get('right')})"]
        words += [f"{name} {it:g}" for name, it in attention_of(problem, options).numbers.items()]
        words += [name for name in ("sinks", "append") if options.get(name)]
        if options.get("rotary"):
            words += [f"rotary {options['rotary']} {options.get('rotary_dtype', '')}".strip()]
        words += [f"dropped up to {options['dropped']}"] if options.get("dropped") else []
        words += [f"{name} {options[name]:g}" for name in TYPICAL_SCALES if name in options]
        words += [f"capacity +{options['capacity']}"] if options.get("capacity") else []
        words += [str(options[name]) for name in ("layout", "split") if options.get(name)]
        return ", ".join(words)

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        """Inputs of a kind with the typical options of the problem, for measurements.

        Every sequence has all seq_k keys, because FLOP and bytes are counted for all of them.
        """
        lens_k = (problem.seq_k,) * problem.batch
        options = self.options(problem, seed=seed, lens_k=lens_k)
        return self.draw_inputs(problem, kind, seed, options)

    def draw_inputs(
        self, problem: Problem, kind: str, seed: int, options: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """The inputs of the given kind; ``options`` must be complete, as options() returns them."""
        return draw_decode_inputs(problem, kind, seed, options)

    def expected_rows(
        self,
        problem: Problem,
        inputs: Mapping[str, np.ndarray],
        options: Mapping[str, Any],
        on_gpu: bool = False,
    ) -> ExpectedDecode:
        """The expected rows of all sequences, and the caches."""
        return expected_of(problem, inputs, options, on_gpu)

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        """The expected o, LSE and caches in the shapes of the operation's tensors."""
        found = self.expected_rows(problem, inputs, options)
        o, lse = found.references.o, found.references.lse
        same = found.references.same_precision
        if not problem.semantics.packed:
            shape = (problem.batch, problem.seq_q, problem.heads_q, problem.d_v)
            o, same = o.reshape(shape), same.reshape(shape)
            lse = np.moveaxis(lse.reshape(problem.heads_q, *shape[:2]), 0, 1)
        exact = {"o": o, "lse": lse}
        rounded = {"o": same, "lse": lse}
        if options.get("append"):
            for name in self.caches:
                rounded[name] = getattr(found, name)
                exact[name] = rounded[name].astype(np.float64)
        return ExpectedOutputs(exact, rounded)

    def case(
        self,
        cfg: KernelConfig,
        problem: Problem,
        *,
        kind: str,
        seed: int,
        options: Mapping[str, Any],
        on_gpu: bool = False,
    ) -> ProofCase:
        """The case for a proof of ``cfg``'s kernel: the problem for which the kernel is compiled,
        with groups of heads repeated until there are enough outputs."""
        options = self.options(problem, seed=seed, **options)
        problem = self.with_more_heads(problem, queries_of(problem, options))
        frozen = tuple(sorted(options.items()))
        inputs, expected = _drawn_case(self, problem, kind, seed, frozen, on_gpu)
        problem = replace(problem, semantics=problem.required_semantics(cfg))
        return ProofCase(problem, inputs, options, expected)

    def with_more_heads(self, problem: Problem, lens_q: Lens) -> Problem:
        """The problem with enough heads for MIN_OUTPUTS outputs."""
        return repeated_over_heads(problem, lens_q)

    def run(
        self, cfg: KernelConfig, case: ProofCase, to_device: ToDevice, **how: Any
    ) -> OperationResult:
        """Runs the kernel on copies of the caches, because it may append to them."""
        inputs = self.writable_inputs(case)
        return run_operation(
            cfg,
            case.problem,
            {name: to_device(array) for name, array in inputs.items()},
            options=self.call_options(case.problem, case.options),
            wanted=["lse"],
            poisoned=True,
            **how,
        )

    def writable_inputs(self, case: ProofCase) -> dict[str, np.ndarray]:
        """The case's inputs, in which the caches are copies in the memory layout that the case
        requests."""
        inputs = dict(case.inputs)
        layout = case.options.get("layout", LAYOUTS[0])
        inputs["k_cache"], inputs["v_cache"] = laid_out(
            inputs["k_cache"], inputs["v_cache"], layout
        )
        if layout == "heads first" and "k" in inputs:
            inputs["k"], inputs["v"] = apart(inputs["k"], 2), apart(inputs["v"], 1)
        return inputs

    def compare(
        self, kernel: KernelConfig | DType, case: ProofCase, outputs: Mapping[str, np.ndarray]
    ) -> Comparison:
        """o and the LSE must fulfil the rule of the forward pass; caches must have equal bits.

        If another reference made the case, OperationReference.compare() judges it.
        """
        if not isinstance(case.expected, ExpectedDecode):
            return super().compare(kernel, case, outputs)
        dtype = kernel if isinstance(kernel, DType) else kernel.dtype
        expected = case.expected
        references = expected.references
        o = outputs["o"].reshape(references.o.shape)
        lse = outputs.get("lse")
        if lse is not None and lse.ndim == 3:
            lse = np.moveaxis(lse, 1, 0).reshape(references.lse.shape)
        found = compare(dtype, o, lse, references, lens_q=expected.lens_q)
        reasons, first = list(found.reasons), None
        if reasons:
            first = _first_wrong(o, references.o, found.bound)
        for name in self.caches:
            if not case.options.get("append") or name not in outputs:
                continue
            got, wanted = outputs[name], getattr(expected, name)
            wrong = _differing_bits(got, wanted)
            if wrong.any():
                reasons.append(f"{name}: {int(wrong.sum())} elements differ")
                at = _first(wrong)
                first = first or Element(name, at, float(got[at]), float(wanted[at]))
        return replace(found, reasons=tuple(reasons), first_mismatch=first)


def _differing_bits(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Marks the elements whose bits differ; all NaN count as equal."""
    whole = np.uint16 if got.itemsize == 2 else np.uint8
    bits = (np.ascontiguousarray(array).view(whole) for array in (got, wanted))
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(wanted.astype(np.float32))
    return (next(bits) != next(bits)) & ~both_nan


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(np.argmax(wrong)), wrong.shape)))


def _first_wrong(o: np.ndarray, exact: np.ndarray, bound: float) -> Element:
    """The first element of o that breaks the rule, or the element with the largest error if none
    breaks it; o has the rows of all sequences."""
    with np.errstate(invalid="ignore"):
        error = np.abs(o.astype(np.float64) - exact)
    wrong = (error > bound) | (np.isfinite(error) != np.isfinite(exact))
    at = _first(wrong if wrong.any() else np.nan_to_num(error))
    return Element("o", at, float(o[at]), float(exact[at]))


# --- options -------------------------------------------------------------------------------------


def _check_words(rotary: str, layout: str, dropped: int, *, append: bool) -> None:
    """Raises ArgumentError unless a call could have these options."""
    for name, value, allowed in (("rotary", rotary, ROTARY), ("layout", layout, LAYOUTS)):
        if value not in allowed:
            raise ArgumentError(
                f"{name}={quoted(value)}: allowed are {', '.join(map(repr, allowed))}"
            )
    if rotary and not append:
        raise ArgumentError(f"rotary={quoted(rotary)}: needs appended keys; add append=True")
    if not 0 <= dropped <= _MOST_DROPPED:
        raise ArgumentError(
            f"dropped={quoted(dropped)}: give how many keys a cache has dropped, from 0 to "
            f"{_MOST_DROPPED}"
        )


def _checked_lens_k(
    problem: Problem, lens_q: Lens | None, lens_k: Lens | None, seed: int, *, append: bool
) -> Lens:
    """The number of keys of each sequence; the numbers are drawn if they are not given.

    Raises ArgumentError if a sequence has fewer keys than are appended.
    """
    queries = lens_q or (problem.seq_q,) * problem.batch
    if lens_k is None:
        lens_k = draw_lengths(problem, random.Random(seed))
        if append:
            lens_k = tuple(map(max, queries, lens_k))
    if problem.batch:
        check_lens(queries, lens_k)
    if append and any(keys < n for n, keys in zip(queries, lens_k, strict=True)):
        raise ArgumentError(
            f"lens_k={lens_k}: shorter than what is appended, {queries}; give at least as many keys"
        )
    return lens_k


# --- expected outputs ----------------------------------------------------------------------------


def rotated(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, interleaved: bool
) -> np.ndarray:
    """x (rows, heads, d), with the first pairs of each row rotated by the angles for the row's
    position. Products and sums are fp32; only the result is rounded to the dtype of x."""
    half = cos.shape[1]
    x1, x2 = slice(0, half), slice(half, 2 * half)
    if interleaved:
        x1, x2 = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    c, s = (table[positions].astype(np.float32)[:, None] for table in (cos, sin))
    wide, turned = x.astype(np.float32), x.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        turned[..., x1] = (wide[..., x1] * c - wide[..., x2] * s).astype(x.dtype)
        turned[..., x2] = (wide[..., x1] * s + wide[..., x2] * c).astype(x.dtype)
    return turned


def expected_of(
    problem: Problem,
    inputs: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
    on_gpu: bool = False,
) -> ExpectedDecode:
    """The expected outputs; lengths and page tables must be valid.

    Caches to which nothing is appended are not copied. Keys are read and expanded for one sequence
    at a time, and for a few heads at a time if it is long.
    """
    lens_q, table = queries_of(problem, options), inputs.get("page_table")
    caches = {name: inputs[f"{name}_cache"] for name in "kv"}
    new = {
        name: inputs[name].reshape(-1, problem.heads_k, width)
        for name, width in (("k", problem.d), ("v", problem.d_v))
        if name in inputs
    }
    if new:
        caches = {name: cache.copy() for name, cache in caches.items()}
    q = inputs["q"].reshape(-1, problem.heads_q, problem.d)
    found = _Found(q, problem.heads_q, problem.d_v)
    masked = problem.semantics.key_mask.hides
    attention, sinks = attention_of(problem, options), inputs.get("sinks")
    k_scale, v_scale = scales_of(problem, options)
    if problem.cache:
        of_scores = attention.scale or 1.0 / math.sqrt(problem.d)
        attention = replace(attention, scale=of_scores * k_scale)
    for i, its in enumerate(row_slices(lens_q)):
        length = int(inputs["cache_lens"][i])
        position = length + (int(inputs["kv_offset"][i]) if "kv_offset" in inputs else 0)
        steps, queries = np.arange(lens_q[i]), q[its]
        if "cos" in inputs:
            turn = inputs["cos"], inputs["sin"]
            interleaved = options["rotary"] == "interleaved"
            queries = rotated(queries, *turn, position + steps * masked, interleaved)
        for name, rows in new.items():
            appended = rows[its]
            if name == "k" and "cos" in inputs:
                appended = rotated(appended, *turn, position + steps, interleaved)
            scale = k_scale if name == "k" else v_scale
            appended = stored(appended, scale, problem.cache_format)
            write_keys(caches[name], table, i, length, appended)
        keys = length + lens_q[i] * bool(new)
        for heads_k, heads_q in _head_blocks(problem, keys):
            # Converting 8-bit floats to q's dtype is exact.
            k, v = (
                read_keys(caches[name][:, :, heads_k], table, i, keys).astype(q.dtype, copy=False)
                for name in "kv"
            )
            part = references_of(
                replace(attention, lens_q=(lens_q[i],), lens_k=(keys,)),
                *(queries[:, heads_q], k, v),
                sinks=None if sinks is None else sinks[heads_q],
                on_gpu=on_gpu,
            )
            found.put(part if v_scale == 1.0 else _scaled(part, v_scale), its, heads_q)
    return ExpectedDecode(found.references(), tuple(lens_q), caches["k"], caches["v"])


def _scaled(found: References, v_scale: float) -> References:
    """The references of an output, multiplied by a scale."""
    dtype, factor = found.same_precision.dtype, np.float32(v_scale)
    with np.errstate(over="ignore", invalid="ignore"):
        same = (found.same_precision.astype(np.float32) * factor).astype(dtype)
    return replace(found, o=found.o * float(factor), same_precision=same)


def _head_blocks(problem: Problem, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of heads whose keys are expanded together: a block's heads in the cache, and
    the heads of q that use them."""
    group = problem.heads_q // problem.heads_k
    step = max(1, MOST_EXPANDED // max(1, keys * max(problem.d, problem.d_v)))
    for first in range(0, problem.heads_k, step):
        end = min(problem.heads_k, first + step)
        yield slice(first, end), slice(first * group, end * group)


class _Found:
    """Assembles the references of packed outputs from the references of single sequences and
    heads."""

    def __init__(self, q: np.ndarray, heads_q: int, d_v: int) -> None:
        shape = (*q.shape[:-1], d_v)
        self.o, self.same = np.empty(shape), np.empty(shape, q.dtype)
        self.lse, self.row_max = (np.empty((heads_q, len(q))) for _ in range(2))
        self.tainted: np.ndarray | None = None

    def put(self, part: References, rows: slice, heads: slice) -> None:
        """Stores the references of some rows and heads."""
        self.o[rows, heads], self.same[rows, heads] = part.o, part.same_precision
        self.lse[heads, rows], self.row_max[heads, rows] = part.lse, part.row_max
        if part.tainted is not None:
            if self.tainted is None:
                self.tainted = np.zeros(self.o.shape, bool)
            self.tainted[rows, heads] = part.tainted

    def references(self) -> References:
        """The references of the whole outputs, as assembled so far."""
        return References(self.o, self.lse, self.same, self.row_max, self.tainted)


@lru_cache(maxsize=4)
def _drawn_case(
    reference: DecodeReference,
    problem: Problem,
    kind: str,
    seed: int,
    options: tuple[tuple[str, Any], ...],
    on_gpu: bool,
) -> tuple[dict[str, np.ndarray], ExpectedDecode]:
    """The inputs and expected outputs of a case, cached because all configs of a set share them."""
    by_name = dict(options)
    inputs = reference.draw_inputs(problem, kind, seed, by_name)
    for array in inputs.values():
        array.flags.writeable = False
    return inputs, reference.expected_rows(problem, inputs, by_name, on_gpu)
