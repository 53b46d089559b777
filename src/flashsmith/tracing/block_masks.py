"""Converts a BlockMask of FlexAttention to a mask function, which combines the BlockMask's lists of
blocks with its function for partial blocks.

Most BlockMasks of models are causal or a window, and their lists hide nothing that their function
does not hide. Such a BlockMask is replaced by its function, because kernels without lists are
faster.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.tracing.binding import at_row, bind, table_function
from flashsmith.tracing.captures import Constant

_ABSENT, _PARTIAL, _FULL = range(3)
# The block size that create_block_mask uses for a mask without lists, which is far longer than any
# sequence.
_ONE_BLOCK = 1 << 28


def is_block_mask(value: Any) -> bool:
    """Whether the value is a BlockMask of PyTorch."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def mask_of_blocks(
    block_mask: Any, lengths: tuple[int, int] | None, positions: str = "start"
) -> Callable[..., Any]:
    """Converts a BlockMask to a function.

    The function hides blocks that the lists omit, shows full blocks, and calls the BlockMask's own
    function in partial blocks.

    Raises ArgumentError if the BlockMask was made for other lengths, or its rows are not positions.
    """
    rows, columns = (int(it) for it in block_mask.BLOCK_SIZE)
    if has_no_lists(rows, columns):
        function: Callable[..., Any] = block_mask.mask_mod
        return function
    own = tuple(int(it) for it in block_mask.seq_lengths)
    check_lengths(own, lengths, positions)
    known = _known_lists(block_mask, rows, columns)
    if known.window is not None and known.window == _window(block_mask.mask_mod, own):
        function = block_mask.mask_mod
        return function
    return known.function


def mask_over_cache(block_mask: Any, seq_q: int | None, capacity: int) -> Callable[..., Any]:
    """Converts a BlockMask over a cache of ``capacity`` keys to a function for positions='end'.
    ``seq_q`` is the number of queries of every sequence, or None.

    Raises ArgumentError for a BlockMask of other lengths.
    """
    rows, columns = (int(it) for it in block_mask.BLOCK_SIZE)
    if has_no_lists(rows, columns):
        function: Callable[..., Any] = block_mask.mask_mod
        return function
    own = tuple(int(it) for it in block_mask.seq_lengths)
    of_call = rows_are_of_the_call(own, block_mask.kv_num_blocks.shape[-1], rows, seq_q, capacity)
    known = _known_lists(block_mask, rows, columns)
    if known.window is not None and known.window == _window(block_mask.mask_mod, own):
        function = block_mask.mask_mod
    else:
        function = known.function
    return at_row(function) if of_call else function


def rows_are_of_the_call(
    own: tuple[int, ...], n_blocks: int, rows: int, seq_q: int | None, capacity: int
) -> bool:
    """Whether a BlockMask's rows are a call's queries; otherwise, the rows are positions in the
    sequence.

    The BlockMask has the lengths ``own``, and ``n_blocks`` blocks of ``rows`` rows.

    Raises ArgumentError if a BlockMask's rows can be neither.
    """
    if -(-own[0] // rows) != n_blocks:
        raise ArgumentError(
            f"mask: a BlockMask of {own[0]} queries, of which {n_blocks} blocks of {rows} are "
            "left; set its seq_lengths to the numbers of queries and keys of this call, and its "
            "mask_mod to one that counts these queries from 0"
        )
    if own[1] >= capacity:
        if own[0] == own[1]:
            return False
        if own[0] == seq_q:
            return True
    queries = "" if seq_q is None else f", or of {seq_q} queries, those of this call"
    raise ArgumentError(
        f"mask: a BlockMask of {own[0]} queries and {own[1]} keys, and the cache holds {capacity} "
        f"keys; give one of {capacity} positions{queries}, with {capacity} keys"
    )


def has_no_lists(rows: int, columns: int) -> bool:
    """Whether these are the block sizes of a BlockMask without lists of blocks."""
    return min(rows, columns) >= _ONE_BLOCK


def check_lengths(own: tuple[int, ...], lengths: tuple[int, int] | None, positions: str) -> None:
    """Raises ArgumentError if the lengths ``own`` of a BlockMask are not the call's, or its rows
    are not positions."""
    if lengths is not None and own != lengths:
        raise ArgumentError(
            f"block_mask: made for {own[0]} queries and {own[1]} keys, and the call has "
            f"{lengths[0]} and {lengths[1]}; make one for these lengths"
        )
    if positions == "end" and own[0] != own[1]:
        raise ArgumentError(
            f"positions='end': a BlockMask's lists count queries from the first, and {own[0]} "
            f"queries of {own[1]} keys count from the last; give positions='start'"
        )


def function_of_blocks(
    states: Any, mask_mod: Callable[..., Any], rows: int, columns: int
) -> Callable[..., Any]:
    """Combines states_of_lists() with a function for partial blocks; the block sizes are
    Constants."""
    at = table_function(states)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = at(b, h, q_idx // rows, kv_idx // columns)
        return (state == _FULL) | ((state == _PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return mask


# How many keys a row sees before and after its own position, aligned to the bottom right.
_Window = tuple[int | None, int | None]


class _Analysis(NamedTuple):
    """The analysis of a BlockMask.

    window: its function's window, if the lists show exactly the same keys; otherwise None.
    """

    owner: weakref.ref[Any]
    versions: tuple[Any, ...]
    function: Callable[..., Any]
    window: _Window | None


_KNOWN: dict[int, _Analysis] = {}
_KNOWN_LOCK = Lock()


def _known_lists(block_mask: Any, rows: int, columns: int) -> _Analysis:
    """Analyses a BlockMask. The result is kept until the BlockMask's tensors or function change."""
    lists = (
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        *(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    versions = (id(block_mask.mask_mod), *((id(it), getattr(it, "_version", 0)) for it in lists))
    known = _KNOWN.get(id(block_mask))
    if known is not None and known.owner() is block_mask and known.versions == versions:
        return known
    states = states_of_lists(*lists)
    function = function_of_blocks(states, block_mask.mask_mod, Constant(rows), Constant(columns))
    made = _Analysis(weakref.ref(block_mask), versions, function, None)
    if not _has_values(states):
        return made
    lengths = tuple(int(it) for it in block_mask.seq_lengths)
    window = _window(block_mask.mask_mod, lengths)
    if window is not None and _shows_window(states, (rows, columns), lengths, window):
        made = made._replace(window=window)
    with _KNOWN_LOCK:
        for place in [it for it, old in _KNOWN.items() if old.owner() is None]:
            del _KNOWN[place]
        _KNOWN[id(block_mask)] = made
    return made


def _has_values(states: Any) -> bool:
    """Whether the states can be read.

    Fake tensors have no values, and during CUDA graph capture real tensors have none yet. In both
    cases the states must not be read or kept for later calls.
    """
    import torch

    if type(states) is not torch.Tensor or states.is_meta:
        return False
    return not (states.is_cuda and torch.cuda.is_current_stream_capturing())


def _window(mask_mod: Callable[..., Any], lengths: tuple[int, ...]) -> _Window | None:
    """Returns the window that hides the same keys as a function for these lengths; None if there is
    none."""
    bound = bind(None, (mask_mod,), (lengths[0], lengths[1]))
    return (bound.left, bound.right) if bound.program is None else None


def _shows_window(
    states: Any, block: tuple[int, int], lengths: tuple[int, ...], window: _Window
) -> bool:
    """Whether the lists include every block that has keys in the window, and full blocks have only
    keys in the window.

    This copies the states to the host, once for each BlockMask.
    """
    seq_q, seq_k = lengths
    # For each block, the first and the last of its rows and keys.
    q = np.arange(0, seq_q, block[0])[:, None] + (seq_k - seq_q)
    k = np.arange(0, seq_k, block[1])[None, :]
    last_q = np.minimum(q + block[0], seq_k) - 1
    last_k = np.minimum(k + block[1], seq_k) - 1
    left = np.inf if window[0] is None else window[0]
    right = np.inf if window[1] is None else window[1]
    sees_any = (k - last_q <= right) & (last_k - q >= -left)
    sees_all = (last_k - q <= right) & (k - last_q >= -left)
    found = states[..., : q.shape[0], : k.shape[1]].cpu().numpy()
    if found.shape[-2:] != sees_any.shape:
        return False
    return bool(((found != _ABSENT) | ~sees_any).all() and ((found != _FULL) | sees_all).all())


def states_of_lists(counts: Any, indices: Any, full_counts: Any, full_indices: Any) -> Any:
    """Makes the states of blocks (b, h, q blocks, k blocks) from the lists of partial and full
    blocks.

    counts are (b, h, q blocks), indices (b, h, q blocks, k blocks); entries after a count are
    ignored. A block in both lists is full.
    """
    import torch

    columns = indices.shape[-1]
    place = torch.arange(columns, device=indices.device)
    # An additional column receives the entries after the counts.
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
