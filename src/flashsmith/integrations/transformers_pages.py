"""Reads the paged cache of transformers' continuous batching, and appends to it, in place.

The code that calls the cache's update() depends on the version of transformers. In transformers
5.23 it is the attention function, which gets the cache as an argument. From 5.24 on it is the
model, and the attention function never gets the cache. Therefore, the tensors that update() returns
also record where the pages are. To all other code these tensors look like gathered keys and values:
the first operation on such a tensor gathers them. Models need this, because a model may share keys
between layers, or change keys before it calls the attention function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from flashsmith.errors import ArgumentError
from flashsmith.integrations.transformers_bits import refuse_rolling

try:
    from transformers.generation.continuous_batching import initialization
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
except ImportError:  # before transformers 5.23
    initialization = PagedAttentionCache = None

NAME = "flashsmith"
CALLER = 'attn_implementation="flashsmith"'
# Dtypes of caches whose pages the kernels read in place.
_PAGE_DTYPES = (torch.float16, torch.bfloat16)


class Pages(NamedTuple):
    """A paged KV cache to which a call appends its keys and values.

    k_cache, v_cache: (pages, page, heads_k, d).
    table: (batch, maximum pages) int32.
    lens: (batch,) int32, the lengths before the append.
    starts_q: where each sequence's queries begin; None if each sequence has one query.
    """

    k_cache: Any
    v_cache: Any
    table: Any
    lens: Any
    starts_q: Any


class PendingAppend:
    """A layer's new keys and values, and the pages to which they are to be appended.

    ``read`` gathers the keys and values that transformers would return; ``length`` is the number of
    keys.
    """

    def __init__(
        self, key: Any, value: Any, pages: Pages, length: int, gather: Callable[[], tuple[Any, Any]]
    ) -> None:
        self.key, self.value, self.pages = key, value, pages
        self.length, self._gather = length, gather

    @functools.cached_property
    def read(self) -> tuple[Any, Any]:
        return self._gather()

    def tensors(self) -> tuple[Any, Any]:
        return _UnreadTensor(self, 0), _UnreadTensor(self, 1)


class _UnreadTensor(torch.Tensor):
    """The gathered keys (index 0) or values (1) of ``unread``; the first operation gathers them."""

    unread: PendingAppend
    index: int

    @staticmethod
    def __new__(cls: Any, unread: PendingAppend, index: int) -> Any:
        new = (unread.key, unread.value)[index]
        _, heads, _, d = new.shape
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (1, heads, unread.length, d),
            strides=(heads * d, d, heads * d, 1),
            dtype=new.dtype,
            device=new.device,
        )

    def __init__(self, unread: PendingAppend, index: int) -> None:
        self.unread, self.index = unread, index

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, gathered, (args, kwargs or {}))
        return function(*args, **kwargs)


def gathered(tensor: Any) -> Any:
    """Returns the gathered tensor of an _UnreadTensor; other tensors unchanged."""
    return tensor.unread.read[tensor.index] if isinstance(tensor, _UnreadTensor) else tensor


def unread_of(key: Any, value: Any) -> PendingAppend | None:
    """Returns the PendingAppend of a layer's keys and values; None unless update() returned both
    unchanged."""
    if not isinstance(key, _UnreadTensor) or not isinstance(value, _UnreadTensor):
        return None
    same = key.unread is value.unread and (key.index, value.index) == (0, 1)
    return key.unread if same else None


def updated(
    module: Any, key: Any, value: Any, cache: Any, lengths: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls update() of the cache that was passed to the attention function, and returns the
    result.

    update() writes the layer's offsets and longest length into ``lengths``.
    """
    if "kwargs" not in inspect.signature(cache.update).parameters:
        raise ArgumentError(
            f"cache: {CALLER} serves continuous batching of transformers 5.23 and later, whose "
            "cache passes on lengths by layer; update transformers, or use "
            'attn_implementation="sdpa"'
        )
    found: tuple[Any, Any] = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=lengths
    )
    return found


def leave_pages_unread() -> None:
    """Patches transformers so that, for models that use flashsmith, keys are gathered only if this
    is necessary."""
    update = getattr(PagedAttentionCache, "update", None)
    if update is None or getattr(update, "leaves_unread_for", None) == NAME:
        return  # before transformers 5.23, or already patched
    if "kwargs" not in inspect.signature(update).parameters:
        return

    # transformers disables the compiler for update(), too. A compiler cannot trace this function or
    # the tensors that it returns.
    @torch.compiler.disable
    def update_or_leave(
        self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        gather = functools.partial(update, self, key_states, value_states, layer_idx)
        ours = getattr(self.config, "_attn_implementation", None) == NAME
        pages = _pages_of(self, key_states, layer_idx, kwargs) if ours else None
        if pages is None:
            if ours and not self.layer_to_allocator[layer_idx].supports_block_table:
                refuse_rolling("cache", "keys of layers with a window are kept in a ring")
            return gather(kwargs=kwargs)
        # The dict is copied, because update() writes the layer's lengths into it.
        gather = functools.partial(gather, kwargs=dict(kwargs))
        allocator = self.layer_to_allocator[layer_idx]
        rows = key_states[0, 0] if pages.starts_q is None else kwargs["read_index"][allocator.index]
        for name in ("cu_seq_lens_k", "max_length_k"):
            kwargs[name] = of_kind(allocator, kwargs[name])
        return PendingAppend(key_states, value_states, pages, rows.shape[0], gather).tensors()

    update_or_leave.leaves_unread_for = NAME
    PagedAttentionCache.update = update_or_leave


def of_kind(layer: Any, lengths: Any) -> Any:
    """Returns the lengths for the layer's type; ``lengths`` unchanged if it is not a dict by layer
    type.

    update() also selects them, but a layer that shares another layer's keys does not call update().
    """
    return lengths[layer.layer_type] if isinstance(lengths, dict) else lengths


def _pages_of(cache: Any, key: Any, layer_idx: int, lengths: dict[str, Any]) -> Pages | None:
    """Returns a layer's pages if the kernels can read them in place; None if its keys must be
    gathered.

    Keys must be gathered in layers with a window (whose keys transformers keeps in a ring buffer),
    for dtypes that the kernels do not support, and if all keys are new.
    """
    allocator = cache.layer_to_allocator[layer_idx]
    if not allocator.supports_block_table:
        return None
    k_cache, v_cache = allocator.get_cache_for_block_table(layer_idx)
    # The layer has one page in each block. transformers' views start at this layer's first page but
    # contain the pages of all layers, so every (stride // page)-th page belongs to the layer.
    page, stride = k_cache.shape[1], allocator.block_physical_stride
    k_cache, v_cache = (pages[:: stride // page] for pages in (k_cache, v_cache))
    starts = of_kind(allocator, lengths["cu_seq_lens_k"])
    if (tables := lengths.get("block_table")) is not None:
        if k_cache.dtype not in _PAGE_DTYPES:
            raise ArgumentError(
                f"cache: dtype {k_cache.dtype}; {CALLER} reads pages of float16 and bfloat16: "
                "load the model in one of them, or set max_blocks_per_request=0 in the "
                "ContinuousBatchingConfig"
            )
        # Sequences that only pad the batch get the length -1, so that nothing is appended to them.
        lens = starts.diff().to(torch.int32) - 1
        table = tables[allocator.index].div(stride // page, rounding_mode="floor")
        return Pages(k_cache, v_cache, table, lens, None)
    rows, starts_q = lengths["read_index"][allocator.index], lengths.get("cu_seq_lens_q")
    if k_cache.dtype not in _PAGE_DTYPES or k_cache.dtype != key.dtype:
        return None
    if starts_q is None or not rows.numel():
        return None
    # transformers gives the location of each key; the location of a page's first key locates the
    # page.
    longest = int(of_kind(allocator, lengths["max_length_k"]))
    firsts = starts[:-1, None] + torch.arange(0, longest, page, device=rows.device)
    table = rows[firsts.clamp(max=rows.shape[0] - 1)].div(stride, rounding_mode="floor")
    lens = starts.diff() - starts_q.diff()
    return Pages(k_cache, v_cache, table.to(torch.int32), lens.to(torch.int32), starts_q)


def offer_block_tables() -> None:
    """Patches transformers' continuous batching so that flashsmith gets page tables.

    In steps with one token per sequence, transformers passes page tables, but only to
    FlashAttention.
    """
    ensure = getattr(initialization, "ensure_decode_fast_path_is_available", None)
    if ensure is None or getattr(ensure, "offered_to", None) == NAME:
        return  # before transformers 5.23, or already patched
    by_type = getattr(initialization, "ATTN_TYPE_TO_ALLOCATOR", None)
    group_layers = getattr(initialization, "group_layers_by_attn_type", None)
    if by_type is None or group_layers is None:
        return

    def ensure_for_others(config: Any, cb_config: Any, *args: Any, **keywords: Any) -> None:
        ours = getattr(config, "_attn_implementation", None) == NAME
        types = group_layers(config) if ours else ()
        readable = getattr(config, "dtype", None) in _PAGE_DTYPES
        if not ours or not readable or not all(by_type[it].supports_block_table for it in types):
            ensure(config, cb_config, *args, **keywords)

    ensure_for_others.offered_to = NAME  # type: ignore[attr-defined]
    initialization.ensure_decode_fast_path_is_available = ensure_for_others
