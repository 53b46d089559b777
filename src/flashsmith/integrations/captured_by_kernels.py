"""Computes, with kernels, the gradients of the float tensors that a score function reads.

For one read of a tensor, a kernel sums the contributions of all score elements that share a
coordinate: the same query, the same key, the same distance between query and key, or the same query
and key in several sequences or heads. PyTorch then adds these sums to the gradient at the positions
that the read's indices give. A factor of the derivative that all summed elements share is applied
to the sum, so that a function's reads need fewer kernels. Reads whose indices have another form are
left to captured_gradients.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashsmith.families import families
from flashsmith.operations.score_sums import SCORE_SUMS, TILE, sums_shape
from flashsmith.runtime.score_sums import run_score_sums
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import SCORE, B, BoundProgram, H, K, Q, is_uniform, program_of
from flashsmith.semantics.ranges import factors_of_indices
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.semantics.typed import Typed, typed_constant

_DTYPES = (torch.float16, torch.bfloat16)


class Lengths(NamedTuple):
    """The length of each sequence in q and k, and the greatest length in each."""

    q: Sequence[int]
    k: Sequence[int]
    longest_q: int
    longest_k: int


class Coordinates(NamedTuple):
    """One sequence's contributions to a read, broadcastable to (heads, queries, keys), and the
    values of the symbols at those elements."""

    parts: torch.Tensor
    values: Mapping[str, Any]


def axis_of(node: Typed) -> str | None:
    """Returns the axis along which a kernel sums the contributions to a read; None if no kernel
    can."""
    indices: tuple[Typed, ...] = node.operands[2:]
    parts = {part for it in indices for part in it.parts()}
    if SCORE in parts:
        return None
    if K not in parts:
        return "rows"
    if Q not in parts:
        return "keys"
    if all(map(_is_of_distance, indices)):
        return "distances"
    others = [it for it in indices if it is not Q and it is not K]
    is_element = len(others) == len(indices) - 2 and Q in indices and K in indices
    if is_element and not any(at in it.parts() for it in others for at in (Q, K)):
        return "elements"
    return None


def _is_of_distance(it: Typed) -> bool:
    """Whether an index depends on q and k only through their difference."""
    if not {Q, K} & set(it.parts()):
        return True
    factors = factors_of_indices(it)
    if factors is not None:
        return sum(factors) == 0
    return bool(it.arguments) and all(map(_is_of_distance, it.arguments))


# The symbols whose values differ between the elements of one sum.
_SUMMED = {"rows": {K, SCORE}, "keys": {Q, SCORE}, "distances": {Q, K, SCORE}}
ONE = typed_constant(1.0)


class Slope(NamedTuple):
    """The derivative of a score function with respect to a read, as a product of two factors: one
    that the kernel computes at each element, and one that is applied to the sum."""

    at_element: Typed
    of_sum: Typed

    @classmethod
    def of(cls, score: Typed, node: Typed, axis: str) -> Slope:
        """Splits the derivative of ``score`` with respect to ``node``, summed along an axis."""
        slope = derivative(score, node)
        if axis == "elements":
            is_shared = is_uniform(slope)
        else:
            is_shared = _SUMMED[axis].isdisjoint(slope.parts())
        return cls(ONE, slope) if is_shared else cls(slope, ONE)


class ScoreSums:
    """Computes the sums of one backward pass. ``saved`` is a captured_gradients.Saved."""

    def __init__(
        self, saved: Any, options: ForwardOptions, program: BoundProgram, emulate: bool
    ) -> None:
        self.saved, self.program, self.emulate = saved, program, emulate
        self.lengths = _lengths(saved, options)
        self.heads = saved.q.shape[-2]
        self.options = options.with_tensors(None, saved.cu_seqlens_q, saved.cu_seqlens_k)._replace(
            return_lse=False, return_row_max=False, bits=None
        )
        if saved.cu_seqlens_q is not None:
            self.options = self.options._replace(
                max_seqlen_q=self.lengths.longest_q, max_seqlen_k=self.lengths.longest_k
            )

    @staticmethod
    def serves(saved: Any, emulate: bool) -> bool:
        """Whether the kernels can process these tensors."""
        d = saved.q.shape[-1]
        (family, *_) = families(SCORE_SUMS.name)
        if d != saved.v.shape[-1] or d > max(family.knob_values["d_head"]):
            return False
        return saved.q.dtype in _DTYPES and (saved.q.is_cuda or emulate) and saved.q.numel() > 0

    def fits(self, node: Typed, shape: tuple[int, ...]) -> bool:
        """Whether the score elements along the axis 'elements' all read different elements of a
        tensor of this shape. If the tensor is shorter than a sequence, some elements are read more
        than once."""
        indices: tuple[Typed, ...] = node.operands[2:]
        longest = (Q, self.lengths.longest_q), (K, self.lengths.longest_k)
        return all(shape[indices.index(it)] >= length for it, length in longest)

    def slope(self, node: Typed, axis: str) -> Slope:
        """Returns the slope of a read that is summed along an axis."""
        score = self.program.program.score
        assert score is not None
        return Slope.of(score, node, axis)

    def summed_by(self, slope: Typed) -> BoundProgram:
        """Returns the program of a kernel that sums the contributions, weighted by ``slope`` at
        each element."""
        its = self.program.program
        found = program_of(its.score, its.mask, slope)
        tensors = dict(zip((it.name for it in its.reads), self.program.tensors, strict=True))
        numbers = dict(zip((it.name for it in its.numbers), self.program.numbers, strict=True))
        return BoundProgram(
            found.program,
            tuple(tensors[name].detach() for name in found.reads),
            tuple(numbers[name] for name in found.numbers),
        )

    def of(self, node: Typed, axis: str) -> torch.Tensor:
        """Runs the kernel that sums the contributions to a read along an axis. The slope's factor
        is not yet applied; see operations/score_sums.py."""
        bound, saved = self.summed_by(self.slope(node, axis).at_element), self.saved
        dlse = None if saved.dlse is None else saved.dlse.contiguous()
        sums = torch.empty(self._shape(node, axis), dtype=torch.float32, device=saved.q.device)
        run_score_sums(
            (saved.do.contiguous(), saved.q, saved.k, saved.v, saved.o, saved.lse),
            self.options._replace(program=bound),
            dlse,
            sums,
            axis,
            emulate=self.emulate,
        )
        return sums

    def _shape(self, node: Typed, axis: str) -> tuple[int, ...]:
        lengths = self.lengths
        shape = sums_shape(axis, len(lengths.q), self.heads, lengths.longest_q, lengths.longest_k)
        if axis != "elements":
            return shape
        used = {part for it in node.operands[2:] for part in it.parts()}
        batch, heads = (size if at in used else 1 for at, size in zip((B, H), shape, strict=False))
        return batch, heads, *shape[2:]

    # --- the coordinates of sums -----------------------------------------------------------------

    def coordinates(self, sums: torch.Tensor, axis: str) -> Iterator[Coordinates]:
        """Yields the sums of each sequence, for every axis except 'elements'."""
        on = {"device": sums.device}
        heads = torch.arange(self.heads, **on)[:, None, None]
        for b, (seq_q, seq_k) in enumerate(zip(self.lengths.q, self.lengths.k, strict=True)):
            parts = sums[b].double()
            q = k = torch.zeros((), dtype=torch.int64, **on)
            if axis == "rows":
                parts, q = parts.mT[:, :seq_q], torch.arange(seq_q, **on)[:, None]
            elif axis == "keys":
                parts, k = parts[..., :seq_k], torch.arange(seq_k, **on)
            else:
                distance = torch.arange(1 - seq_q, seq_k, **on)
                parts = self._by_distance(parts)[:, None, distance + self.lengths.longest_q - 1]
                q, k = (-distance).clamp(min=0), distance.clamp(min=0)
            values = {
                **{"b": torch.tensor(b, **on), "h": heads, "q": q, "k": k},
                **{"seq_q": torch.tensor(seq_q, **on), "seq_k": torch.tensor(seq_k, **on)},
            }
            yield Coordinates(parts, values)

    def _by_distance(self, strips: torch.Tensor) -> torch.Tensor:
        """Adds up strips (heads, strips, 2 TILE) to sums (heads, distances). The first
        distance is 1 - longest_q."""
        heads, count, _ = strips.shape
        sums = strips.new_zeros(heads, count + 1, TILE)
        sums[:, :-1] += strips[..., :TILE]
        sums[:, 1:] += strips[..., TILE:]
        tiles = -(-self.lengths.longest_q // TILE)
        first = (tiles - 1) * TILE + (TILE - 1) - (self.lengths.longest_q - 1)
        return sums.flatten(1)[:, first:]


def _lengths(saved: Any, options: ForwardOptions) -> Lengths:
    if saved.cu_seqlens_q is None:
        batch, seq_q = saved.q.shape[:2]
        seq_k = saved.k.shape[1]
        return Lengths([seq_q] * batch, [seq_k] * batch, seq_q, seq_k)
    found: list[list[int]] = []
    for offsets, most in (
        (saved.cu_seqlens_q, options.max_seqlen_q),
        (saved.cu_seqlens_k, options.max_seqlen_k),
    ):
        lengths = offsets.diff().tolist()
        found.append(lengths if most is None else [min(it, most) for it in lengths])
    of_q, of_k = found
    return Lengths(of_q, of_k, max(of_q, default=0), max(of_k, default=0))


def is_whole(node: Typed, sums: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the sums along 'elements' form the whole gradient of a tensor of this shape, up to
    dimensions of size 1."""
    sizes = dict(zip((B, H, Q, K), sums.shape, strict=True))
    indices: tuple[Typed, ...] = node.operands[2:]
    read = [it for it in sizes if it in indices]
    return tuple(read) == indices and shape == tuple(sizes[it] for it in indices)


def add_elements(total: torch.Tensor, sums: torch.Tensor, node: Typed, index_at: Any) -> None:
    """Adds sums along 'elements' to a gradient. ``index_at(index, b, h, size)`` evaluates the index
    of a dimension of this size for sequence b and head h."""
    indices: tuple[Typed, ...] = node.operands[2:]
    batch, heads, seq_q, seq_k = sums.shape
    for b in range(batch):
        for h in range(heads):
            at = tuple(
                slice(seq_q) if it is Q else slice(seq_k) if it is K else index_at(it, b, h, size)
                for it, size in zip(indices, total.shape, strict=True)
            )
            block = sums[b, h]
            total[at] += block if indices.index(Q) < indices.index(K) else block.mT
