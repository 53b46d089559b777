"""Masks as values: documents, prefixes, trees, chunks, images, intervals, blocks, and combinations.

A value is a mask function (b, h, q_idx, kv_idx) for ``attention(mask=...)`` and ``flex_attention``,
and also for PyTorch's create_block_mask. ``a & b`` shows the keys that both show, ``a | b`` the
keys that at least one shows, and ``~a`` the keys that ``a`` hides. Tensors come from PyTorch, NumPy
or JAX, as those of the call do. They are data: other values, lengths and numbers need no
recompilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.tracing import table_reader
from flashsmith.tracing.captures import Constant, rank_of

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
    """A mask: a function (b, h, q_idx, kv_idx) that returns whether the query sees the key.

    The function gets ``parts`` (its tensors, numbers and other masks) before the indices. They are
    an attribute, so that PyTorch's compiler finds them if compiled code creates the mask.
    """

    def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
        self.function = function
        self.parts = parts

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(*self.parts, b, h, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Any]) -> MaskValue:
        return MaskValue(_both, self, other)

    def __or__(self, other: Callable[..., Any]) -> MaskValue:
        return MaskValue(_either, self, other)

    def __invert__(self) -> MaskValue:
        return MaskValue(_hidden, self)


def _both(one: Any, other: Any, *indices: Any) -> Any:
    return one(*indices) & other(*indices)


def _either(one: Any, other: Any, *indices: Any) -> Any:
    return one(*indices) | other(*indices)


def _hidden(one: Any, *indices: Any) -> Any:
    return ~one(*indices)


def causal() -> MaskValue:
    """A query sees the keys up to its own index."""
    return MaskValue(_causal)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def window(left: int | None, right: int | None = None) -> MaskValue:
    """A query sees ``left`` keys before its own index and ``right`` keys after it; None means no
    limit."""
    if left is None and right is None:
        return MaskValue(_everything)
    if right is None:
        return MaskValue(_not_before, left)
    if left is None:
        return MaskValue(_not_after, right)
    return MaskValue(_within, left, right)


def _everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q == q


def _not_before(left: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k <= left


def _not_after(right: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return k - q <= right


def _within(left: Any, right: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k <= left) & (k - q <= right)


def documents(ids: Any, key_ids: Any = None) -> MaskValue:
    """A query sees the keys of its own document.

    Args:
        ids: (seq,) or (batch, seq) of ints: the document of each query, and of each key unless
            key_ids is given. Ids need not be sorted; sorted ones are quicker.
        key_ids: the same for keys, (seq_k,) or (batch, seq_k).

    Raises ArgumentError for tensors of the wrong rank.
    """
    of_query = _by_row("ids", ids)
    if key_ids is None:
        return MaskValue(_same_document, of_query, ids)
    of_key = _by_row("key_ids", key_ids)
    return MaskValue(_same_document_of_keys, of_query, ids, of_key, key_ids)


def _same_document(of_all: Any, ids: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return of_all(ids, b, q) == of_all(ids, b, k)


def _same_document_of_keys(
    of_query: Any, ids: Any, of_key: Any, key_ids: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    return of_query(ids, b, q) == of_key(key_ids, b, k)


def prefix_lm(length: Any) -> MaskValue:
    """A query sees the prefix, and the keys up to its own index.

    Args:
        length: the number of keys in the prefix: an int, or (batch,) of ints.
    """
    if rank_of(length) == 1:
        return MaskValue(_prefix_of_batch, length)
    return MaskValue(_prefix, length)


def _prefix_of_batch(length: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < length[b]) | (k <= q)


def _prefix(length: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < length) | (k <= q)


def prefix_tree(starts: Any, ends: Any) -> MaskValue:
    """A query sees the keys on the path from the root of a tree to itself.

    Args:
        starts: (seq,) or (batch, seq) of ints: a number for each token. Tokens are numbered in the
            order of a walk through the tree that visits a token before its descendants.
        ends: the same shape: one more than the largest number in the token's subtree.

    Raises ArgumentError for tensors of the wrong rank.
    """
    start, end = _by_row("starts", starts), _by_row("ends", ends)
    return MaskValue(_follows, start, starts, end, ends)


def _follows(start: Any, starts: Any, end: Any, ends: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (start(starts, b, k) <= start(starts, b, q)) & (start(starts, b, q) < end(ends, b, k))


def chunks(size: int) -> MaskValue:
    """A query sees the keys of its own chunk of ``size`` indices. ``& causal()`` hides the later
    ones."""
    return MaskValue(_same_chunk, size)


def _same_chunk(size: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return q // size == k // size


def window_and_global(left: int, right: int, n_global: int) -> MaskValue:
    """A query sees a window as in window(), and the first ``n_global`` keys; the first queries see
    all keys."""
    return MaskValue(_window_or_global, left, right, n_global)


def _window_or_global(left: Any, right: Any, n_global: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k <= left) & (k - q <= right)) | (k < n_global) | (q < n_global)


def image_blocks(ids: Any) -> MaskValue:
    """A query sees the keys up to its own index, and all tokens of its own image.

    Args:
        ids: (seq,) or (batch, seq) of ints: the image of each token, negative for text.

    Raises ArgumentError for a tensor of the wrong rank.
    """
    return MaskValue(_before_or_same_image, _by_row("ids", ids), ids)


def _before_or_same_image(image: Any, ids: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    own = image(ids, b, q)
    return (k <= q) | ((own == image(ids, b, k)) & (own >= 0))


def intervals(bounds: Any) -> MaskValue:
    """A query sees the keys of up to n half-open intervals [first, end).

    Args:
        bounds: (batch or 1, heads or 1, seq_q, 2 n) of ints, (heads or 1, seq_q, 2 n) or
            (seq_q, 2 n): first, end, first, end, ... of each query's intervals; n is at most 4.

    Raises ArgumentError for a tensor of the wrong shape.
    """
    shape = tuple(bounds.shape)
    if not 2 <= len(shape) <= 4 or shape[-1] % 2 or not 2 <= shape[-1] <= 8:
        raise ArgumentError(
            f"bounds: shape {shape}; give (batch or 1, heads or 1, seq_q, 2 n), with n from 1 to 4"
        )
    return MaskValue(_IN_INTERVALS[shape[-1] // 2 - 1], table_reader(shape), bounds)


def _in_interval(i: int) -> Callable[..., Any]:
    first, end = Constant(2 * i), Constant(2 * i + 1)

    def inside(at: Any, bounds: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k >= at(bounds, b, h, q, first)) & (k < at(bounds, b, h, q, end))

    return inside


def _in_intervals(n: int) -> Callable[..., Any]:
    functions = tuple(map(_in_interval, range(n)))

    def inside(*arguments: Any) -> Any:
        seen = functions[0](*arguments)
        for function in functions[1:]:
            seen = seen | function(*arguments)
        return seen

    return inside


_IN_INTERVALS = tuple(map(_in_intervals, range(1, 5)))


def blocks(
    table: Any, block_q: int | None, block_k: int | None = None, *, group: int = 1
) -> MaskValue:
    """A query sees the keys of the blocks that are True in a table.

    Args:
        table: bool (batch or 1, heads or 1, query blocks, key blocks), or without leading
            dimensions.
        block_q, block_k: rows and keys per block; block_k defaults to block_q. Both are compiled
            in. With block_q=None all queries share the table's only row of blocks, such as the
            blocks of keys that a step of decoding selects.
        group: the number of query heads per head of the table, such as those of a KV head.

    Raises ArgumentError for a table of the wrong shape, or sizes below 1.
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
    if block_q is None:
        return MaskValue(_in_block_of_keys, table_reader(shape), table, columns, share)
    return MaskValue(_in_block, table_reader(shape), table, rows, columns, share)


def _in_block(
    at: Any, table: Any, rows: Any, columns: Any, share: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    return at(table, b, h // share, q // rows, k // columns)


def _in_block_of_keys(
    at: Any, table: Any, columns: Any, share: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    return at(table, b, h // share, Constant(0), k // columns)


def _by_row(name: str, ids: Any) -> Callable[..., Any]:
    """Returns a function (ids, b, index) that reads an element of ids, which have rank 1 or 2."""
    shape = tuple(getattr(ids, "shape", ()))
    if len(shape) not in (1, 2):
        raise ArgumentError(
            f"{name}: {quoted(shape)} is its shape; give a tensor (seq,) or (batch, seq) of ints"
        )
    if len(shape) == 1:
        return _of_all
    return _of_the_only if shape[0] == 1 else _of_its_own


def _of_all(ids: Any, b: Any, i: Any) -> Any:
    return ids[i]


def _of_the_only(ids: Any, b: Any, i: Any) -> Any:
    return ids[0, i]


def _of_its_own(ids: Any, b: Any, i: Any) -> Any:
    return ids[b, i]
