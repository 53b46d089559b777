"""Computes the gradients of the float tensors that a score function reads.

The gradient of one value of such a tensor is a sum over all score elements that read this value.
Each element contributes dS = P (dP - D), times the derivative of the new score with respect to the
value that was read. On a GPU, kernels compute these sums if the indices depend on the head, the
query, the key or the distance; see captured_by_kernels.py. For other indices PyTorch's operations
compute dS for blocks of rows in fp32 and float64. The order of every summation is fixed, so that
the bits repeat: dimensions that no index depends on are summed first, and the remaining sums are
added by PyTorch's deterministic index_put_().
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from flashsmith.errors import KernelNotBuiltError, UnservedError
from flashsmith.integrations.captured_by_kernels import (
    ONE,
    ScoreSums,
    add_elements,
    axis_of,
    is_whole,
)
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import BoundProgram
from flashsmith.semantics.signature import ForwardOptions, check_mask
from flashsmith.semantics.typed import Typed

# The largest number of scores in a block. About ten float64 arrays of that size exist at once.
MOST_SCORES = 2**24


class Saved(NamedTuple):
    """The tensors that a backward pass needs, in the layouts of attention()."""

    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dlse: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


def captured_gradients(
    saved: Saved,
    options: ForwardOptions,
    program: BoundProgram,
    needs: Sequence[bool],
    *,
    emulate: bool = False,
) -> list[Any]:
    """Returns the gradients of the program's tensors, in the tensors' dtypes; None for a tensor
    that needs no gradient.

    On the host, PyTorch's operations compute the gradients unless ``emulate`` is set.
    """
    score = program.program.score
    places = {read.name: i for i, read in enumerate(program.program.reads)}
    totals = _Totals(program.tensors)
    nodes = [
        (places[it.operands[0]], it)
        for it in (() if score is None else score.parts())
        if it.function == "read" and needs[places[it.operands[0]]]
    ]
    if score is not None and nodes:
        with _deterministic():
            if ScoreSums.serves(saved, emulate):
                kernels = ScoreSums(saved, options, program, emulate)
                nodes = [it for it in nodes if not _add_by_kernel(totals, it[0], kernels, it[1])]
            slopes = [(place, node, derivative(score, node)) for place, node in nodes]
            for sequence in _sequences(saved, options) if slopes else ():
                for block in sequence.blocks(options, program):
                    for place, node, slope in slopes:
                        _add(totals.of(place), block, node, slope)
    return [totals.gradient(place) if need else None for place, need in enumerate(needs)]


class _Totals:
    """Accumulates the gradients of a program's tensors, which start at 0."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self._sums: dict[int, torch.Tensor] = {}

    def of(self, place: int) -> torch.Tensor:
        """Returns the float64 tensor in which the gradient of tensor ``place`` is accumulated."""
        found = self._sums.get(place)
        if found is None:
            found = torch.zeros_like(self.tensors[place], dtype=torch.float64)
        self._sums[place] = found.double()
        return self._sums[place]

    def put(self, place: int, total: torch.Tensor) -> bool:
        """Makes this fp32 tensor the gradient of tensor ``place``; returns False if that gradient
        is not empty."""
        return self._sums.setdefault(place, total) is total

    def gradient(self, place: int) -> torch.Tensor:
        """Returns the gradient in the dtype of the program's tensor."""
        tensor = self.tensors[place]
        found = self._sums.get(place)
        return torch.zeros_like(tensor) if found is None else found.to(tensor.dtype)


def _add_by_kernel(totals: _Totals, place: int, kernels: ScoreSums, node: Typed) -> bool:
    """Adds the sums that a kernel computes for a read; returns False if no kernel can compute
    them."""
    axis, shape = axis_of(node), tuple(totals.tensors[place].shape)
    if axis is None or (axis == "elements" and not kernels.fits(node, shape)):
        return False
    its = kernels.program
    others = {it.name: x for it, x in zip(its.program.numbers, its.numbers, strict=True)}
    tensors = {it.name: x.detach() for it, x in zip(its.program.reads, its.tensors, strict=True)}

    def index_at(index: Typed, b: int, h: int, size: int) -> int:
        values = {**others, "b": torch.tensor(b), "h": torch.tensor(h)}
        return int(_inside(index.evaluate(values, tensors, torch), size))

    try:
        sums = kernels.of(node, axis)
    except (UnservedError, KernelNotBuiltError):
        return False
    factor = kernels.slope(node, axis).of_sum
    if axis == "elements":
        if factor is not ONE:
            sums *= factor.evaluate(others, tensors, torch)
        if not (is_whole(node, sums, shape) and totals.put(place, sums.reshape(shape))):
            add_elements(totals.of(place), sums, node, index_at)
        return True
    for parts, values in kernels.coordinates(sums, axis):
        _add(totals.of(place), _ScoreBlock(parts, {**others, **values}, tensors), node, factor)
    return True


@contextmanager
def _deterministic() -> Iterator[None]:
    """Lets PyTorch add by index in a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


class _ScoreBlock(NamedTuple):
    """dS of a block of rows and all keys of a sequence, (heads, rows, keys), or sums of this dS;
    and the values and tensors from which expressions are evaluated at the same elements."""

    d_scores: torch.Tensor
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]


class _SavedSequence(NamedTuple):
    """One sequence: its number and its tensors, with the head dimension first. The statistics are
    (heads, rows)."""

    number: int
    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dlse: Any

    def blocks(self, options: ForwardOptions, program: BoundProgram) -> Iterator[_ScoreBlock]:
        heads, seq_q, _ = self.q.shape
        rows = max(1, MOST_SCORES // max(1, heads * self.k.shape[1]))
        for first in range(0, seq_q, rows):
            yield self._block(slice(first, min(first + rows, seq_q)), options, program)

    def _block(self, rows: slice, options: ForwardOptions, program: BoundProgram) -> _ScoreBlock:
        (heads, seq_q, d), seq_k = self.q.shape, self.k.shape[1]
        group = heads // self.k.shape[0]
        on = {"device": self.q.device}
        q = torch.arange(rows.start, rows.stop, **on)[:, None]
        k = torch.arange(seq_k, **on)
        values: dict[str, Any] = {
            "b": torch.tensor(self.number, **on),
            "h": torch.arange(heads, **on)[:, None, None],
            "q": q,
            "k": k,
            "seq_q": torch.tensor(seq_q, **on),
            "seq_k": torch.tensor(seq_k, **on),
        }
        its = program.program
        values |= {it.name: x for it, x in zip(its.numbers, program.numbers, strict=True)}
        tensors = {it.name: x.detach() for it, x in zip(its.reads, program.tensors, strict=True)}
        keys, own_v = (x.repeat_interleave(group, 0).float() for x in (self.k, self.v))
        do, own_q = self.do[:, rows].float(), self.q[:, rows].float()
        scale, cap = options.scale, float(options.softcap)
        scores = (own_q @ keys.mT).double() * (d**-0.5 if scale is None else float(scale))
        values["score"] = cap * torch.tanh(scores / cap) if cap > 0 else scores
        assert its.score is not None
        limits = check_mask(options.causal, options.window)
        at = q + (seq_k - seq_q)
        seen = (k >= at - limits.left) & (k <= at + limits.right)
        if its.mask is not None:
            seen = seen & its.mask.evaluate(values, tensors, torch)
        lse = self.lse[:, rows, None].double()
        seen = seen & (lse != -torch.inf)
        d_row = torch.where(self.o[:, rows] == 0, 0, do.double() * self.o[:, rows].double()).sum(-1)
        if self.dlse is not None:
            d_row = d_row - self.dlse[:, rows].double()
        weights = torch.exp(its.score.evaluate(values, tensors, torch) - lse)
        d_scores = weights * ((do @ own_v.mT).double() - d_row[..., None])
        seen = seen & (weights != 0)
        return _ScoreBlock(torch.where(seen, d_scores, 0), values, tensors)


def _sequences(saved: Saved, options: ForwardOptions) -> Iterator[_SavedSequence]:
    def heads_first(x: Any, rows: Any) -> Any:
        return x[rows].transpose(0, 1)

    queries, keys = (saved.do, saved.q, saved.o), (saved.k, saved.v)
    if saved.cu_seqlens_q is None:
        for b in range(saved.q.shape[0]):
            (do, q, o), (k, v) = ([heads_first(x, b) for x in it] for it in (queries, keys))
            dlse = None if saved.dlse is None else saved.dlse[b]
            yield _SavedSequence(b, do, q, k, v, o, saved.lse[b], dlse)
        return
    parts = zip(
        pairwise(saved.cu_seqlens_q.tolist()), pairwise(saved.cu_seqlens_k.tolist()), strict=True
    )
    for b, ((q0, q1), (k0, k1)) in enumerate(parts):
        rows, its_keys = slice(q0, min(q1, _end(q0, options.max_seqlen_q))), slice(k0, k1)
        its_keys = slice(k0, min(k1, _end(k0, options.max_seqlen_k)))
        do, q, o = (heads_first(x, rows) for x in queries)
        k, v = (heads_first(x, its_keys) for x in keys)
        dlse = None if saved.dlse is None else saved.dlse[:, rows]
        yield _SavedSequence(b, do, q, k, v, o, saved.lse[:, rows], dlse)


def _end(first: int, length: int | None) -> int:
    return 2**62 if length is None else first + length


def _add(total: torch.Tensor, block: _ScoreBlock, node: Typed, slope: Typed) -> None:
    """Adds a block's contribution to ``total``, the gradient of the values that ``node`` reads."""
    factor = slope.evaluate(block.values, block.tensors, torch)
    # A hidden element's derivative may be NaN.
    _add_parts(total, torch.where(block.d_scores == 0, 0, block.d_scores * factor), block, node)


def _add_parts(total: torch.Tensor, parts: torch.Tensor, block: _ScoreBlock, node: Typed) -> None:
    indices = [
        _wrapped(it, block, size) for it, size in zip(node.operands[2:], total.shape, strict=True)
    ]
    for dim in range(3):
        if all(it.shape[dim] == 1 for it in indices):
            parts = parts.sum(dim, keepdim=True)
    if not indices:
        total += parts.reshape(())
        return
    places = tuple(it.expand(parts.shape) for it in indices)
    total.index_put_(places, parts, accumulate=True)


def _wrapped(index: Typed, block: _ScoreBlock, size: int) -> torch.Tensor:
    """Returns an index with three dimensions, as kernels evaluate it: a negative index counts from
    the end, and any other index is clamped to the size of the dimension."""
    found = index.evaluate(block.values, block.tensors, torch)
    found = _inside(found, size)
    return found.reshape((1,) * (3 - found.dim()) + tuple(found.shape))


def _inside(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)
