"""FlexAttention's BlockMask as a mask: its lists of blocks, and its function in partial blocks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.tracing.binding import table_function
from flashsmith.tracing.captures import Constant

_ABSENT, _PARTIAL, _FULL = range(3)
# create_block_mask's block size for no lists at all is far longer than any sequence.
_ONE_BLOCK = 1 << 28


def is_block_mask(value: Any) -> bool:
    """Whether it is PyTorch's BlockMask."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def mask_of_blocks(block_mask: Any, lengths: tuple[int, int] | None) -> Callable[..., Any]:
    """A BlockMask as a function: hidden in blocks that the lists omit, the BlockMask's function in
    partial blocks, and seen in full blocks.

    Raises ArgumentError if the BlockMask was made for other lengths.
    """
    rows, columns = (int(it) for it in block_mask.BLOCK_SIZE)
    if has_no_lists(rows, columns):
        function: Callable[..., Any] = block_mask.mask_mod
        return function
    check_lengths(tuple(int(it) for it in block_mask.seq_lengths), lengths)
    return _known_function(block_mask, rows, columns)


def has_no_lists(rows: int, columns: int) -> bool:
    """Whether these are the block sizes of a BlockMask that is a function alone."""
    return min(rows, columns) >= _ONE_BLOCK


def check_lengths(own: tuple[int, ...], lengths: tuple[int, int] | None) -> None:
    """Raises ArgumentError if a BlockMask was made for other lengths than a call's."""
    if lengths is not None and own != lengths:
        raise ArgumentError(
            f"block_mask: made for {own[0]} queries and {own[1]} keys, and the call has "
            f"{lengths[0]} and {lengths[1]}; make one for these lengths"
        )


def function_of_blocks(
    states: Any, mask_mod: Callable[..., Any], rows: int, columns: int
) -> Callable[..., Any]:
    """The mask of states_of_lists() and of a function in partial blocks of these sizes, which are
    Constants."""
    at = table_function(states)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = at(b, h, q_idx // rows, kv_idx // columns)
        return (state == _FULL) | ((state == _PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return mask


class _Known(NamedTuple):
    owner: weakref.ref[Any]
    versions: tuple[Any, ...]
    function: Callable[..., Any]


_KNOWN: dict[int, _Known] = {}
_KNOWN_LOCK = Lock()


def _known_function(block_mask: Any, rows: int, columns: int) -> Callable[..., Any]:
    """The function of a BlockMask, kept until its tensors or its function change."""
    lists = (
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        *(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    versions = (id(block_mask.mask_mod), *((id(it), getattr(it, "_version", 0)) for it in lists))
    known = _KNOWN.get(id(block_mask))
    if known is not None and known.owner() is block_mask and known.versions == versions:
        return known.function
    sizes = Constant(rows), Constant(columns)
    made = function_of_blocks(states_of_lists(*lists), block_mask.mask_mod, *sizes)
    with _KNOWN_LOCK:
        for place in [it for it, old in _KNOWN.items() if old.owner() is None]:
            del _KNOWN[place]
        _KNOWN[id(block_mask)] = _Known(weakref.ref(block_mask), versions, made)
    return made


def states_of_lists(counts: Any, indices: Any, full_counts: Any, full_indices: Any) -> Any:
    """The states of blocks (b, h, q blocks, k blocks) from the lists of partial and full blocks.

    counts are (b, h, q blocks), indices (b, h, q blocks, k blocks); entries behind a count are
    ignored, whatever they are. A block in both lists is full.
    """
    import torch

    columns = indices.shape[-1]
    place = torch.arange(columns, device=indices.device)
    # One more column takes the entries behind the counts.
    states = torch.zeros(
        (*indices.shape[:-1], columns + 1), dtype=torch.uint8, device=indices.device
    )
    for count, index, state in (
        (counts, indices, _PARTIAL),
        (full_counts, full_indices, _FULL),
    ):
        if count is None:
            continue
        is_entry = place < count.unsqueeze(-1)
        target = torch.where(is_entry, index.long().clamp(0, columns), columns)
        states.scatter_(-1, target, state)
    return states[..., :columns]
