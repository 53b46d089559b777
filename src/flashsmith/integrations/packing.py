"""Packs padded batches: finds the real tokens, and moves tensors between the two layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Packing:
    """The real tokens of a (batch, length) batch, in order, as packed sequences for attention().

    rows: two index tensors, the batch index and the position of each real token.
    cu_seqlens: (sequences + 1), int32.
    longest: length of the longest sequence.
    unbroken: whether no sequence has padding between real tokens, so that packing keeps the
        distances between them.
    whole_lines: whether every batch row is one sequence without padding.
    """

    rows: tuple[Any, ...]
    cu_seqlens: Any
    longest: int
    unbroken: bool
    whole_lines: bool

    def pack(self, padded: Any) -> Any:
        """Packs a tensor (batch, length, ...) to (total, ...), with one copy."""
        if padded.requires_grad and torch.is_grad_enabled():
            return _Pack.apply(padded, self)
        return padded[self.rows]

    def unpack(self, packed: Any, batch: int, length: int) -> Any:
        """Converts (total, ...) to (batch, length, ...), with zeros at padding."""
        padded = packed.new_zeros((batch, length, *packed.shape[1:]))
        padded[self.rows] = packed
        return padded

    def to_front(self, padded: Any) -> Any:
        """Moves each batch row's real tokens of a tensor (batch, length, ...) to the front of the
        row, and fills the rest with zeros."""
        batch, position = self.rows
        slot = torch.arange(batch.numel(), device=batch.device) - self.cu_seqlens[batch]
        moved = torch.zeros_like(padded)
        moved[batch, slot] = padded[batch, position]
        return moved


class _Pack(torch.autograd.Function):
    """Packing.pack with gradients.

    PyTorch's gradient of indexing sorts the indices, so that it can sum the gradients of repeated
    indices. A Packing repeats none, so its gradient needs no sorting.
    """

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


# All layers of a model get the same mask object, so the packing is computed only once per mask.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packing_of(mask: Any, last: int | None = None) -> Packing:
    """Returns the packing that a (batch, length) mask describes, or that its ``last`` columns
    describe.

    A boolean mask is True at real tokens, and each batch row is a sequence. An integer mask has the
    sequence number of each token, ascending along a batch row, and no padding. The call
    synchronizes with the GPU once per mask.
    """
    last = None if last == mask.shape[1] else last
    known = _known.setdefault(mask, {})
    if last not in known:
        part = mask if last is None else mask[:, mask.shape[1] - last :]
        known[last] = _pack_real(part) if mask.dtype is torch.bool else _pack_numbered(part)
    packing: Packing = known[last]
    return packing


def packing_of_all(batch: int, length: int, device: Any) -> Packing:
    """Returns the packing of a batch without padding; ``rows`` is empty, because no token moves."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return Packing((), starts, length, unbroken=True, whole_lines=True)


def _pack_real(mask: Any) -> Packing:
    lengths = mask.sum(dim=1, dtype=torch.int32)
    # In a sequence without holes, the mask changes from False to True at most once.
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
