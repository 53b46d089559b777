"""Takes ranks' rows from tensors, pads them for messages, and joins them in the order of the
sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from flashsmith.parallel.layout import Layout, Span, joined


class RankRows:
    """Some rows of a tensor, in order. Contiguous rows are taken as a view, others as a copy."""

    def __init__(self, spans: Iterable[Span], device: Any) -> None:
        self.spans = tuple(joined(spans))
        self.span = self.spans[0] if len(self.spans) == 1 else None
        self.count = sum(end - begin for begin, end in self.spans)
        self._index = None
        if self.span is None:
            parts = [torch.arange(begin, end) for begin, end in self.spans]
            self._index = torch.cat([*parts, torch.empty(0, dtype=torch.long)]).to(device)

    def take(self, tensor: Any, dim: int) -> Any:
        if self.span is not None:
            return tensor.narrow(dim, self.span[0], self.count)
        return tensor.index_select(dim, self._index)

    def put(self, tensor: Any, dim: int, part: Any) -> None:
        if self.span is not None:
            self.take(tensor, dim).copy_(part)
        else:
            tensor.index_copy_(dim, self._index, part)

    def add(self, tensor: Any, dim: int, part: Any) -> None:
        if self.span is not None:
            self.take(tensor, dim).add_(part)
        else:
            # Each row occurs once, so the order of additions does not matter.
            self.put(tensor, dim, self.take(tensor, dim) + part)


@functools.lru_cache(maxsize=64)
def _order(layout: Layout, device: Any) -> Any:
    """The indices that select the rows of all sequences, in order, from gathered shards, which are
    padded to the length of the longest shard."""
    most = layout.most_rows
    parts = [
        torch.arange(rank * most + begin, rank * most + end)
        for rank, (begin, end) in layout.places()
    ]
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.long, device=device)


def padded(tensor: Any, dim: int, rows: int) -> Any:
    """A dense copy of a tensor, padded with zeros to this number of rows.

    Shards that are sent together must be equally long.
    """
    missing = rows - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor.contiguous()


def in_order(gathered: Any, layout: Layout, dim: int) -> Any:
    """Joins shards (ranks, ...), padded to the length of the longest, into one tensor with all rows
    in order.

    ``dim`` is the dimension of rows, not counting the dimension of ranks.
    """
    if len(layout.lengths) == 1:
        places = layout.places()
        if not places:
            return gathered[0].narrow(dim, 0, 0)
        return torch.cat(
            [gathered[rank].narrow(dim, begin, end - begin) for rank, (begin, end) in places], dim
        )
    flat = gathered.movedim(0, dim).flatten(dim, dim + 1)
    return flat.index_select(dim, _order(layout, gathered.device))


def by_owner(whole: Any, layout: Layout, dim: int) -> Any:
    """The inverse of in_order(): the rows of each rank, (ranks, ...), padded with zeros."""
    shards = [
        padded(shard_of(whole, layout, rank, dim), dim, layout.most_rows)
        for rank in range(layout.ranks)
    ]
    return torch.stack(shards)


def shard_of(whole: Any, layout: Layout, rank: int, dim: int) -> Any:
    """A rank's rows, taken from a tensor that has all rows."""
    parts = [whole.narrow(dim, begin, end - begin) for begin, end in layout.spans(rank)]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


def side_by_side(k: Any, v: Any) -> Any:
    """K and V in one tensor, to be sent as one message: in each row of each head, K's elements
    precede V's. K and V may have different d."""
    return torch.cat([k, v], -1)
