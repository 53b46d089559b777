"""Launches attention and cache writes for the layers of an engine, without the checks of a public
call.

Layers of one kind differ only in the addresses of their tensors, and an engine's steps differ only
in their sizes. So the first layer of a kind finds or prepares a step's launches, and the other
layers of this kind only pass addresses. Arguments are checked in full at a kind's first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsmith.chooser.write_slots import write_config, write_request
from flashsmith.families import DeviceSpec, KernelConfig
from flashsmith.operations.cache_scales import SCALES
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors, check_request
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework
from flashsmith.runtime.kernel_choice import check_server
from flashsmith.runtime.request import check_operation
from flashsmith.runtime.resized_calls import ResizableCall

# The number of sizes whose launches are kept; the oldest are dropped first.
MOST_SIZES = 512
_READ = ("q", "k_cache", "v_cache", "cache_lens", "o", "page_table", "sinks", "cu_seqlens_q")
_ATTENTION = (*_READ, *SCALES)
_WRITE = ("k", "v", "k_cache", "v_cache", "slot_mapping", *SCALES)


class Launch(NamedTuple):
    """A launch for tensors of one layout. ``run_at`` takes addresses and returns whether it has
    launched; see CachedCall. ``options`` are the options of the call that was prepared; before a
    launch, the caller compares them with the options of the new call."""

    options: Any
    has_layout: Callable[..., bool]
    run_at: Callable[[tuple[int, ...]], bool]


class LayerLaunches:
    """The launches of attention_with_cache() or write_slots() for the layers of one kind, that is,
    layers with the same head counts, mask and other properties."""

    def __init__(self) -> None:
        self.latest: Launch | None = None
        self._launches: dict[Any, Launch] = {}
        self._checked: dict[Any, ResizableCall] = {}

    def find(
        self,
        options: Any,
        tensors: tuple[Any, ...],
        prepare: Callable[[], CachedCall | None],
    ) -> Launch | None:
        """Returns the launch for these tensors and options, and makes it the latest launch. If
        there is none yet, ``prepare`` makes the call. Returns None for calls that must be checked,
        such as calls on host tensors."""
        key = options, *(tensor.shape for tensor in tensors)
        found = self._launches.get(key)
        if found is None or not found.has_layout(*tensors):
            call = prepare()
            framework = framework_of(type(tensors[0]))
            if call is None or not isinstance(framework, RepeatableFramework):
                return None
            found = Launch(options, framework.layout_check(tensors), call.run_at)
            while len(self._launches) >= MOST_SIZES:
                del self._launches[next(iter(self._launches))]
            self._launches[key] = found
            if not found.has_layout(*tensors):
                return None
        self.latest = found
        return found

    def attention(
        self,
        tensors: DecodeTensors,
        options: DecodeOptions,
        config: KernelConfig,
        device: DeviceSpec,
    ) -> CachedCall | None:
        """Prepares a call to attention_with_cache() over pages, with packed queries. The call takes
        the addresses of q, k_cache, v_cache, cache_lens, out, page_table, sinks if any,
        cu_seqlens_q, and the tensors of scales if any.

        Raises ArgumentError as attention_with_cache() does. Returns None if every call must be
        checked.
        """
        q, table, starts = tensors.q, tensors.page_table, tensors.cu_seqlens_q
        given = [tensor for tensor in tensors if tensor is not None]
        fixed = options._replace(max_seqlen_q=None), q.shape[1:], tensors.k_cache.shape
        key = *fixed, *((tensor.dtype, tensor.stride()) for tensor in given)
        requests, pages = table.shape
        fits = tensors.cache_lens.shape == (requests,) and starts.shape == (requests + 1,)
        checked = self._checked.get(key) if fits and requests and q.shape[0] else None
        if checked is None:
            asked = check_request(tensors, options)
            if asked.first.device.kind != "cuda" or asked.is_empty:
                return None
            check_server(config, asked.problem, device)
            request = check_operation(asked.problem, asked.views, options=asked.options)
            names = [name for name in _ATTENTION if name in asked.views]
            checked = self._checked[key] = ResizableCall(request, device, config, names)
        capacity = pages * tensors.k_cache.shape[1]
        longest = min(options.max_seqlen_q, q.shape[0])
        return checked.resized(
            config,
            {"batch": requests, "seq_q": longest, "seq_k": capacity},
            {"total_q": q.shape[0], "most_pages": pages},
        )

    def write(self, tensors: tuple[Any, ...], device: DeviceSpec) -> CachedCall | None:
        """Prepares a call to write_slots(), as ``attention`` does for attention_with_cache(). The
        call takes the addresses of k, v, k_cache, v_cache, slot_mapping and, if any, the tensors of
        scales, in this order."""
        k, _, k_cache, _, slots, *_ = tensors
        key = k.shape[1:], k_cache.shape, *((tensor.dtype, tensor.stride()) for tensor in tensors)
        checked = self._checked.get(key) if len(slots) else None
        if checked is None:
            request = write_request(*tensors)
            if request is None or request.first.device.kind != "cuda":
                return None
            config = write_config(request.problem)
            checked = self._checked[key] = ResizableCall(
                request, device, config, _WRITE[: len(tensors)]
            )
        return checked.resized(
            checked.config,
            {"seq_q": len(slots)},
            {"new_rows": len(k), "slot_count": len(slots)},
        )
