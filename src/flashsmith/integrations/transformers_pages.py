"""The paged cache of transformers' continuous batching, read and appended to in place.

Who asks the cache for the keys of a layer depends on the version: in 5.23 the attention function,
which is given the cache; from 5.24 on the model, whose attention function never sees it. So what
the cache's update() returns says where the pages are. To everybody but flashsmith's attention it is
the tensor that transformers would have gathered, and is gathered as soon as anybody looks into it:
models may share keys between layers, or change them on their way to the attention.
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
# Of caches whose pages the kernels read in place.
_PAGE_DTYPES = (torch.float16, torch.bfloat16)


class Pages(NamedTuple):
    """A paged cache that the call's keys and values are appended to: (pages, page, heads_k, d), the
    table (batch, most pages) int32, the lengths (batch,) int32 before, and where the queries of
    each sequence begin, None where each has one."""

    k_cache: Any
    v_cache: Any
    table: Any
    lens: Any
    starts_q: Any


class Unread:
    """A layer's new keys and values, the pages they belong to, and what transformers would make of
    both: ``length`` gathered keys and values."""

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
    """The gathered keys (0) or values (1) of ``unread``, which do not exist before an operation
    needs them."""

    unread: Unread
    index: int

    @staticmethod
    def __new__(cls: Any, unread: Unread, index: int) -> Any:
        new = (unread.key, unread.value)[index]
        _, heads, _, d = new.shape
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (1, heads, unread.length, d),
            strides=(heads * d, d, heads * d, 1),
            dtype=new.dtype,
            device=new.device,
        )

    def __init__(self, unread: Unread, index: int) -> None:
        self.unread, self.index = unread, index

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, gathered, (args, kwargs or {}))
        return function(*args, **kwargs)


def gathered(tensor: Any) -> Any:
    """The tensor as one that exists."""
    return tensor.unread.read[tensor.index] if isinstance(tensor, _UnreadTensor) else tensor


def unread_of(key: Any, value: Any) -> Unread | None:
    """What both tensors are of; None unless they are a layer's keys and values, as update() gave
    them."""
    if not isinstance(key, _UnreadTensor) or not isinstance(value, _UnreadTensor):
        return None
    same = key.unread is value.unread and (key.index, value.index) == (0, 1)
    return key.unread if same else None


def updated(
    module: Any, key: Any, value: Any, cache: Any, lengths: dict[str, Any]
) -> tuple[Any, Any]:
    """What a cache that the attention function was given makes of a layer's new keys and values.
    Sets this layer's offsets and longest length in ``lengths``."""
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
    """transformers gathers the keys of models on flashsmith only where it has to."""
    update = getattr(PagedAttentionCache, "update", None)
    if update is None or getattr(update, "leaves_unread_for", None) == NAME:
        return  # before transformers 5.23, or done
    if "kwargs" not in inspect.signature(update).parameters:
        return

    # As transformers' own: it and the tensors that it gives are nothing for a compiler to trace.
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
        # A copy, as update() puts the layer's own lengths into it.
        gather = functools.partial(gather, kwargs=dict(kwargs))
        allocator = self.layer_to_allocator[layer_idx]
        rows = key_states[0, 0] if pages.starts_q is None else kwargs["read_index"][allocator.index]
        for name in ("cu_seq_lens_k", "max_length_k"):
            kwargs[name] = of_kind(allocator, kwargs[name])
        return Unread(key_states, value_states, pages, rows.shape[0], gather).tensors()

    update_or_leave.leaves_unread_for = NAME
    PagedAttentionCache.update = update_or_leave


def of_kind(layer: Any, lengths: Any) -> Any:
    """Of lengths by the kind of layer those of the layer's kind. update() picks them, which a layer
    that has the keys of another does not call."""
    return lengths[layer.layer_type] if isinstance(lengths, dict) else lengths


def _pages_of(cache: Any, key: Any, layer_idx: int, lengths: dict[str, Any]) -> Pages | None:
    """A layer's pages where the kernels can read them in place. None where its keys have to be
    gathered: those of windows, which transformers keeps in a ring, of other dtypes than the
    kernels', and where there are new keys only."""
    allocator = cache.layer_to_allocator[layer_idx]
    if not allocator.supports_block_table:
        return None
    k_cache, v_cache = allocator.get_cache_for_block_table(layer_idx)
    # Of every block's pages the layer has one. transformers' views begin with it, and have all.
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
        # Of sequences that only fill up the batch it is -1: nothing is appended.
        lens = starts.diff().to(torch.int32) - 1
        table = tables[allocator.index].div(stride // page, rounding_mode="floor")
        return Pages(k_cache, v_cache, table, lens, None)
    rows, starts_q = lengths["read_index"][allocator.index], lengths.get("cu_seq_lens_q")
    if k_cache.dtype not in _PAGE_DTYPES or k_cache.dtype != key.dtype:
        return None
    if starts_q is None or not rows.numel():
        return None
    # transformers says where each key is; the first of each page says where the page is.
    longest = int(of_kind(allocator, lengths["max_length_k"]))
    firsts = starts[:-1, None] + torch.arange(0, longest, page, device=rows.device)
    table = rows[firsts.clamp(max=rows.shape[0] - 1)].div(stride, rounding_mode="floor")
    lens = starts.diff() - starts_q.diff()
    return Pages(k_cache, v_cache, table.to(torch.int32), lens.to(torch.int32), starts_q)


def offer_block_tables() -> None:
    """transformers' continuous batching gives tables of pages, for steps of one token a sequence,
    to FlashAttention alone."""
    ensure = getattr(initialization, "ensure_decode_fast_path_is_available", None)
    if ensure is None or getattr(ensure, "offered_to", None) == NAME:
        return  # before transformers 5.23, or done
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
