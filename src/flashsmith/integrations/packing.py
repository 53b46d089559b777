"""Packing of padded batches: which rows are real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Packing:
    """The real rows of a (batch, length) batch, in order, as attention() takes packed sequences.

    rows: two index tensors, batch and position of each real row. cu_seqlens: (sequences + 1),
    int32. longest: rows of the longest sequence. unbroken: no sequence has padding inside, so that
    distances between real rows stay the same. whole_lines: every line is one sequence without
    padding.
    """

    rows: tuple[Any, ...]
    cu_seqlens: Any
    longest: int
    unbroken: bool
    whole_lines: bool

    def pack(self, padded: Any) -> Any:
        """(batch, length, ...) to (total, ...); one copy."""
        if padded.requires_grad and torch.is_grad_enabled():
            return _Pack.apply(padded, self)
        return padded[self.rows]

    def unpack(self, packed: Any, batch: int, length: int) -> Any:
        """(total, ...) to (batch, length, ...), zero where there is no real row."""
        padded = packed.new_zeros((batch, length, *packed.shape[1:]))
        padded[self.rows] = packed
        return padded


class _Pack(torch.autograd.Function):
    """Packing.pack with gradients. PyTorch's own for an indexed tensor sort the rows, to add up
    those that are there twice; none is here."""

    @staticmethod
    def forward(padded: Any, packing: Packing) -> Any:
        return padded[packing.rows]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        padded, ctx.packing = inputs
        ctx.shape = padded.shape[:2]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.packing.unpack(gradient, *ctx.shape), None


# Every layer of a model gets the same mask object: its packing is computed once.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packing_of(mask: Any, last: int | None = None) -> Packing:
    """The packing of a (batch, length) mask, or of its ``last`` columns.

    A boolean mask is True where a row is real, and each line of it is a sequence. An integer mask
    numbers the sequence that each row belongs to, counting up along a line, and has no padding.
    Waits for the GPU once per mask.
    """
    last = None if last == mask.shape[1] else last
    known = _known.setdefault(mask, {})
    if last not in known:
        part = mask if last is None else mask[:, mask.shape[1] - last :]
        known[last] = _pack_real(part) if mask.dtype is torch.bool else _pack_numbered(part)
    packing: Packing = known[last]
    return packing


def packing_of_all(batch: int, length: int, device: Any) -> Packing:
    """The packing of a batch without padding; its rows are where they are, so it lists none."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return Packing((), starts, length, unbroken=True, whole_lines=True)


def _pack_real(mask: Any) -> Packing:
    lengths = mask.sum(dim=1, dtype=torch.int32)
    # In a sequence without holes the mask rises at most once, from the padding to its rows.
    rises = mask[:, :1].sum(dim=1) + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)
    longest, holes = torch.stack([_largest(lengths), _largest(rises)]).tolist()
    batch, position = mask.nonzero(as_tuple=True)
    whole = batch.numel() == mask.numel()
    return Packing((batch, position), _cumulated(lengths), longest, holes <= 1, whole)


def _pack_numbered(numbers: Any) -> Packing:
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    total = numbers.numel()
    first = starts.flatten().nonzero().flatten()
    lengths = torch.diff(first, append=first.new_tensor([total])).to(torch.int32)
    every_row = torch.ones_like(starts).nonzero(as_tuple=True)
    longest = int(_largest(lengths))
    whole = first.numel() == numbers.shape[0]
    return Packing(every_row, _cumulated(lengths), longest, True, whole)


def _largest(values: Any) -> Any:
    return values.max() if values.numel() else values.new_zeros(())


def _cumulated(lengths: Any) -> Any:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
