"""Divides whole sequences into shards, and gathers them again."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.errors import ArgumentError
from flashsmith.parallel.call_checks import check_rows, check_same, digest, sequence_lengths
from flashsmith.parallel.group import Group, Message
from flashsmith.parallel.layout import Layout
from flashsmith.parallel.rank_rows import in_order, padded
from flashsmith.printable import quoted
from flashsmith.semantics.signature import whole_number


def layout_of(length: Any, cu_seqlens: Any, ranks: int) -> Layout:
    """How a sequence, or several packed sequences, are divided among the ranks."""
    if cu_seqlens is not None:
        if length is not None:
            raise ArgumentError(f"length={quoted(length)}: given with cu_seqlens; give one of them")
        return Layout(sequence_lengths("cu_seqlens", cu_seqlens), ranks)
    value = whole_number(length)
    if value is None or value < 0:
        raise ArgumentError(
            f"length={quoted(length)}: give how many rows the whole sequence has, or cu_seqlens"
        )
    return Layout((value,), ranks)


def row_dim(tensor: Any, dim: Any, packed: bool) -> int:
    """The dimension of rows, counted from the front."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"tensor: got {type(tensor).__name__}; give a tensor of PyTorch")
    if dim is None:
        dim = 0 if packed else 1
    value = whole_number(dim)
    if value is None or not -tensor.dim() <= value < tensor.dim():
        raise ArgumentError(
            f"dim={quoted(dim)}: the tensor has shape {tuple(tensor.shape)}; name its dimension of "
            "rows"
        )
    return value % tensor.dim()


def check_whole(tensor: Any, dim: int, layout: Layout) -> None:
    if tensor.shape[dim] != layout.starts[-1]:
        raise ArgumentError(
            f"tensor: has {tensor.shape[dim]} rows, and cu_seqlens describes {layout.starts[-1]}; "
            "give the whole sequences"
        )


def unsharded(given: Any, tensor: Any, dim: Any, cu_seqlens: Any) -> Any:
    """Does the work of parallel.unshard()."""
    group = Group(given)
    facts: dict[str, Any] = {"function": "unshard"}
    refused: Exception | None = None
    lengths = None
    try:
        dim = row_dim(tensor, dim, cu_seqlens is not None)
        group.check_device("tensor", tensor)
        if cu_seqlens is not None:
            lengths = sequence_lengths("cu_seqlens", cu_seqlens)
        shape = list(tensor.shape)
        rows, shape[dim] = shape[dim], None
        facts.update(
            dim=dim, rows=rows, shape=shape, dtype=str(tensor.dtype), cu_seqlens=digest(lengths)
        )
    except Exception as error:
        refused = error
    said = group.agree(Message(facts, refused)).said()
    check_same(said, apart=("rows",))
    counts = [facts["rows"] for facts in said]
    layout = Layout((sum(counts),) if lengths is None else lengths, group.size)
    check_rows("tensor", layout, counts)
    mine = padded(tensor.detach().resolve_neg(), dim, layout.most_rows)
    return in_order(group.all_gather(mine).wait(), layout, dim)
