"""Converts the page tables of other libraries to the form that attention_with_cache() takes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.runtime.frameworks import framework_of


class PagedLengths(NamedTuple):
    """``page_table`` is (batch, most_pages) int32, with -1 in unused entries; ``lens`` is (batch,)
    int32."""

    page_table: Any
    lens: Any


def from_flashinfer(
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    page_size: int,
    most_pages: int | None = None,
) -> PagedLengths:
    """Converts FlashInfer's page lists to a page table and the lengths of the sequences.

    FlashInfer appends before it computes attention, so its lengths include the appended keys. For a
    cache of layout NHD, (pages, 2, page, heads, d), k_cache is ``cache[:, 0]`` and v_cache is
    ``cache[:, 1]``. For HND, (pages, 2, heads, page, d), use ``cache[:, 0].transpose(1, 2)`` and
    ``cache[:, 1].transpose(1, 2)``.

    Args:
        indptr: (batch + 1,) int32: where the pages of each sequence begin in indices.
        indices: (pages in use,) int32: page numbers.
        last_page_len: (batch,) int32: number of keys in each sequence's last page, from 1 to
            page_size.
        page_size: keys per page.
        most_pages: columns of the table, at least the largest page count of a sequence. None reads
            that count from indptr, which synchronizes with a GPU; during graph capture, pass a
            number.

    Raises:
        ArgumentError: an argument is neither a tensor nor an array.
    """
    xp = _namespace("indptr", indptr)
    begins, counts = indptr[:-1], indptr[1:] - indptr[:-1]
    batch = counts.shape[0]
    if most_pages is None:
        most_pages = int(counts.max()) if batch else 0
    steps = _arange(xp, most_pages, indptr)
    used = steps[None, :] < counts[:, None]
    if indices.shape[0]:
        places = (begins[:, None] + steps[None, :]).clip(0, indices.shape[0] - 1)
        table = xp.where(used, indices[places], full_int32((1, 1), -1, indptr))
    else:
        table = full_int32((batch, most_pages), -1, indptr)
    lens = xp.where(counts > 0, (counts - 1) * page_size + last_page_len, 0 * counts)
    return PagedLengths(_int32(table), _int32(lens))


def _namespace(name: str, array: Any) -> Any:
    framework = framework_of(type(array))
    if framework is None:
        raise ArgumentError(
            f"{name}: got {type(array).__name__}; give a PyTorch tensor, or a NumPy, CuPy or JAX "
            "array"
        )
    return sys.modules["jax.numpy" if framework.name == "jax" else framework.name]


def _arange(xp: Any, count: int, like: Any) -> Any:
    where = {"device": like.device} if xp.__name__ == "torch" else {}
    return xp.arange(count, **where)


def full_int32(shape: tuple[int, ...], value: int, like: Any) -> Any:
    """Returns a tensor filled with ``value``, of the framework of ``like`` and on its device."""
    xp = _namespace("q", like)
    where = {"device": like.device} if xp.__name__ == "torch" else {}
    return xp.full(shape, value, dtype=xp.int32, **where)


def _int32(array: Any) -> Any:
    return array.int() if hasattr(array, "int") else array.astype("int32")
