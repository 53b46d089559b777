"""Masks as values: documents, prefixes, trees, chunks, images, intervals, blocks, and their unions.

A value is a mask function (b, h, q_idx, kv_idx) for ``attention(mask=...)`` and ``flex_attention``,
and also for PyTorch's create_block_mask. ``a & b`` shows the keys that both show, ``a | b`` those
that one shows, and ``~a`` the others. Tensors may be PyTorch's, NumPy's or JAX's, like the call's,
and are data: new values, lengths and numbers never compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.tracing import table_function
from flashsmith.tracing.captures import Constant

__all__ = [
    "MaskValue",
    "blocks",
    "causal",
    "chunks",
    "documents",
    "image_blocks",
    "intervals",
    "prefix_lm",
    "prefix_tree",
    "window",
    "window_and_global",
]


class MaskValue:
    """A mask: a function (b, h, q_idx, kv_idx) that gives whether the query sees the key."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Any]) -> MaskValue:
        one = self.function
        return MaskValue(lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k))

    def __or__(self, other: Callable[..., Any]) -> MaskValue:
        one = self.function
        return MaskValue(lambda b, h, q, k: one(b, h, q, k) | other(b, h, q, k))

    def __invert__(self) -> MaskValue:
        one = self.function
        return MaskValue(lambda b, h, q, k: ~one(b, h, q, k))


def causal() -> MaskValue:
    """A query sees the keys up to its own index."""
    return MaskValue(lambda b, h, q, k: k <= q)


def window(left: int | None, right: int | None = None) -> MaskValue:
    """A query sees ``left`` keys before its own index and ``right`` keys after it; None is no
    limit."""
    if left is None and right is None:
        return MaskValue(lambda b, h, q, k: q == q)
    if right is None:
        return MaskValue(lambda b, h, q, k: q - k <= left)
    if left is None:
        return MaskValue(lambda b, h, q, k: k - q <= right)
    return MaskValue(lambda b, h, q, k: (q - k <= left) & (k - q <= right))


def documents(ids: Any, key_ids: Any = None) -> MaskValue:
    """A query sees the keys of its own document.

    Args:
        ids: (seq,) or (batch, seq) of ints: the document of each query, and of each key unless
            key_ids is given. Documents need not be sorted; sorted ones are quicker.
        key_ids: the same for keys, (seq_k,) or (batch, seq_k).

    Raises ArgumentError for tensors of another rank.
    """
    of_query = _by_row("ids", ids)
    of_key = of_query if key_ids is None else _by_row("key_ids", key_ids)
    return MaskValue(lambda b, h, q, k: of_query(b, q) == of_key(b, k))


def prefix_lm(length: Any) -> MaskValue:
    """A query sees the prefix, and the keys up to its own index.

    Args:
        length: the number of keys in the prefix: an int, or (batch,) of ints.
    """
    if len(getattr(length, "shape", ())) == 1:
        return MaskValue(lambda b, h, q, k: (k < length[b]) | (k <= q))
    return MaskValue(lambda b, h, q, k: (k < length) | (k <= q))


def prefix_tree(starts: Any, ends: Any) -> MaskValue:
    """A query sees the keys on the path from the root of a tree to itself.

    Args:
        starts: (seq,) or (batch, seq) of ints: a number for each token. Tokens are numbered in the
            order of a walk through the tree that visits a token before what follows it.
        ends: the same shape: one more than the largest number of a token that follows this one.

    Raises ArgumentError for tensors of another rank.
    """
    start, end = _by_row("starts", starts), _by_row("ends", ends)
    return MaskValue(lambda b, h, q, k: (start(b, k) <= start(b, q)) & (start(b, q) < end(b, k)))


def chunks(size: int) -> MaskValue:
    """A query sees the keys of its own chunk of ``size`` indices; with ``& causal()`` those up to
    itself."""
    return MaskValue(lambda b, h, q, k: q // size == k // size)


def window_and_global(left: int, right: int, n_global: int) -> MaskValue:
    """A query sees a window as in window(), and the first ``n_global`` keys; the first queries see
    all keys."""
    return MaskValue(
        lambda b, h, q, k: ((q - k <= left) & (k - q <= right)) | (k < n_global) | (q < n_global)
    )


def image_blocks(ids: Any) -> MaskValue:
    """A query sees the keys up to its own index, and all tokens of its own image.

    Args:
        ids: (seq,) or (batch, seq) of ints: the image of each token, negative for text.

    Raises ArgumentError for a tensor of another rank.
    """
    image = _by_row("ids", ids)
    return MaskValue(
        lambda b, h, q, k: (k <= q) | ((image(b, q) == image(b, k)) & (image(b, q) >= 0))
    )


def intervals(bounds: Any) -> MaskValue:
    """A query sees the keys of up to n intervals, each from a first key to before an end.

    Args:
        bounds: (batch or 1, heads or 1, seq_q, 2 n) of ints, (heads or 1, seq_q, 2 n) or
            (seq_q, 2 n): first, end, first, end, ... of each query's intervals; n is at most 4.

    Raises ArgumentError for a tensor of another shape.
    """
    shape = tuple(bounds.shape)
    if not 2 <= len(shape) <= 4 or shape[-1] % 2 or not 2 <= shape[-1] <= 8:
        raise ArgumentError(
            f"bounds: shape {shape}; give (batch or 1, heads or 1, seq_q, 2 n), with n from 1 to 4"
        )
    at = _with_batch_and_head(bounds)
    columns = tuple(Constant(it) for it in range(0, shape[-1], 2))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = None
        for i in columns:
            inside = (k >= at(b, h, q, i)) & (k < at(b, h, q, Constant(i + 1)))
            seen = inside if seen is None else seen | inside
        return seen

    return MaskValue(mask)


def blocks(
    table: Any, block_q: int | None, block_k: int | None = None, *, group: int = 1
) -> MaskValue:
    """A query sees the keys of the blocks that a table shows.

    Args:
        table: bool (batch or 1, heads or 1, query blocks, key blocks), or without leading
            dimensions.
        block_q, block_k: the rows and keys of a block; block_k is block_q unless given. They are
            compiled in. With block_q=None all queries share the table's only row of blocks, such
            as the blocks of keys that a step of decoding selects.
        group: the query heads that share a head of the table, such as those of a K/V head.

    Raises ArgumentError for another shape, or sizes below 1.
    """
    rows = Constant(1 if block_q is None else block_q)
    columns = Constant((block_q or 0) if block_k is None else block_k)
    share = Constant(group)
    shape = tuple(table.shape)
    if min(rows, columns, share) < 1 or not 2 <= len(shape) <= 4:
        raise ArgumentError(
            f"table: shape {shape} with blocks of {block_q} x {block_k} and group={group}; give "
            "(batch or 1, heads or 1, query blocks, key blocks), and sizes of at least 1"
        )
    if block_q is None and shape[-2] != 1:
        raise ArgumentError(
            f"table: shape {shape} with block_q=None; give one row of blocks (..., 1, key blocks), "
            "which all queries share, or the rows of a block"
        )
    at, first = _with_batch_and_head(table), Constant(0)
    row_of = (lambda q: first) if block_q is None else (lambda q: q // rows)
    head_of = (lambda h: h) if group == 1 else (lambda h: h // share)
    return MaskValue(lambda b, h, q, k: at(b, head_of(h), row_of(q), k // columns))


def _by_row(name: str, ids: Any) -> Callable[[Any, Any], Any]:
    """A function of (b, index) that reads ids of rank 1 or 2."""
    shape = tuple(getattr(ids, "shape", ()))
    if len(shape) not in (1, 2):
        raise ArgumentError(
            f"{name}: {quoted(shape)} is its shape; give a tensor (seq,) or (batch, seq) of ints"
        )
    if len(shape) == 1:
        return lambda b, i: ids[i]
    if shape[0] == 1:
        return lambda b, i: ids[Constant(0), i]
    return lambda b, i: ids[b, i]


def _with_batch_and_head(table: Any) -> Callable[..., Any]:
    """A function of (b, h, x, y) that reads a tensor of rank 2 to 4; sizes of 1 are broadcast."""
    return table_function(table)
