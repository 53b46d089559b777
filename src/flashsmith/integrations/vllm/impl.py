"""FlashsmithImpl computes one layer's attention, and writes new keys and values to the layer's
cache."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import flashsmith
from flashsmith.families import DeviceSpec, KernelConfig
from flashsmith.integrations.layer_kernels import (
    LayerKernels,
    cache_problem,
    device_of,
    direct_problem,
    unserved_head,
)
from flashsmith.integrations.layer_launches import Launch, LayerLaunches
from flashsmith.integrations.vllm.cache_dtypes import format_of, in_own_dtype
from flashsmith.integrations.vllm.context_parallel import attend_across_ranks
from flashsmith.integrations.vllm.metadata import StepMetadata
from flashsmith.integrations.vllm.releases import dcp_combine
from flashsmith.operations import DEFAULT
from flashsmith.operations.cache_scales import SCALES
from flashsmith.operations.decode import FREE, INVARIANT
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors
from flashsmith.semantics.signature import check_mask

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# Attention to the keys of an encoder, which are in a cache of their own.
CROSS = AttentionType.ENCODER_DECODER
SERVED_TYPES = (AttentionType.DECODER, CROSS, *ENCODERS)
Window = tuple[int | None, int | None]


def unserved_over_ranks(has_window: bool, attn_type: str) -> str:
    """Returns why a layer cannot be served over a cache that is distributed over ranks, or ''."""
    # A rank holds a different number of a window's keys for each query, even within one request.
    subjects = {"a window": has_window, "cross attention": attn_type == CROSS}
    found = " and ".join(name for name, is_true in subjects.items() if is_true)
    return f"{found} over a cache that is distributed over ranks is not served" if found else ""


class FlashsmithImpl(AttentionImpl[StepMetadata]):
    """The attention of one layer. With VLLM_BATCH_INVARIANT=1 the bits are canonical
    (docs/bits.md).

    Raises NotImplementedError for features that the backend's declarations cannot exclude, such as
    ALiBi.
    """

    # Decode context parallelism requires the LSE, in base e.
    can_return_lse_for_decode = True
    # Queries have 16 bits even if the cache has 8-bit floats.
    supports_quant_query_input = False
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("flashsmith: ALiBi is not served; choose another backend")
        if attn_type not in SERVED_TYPES:
            raise NotImplementedError(
                f"flashsmith: attention of type {attn_type} is not served; choose another backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.cache_format = format_of(kv_cache_dtype)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = float(logits_soft_cap or 0.0)
        # The engine's window of w tokens includes the query's own token.
        self.window = None if sliding_window is None else sliding_window - 1
        self.sinks = sinks
        canonical = bool(vllm.envs.VLLM_BATCH_INVARIANT)
        self.split, self.bits = (INVARIANT, "canonical") if canonical else (FREE, "free")
        self._sinks_fp32: torch.Tensor | None = None
        self.combine = dcp_combine()
        self._kernels: dict[tuple[bool, int], LayerKernels] = {}
        self._direct: dict[bool, LayerKernels] = {}
        self.attention, self.writes = LayerLaunches(), LayerLaunches()

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties of a layer that select a launch. Layers of the same ``kind`` can share
        launches for tensors of the same layouts."""
        return (
            *(self.num_heads, self.num_kv_heads, self.head_size, self.scale, self.softcap),
            *(self.window, self.sinks is not None, self.split, self.bits, self.attn_type),
            self.cache_format,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is None:
            return
        if self._sinks_fp32 is None:
            self._sinks_fp32 = self.sinks.detach().float()
        else:  # weights were loaded again; graphs read this tensor
            self._sinks_fp32.copy_(self.sinks)

    # --- the cache -------------------------------------------------------------------------------

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views (blocks, tokens of a block, heads, d) of K and V in the engine's cache
        (blocks, heads, tokens of a block, K and V), in any memory order."""
        both = in_own_dtype(kv_cache, self.kv_cache_dtype).transpose(1, 2)
        halves: tuple[torch.Tensor, ...] = both.split(self.head_size, dim=-1)
        return halves

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the step's keys and values into their slots."""
        if self.attn_type in ENCODERS:
            return
        scales = (layer._k_scale, layer._v_scale) if self.cache_format else ()
        tensors = key, value, kv_cache, slot_mapping, *scales
        launch = self.writes.latest
        if launch is None or not launch.has_layout(*tensors):
            launch = self._find_write(*tensors)
        k_at = kv_cache.data_ptr()
        v_at = k_at + self.head_size * kv_cache.element_size()
        at = key.data_ptr(), value.data_ptr(), k_at, v_at, slot_mapping.data_ptr()
        if launch is None or not launch.run_at((*at, *(scale.data_ptr() for scale in scales))):
            k_cache, v_cache = self.caches(kv_cache)
            named = dict(zip(SCALES, scales, strict=False))
            flashsmith.write_slots(key, value, k_cache, v_cache, slot_mapping, **named)

    # --- attention -------------------------------------------------------------------------------

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention for a step's queries (tokens, heads, d), and writes the result to
        ``output``.

        Raises NotImplementedError for fused quantisation of the output and for causality that
        differs between requests; the engine uses neither with this backend.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "flashsmith: the output is not quantised; disable that fusion"
            )
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        step, launch = attn_metadata, self.attention.latest
        scales = (layer._k_scale, layer._v_scale) if self.cache_format else ()
        layout = query, output, kv_cache, step.seq_lens, step.block_table, step.query_start_loc
        layout += scales
        if launch is None or launch.options != step.sizes or not launch.has_layout(*layout):
            launch = self._find_attention(layout, step)
        if launch is None or not self._launch(launch, layout):
            self._attend(query, key, value, kv_cache, step, output, scales)
        return output

    def _launch(self, launch: Launch, layout: tuple[torch.Tensor, ...]) -> bool:
        query, output, kv_cache, lens, table, starts, *scales = layout
        k_at = kv_cache.data_ptr()
        v_at = k_at + self.head_size * kv_cache.element_size()
        at = query.data_ptr(), k_at, v_at, lens.data_ptr(), output.data_ptr(), table.data_ptr()
        rest = (starts.data_ptr(), *(scale.data_ptr() for scale in scales))
        if self.sinks is None or (sinks := self._sinks()) is None:
            return launch.run_at((*at, *rest))
        return launch.run_at((*at, sinks.data_ptr(), *rest))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata,
        output: torch.Tensor,
        scales: tuple[torch.Tensor, ...],
    ) -> None:
        """Computes a step by calls to public functions, which check their arguments."""
        rows = attn_metadata.num_actual_tokens
        query, output_rows = query[:rows], output[:rows]
        if self.attn_type in ENCODERS:
            self.attend_directly(query, key[:rows], value[:rows], output_rows, attn_metadata)
            return
        if attn_metadata.is_distributed:
            own = query, key[:rows], value[:rows]
            caches = self.caches(kv_cache)
            attend_across_ranks(self, *own, caches, scales, output_rows, attn_metadata)
            return
        tensors, options = self._call(query, output_rows, kv_cache, attn_metadata, scales)
        config = self._config(query, tensors.k_cache, attn_metadata)
        asked = {**tensors._asdict(), **options._asdict(), "config": config}
        given = {name: it for name, it in asked.items() if it is not None}
        flashsmith.attention_with_cache(**given)

    def _call(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        step: StepMetadata,
        scales: tuple[torch.Tensor, ...],
    ) -> tuple[DecodeTensors, DecodeOptions]:
        """Returns the tensors and options for a step's call to ``attention_with_cache``."""
        if not isinstance(step.causal, bool):
            raise NotImplementedError("flashsmith: causality by request is not served")
        k_cache, v_cache = self.caches(kv_cache)
        tensors = DecodeTensors(
            *(query, k_cache, v_cache, step.seq_lens, output, step.block_table),
            sinks=self._sinks(),
            cu_seqlens_q=step.query_start_loc,
            **dict(zip(SCALES, scales, strict=False)),
        )
        options = DecodeOptions(
            *(step.causal, self._window(step.causal), self.softcap, self.scale),
            max_seqlen_q=step.max_query_len,
            split=self.split,
            bits=self.bits,
        )
        return tensors, options

    def _config(
        self, query: torch.Tensor, k_cache: torch.Tensor, step: StepMetadata
    ) -> KernelConfig:
        kernels = self.cache_kernels(query, k_cache, step, bool(step.causal))
        return kernels.config_for(step.seq_lens.shape[0], step.max_query_len)

    def _find_attention(
        self, layout: tuple[torch.Tensor, ...], step: StepMetadata
    ) -> Launch | None:
        """Returns the step's launch, or None if the calls of the step must be checked."""
        if self.attn_type in ENCODERS or step.is_distributed:
            return None
        query, output, kv_cache, *_ = layout
        scales = layout[6:]
        rows = step.num_actual_tokens

        def prepare() -> CachedCall | None:
            tensors, options = self._call(query[:rows], output[:rows], kv_cache, step, scales)
            config = self._config(query, tensors.k_cache, step)
            return self.attention.attention(tensors, options, config, self._device(query))

        return self.attention.find(step.sizes, layout, prepare)

    def _find_write(self, *tensors: torch.Tensor) -> Launch | None:
        key, value, kv_cache, slots, *scales = tensors

        def prepare() -> CachedCall | None:
            written = key, value, *self.caches(kv_cache), slots, *scales
            return self.writes.write(written, self._device(key))

        return self.writes.find(None, tensors, prepare)

    def attend_directly(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor | None,
        step: StepMetadata,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Computes attention to the step's own keys, for an encoder, or for a decoder, which merges
        the result with the attention to earlier keys. Returns the result of
        ``flashsmith.attention``."""
        causal = self.attn_type not in ENCODERS and bool(step.causal)
        starts, longest = step.query_start_loc, step.max_query_len
        kernels = self._direct.get(causal) or self.direct_kernels(query.dtype, query.device, causal)
        return flashsmith.attention(
            query,
            key,
            value,
            causal=causal,
            window=self._window(causal),
            softcap=self.softcap,
            scale=self.scale,
            sinks=self._sinks(),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            bits=self.bits,
            out=output,
            return_lse=return_lse,
            config=kernels.config_for(starts.shape[0] - 1, longest),
        )

    def _window(self, causal: bool) -> Window:
        return (None, None) if self.window is None else (self.window, 0 if causal else self.window)

    def _sinks(self) -> torch.Tensor | None:
        if self.sinks is not None and self._sinks_fp32 is None:
            self.process_weights_after_loading(self.sinks.dtype)
        return self._sinks_fp32

    # --- kernels ---------------------------------------------------------------------------------

    @staticmethod
    def _device(tensor: torch.Tensor) -> DeviceSpec:
        return device_of(tensor.device.type, tensor.device.index or 0)

    def kernels(
        self,
        page: int,
        dtype: torch.dtype,
        keys: int,
        device: torch.device,
        causal: bool,
        ranks: int = 1,
    ) -> list[LayerKernels]:
        """Returns the layer's kernels for steps over pages of this size, with room for ``keys``
        keys.

        Raises NotImplementedError for an encoder if no kernel on this GPU serves its d. For a cache
        that is distributed over ``ranks``, it is also raised if the layer has a window or is cross
        attention, or if a kernel for the layer's d is missing.
        """
        if self.attn_type in ENCODERS:
            self._check_direct(device, "choose another backend")
            return [self.direct_kernels(dtype, device, False)]
        causal = causal and self.attn_type != CROSS
        if ranks == 1:
            return [self._over_cache(page, dtype, keys, device, causal)]
        advice = "set decode_context_parallel_size to 1"
        has_window = self.window is not None
        if reason := unserved_over_ranks(has_window, self.attn_type):
            raise NotImplementedError(f"flashsmith: {reason}; {advice}")
        self._check_direct(device, advice)
        return [
            self._over_cache(page, dtype, -(-keys // (page * ranks)) * page, device, False, ranks),
            self.direct_kernels(dtype, device, causal),
        ]

    def _check_direct(self, device: torch.device, advice: str) -> None:
        """Raises NotImplementedError if, on this GPU, no kernel for attention to a step's own keys
        serves the layer's d."""
        gpu, canonical = device_of(device.type, device.index or 0), self.bits != "free"
        reason = unserved_head(self.head_size, gpu, canonical=canonical, operation=DEFAULT)
        if reason:
            raise NotImplementedError(f"flashsmith: {reason}; {advice}")

    def direct_kernels(
        self, dtype: torch.dtype, device: torch.device, causal: bool
    ) -> LayerKernels:
        """Returns the kernels of attention to a step's own keys."""
        problem = direct_problem(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            d=self.head_size,
            dtype=dtype,
            mask=check_mask(causal, self._window(causal)),
            softcap=self.softcap,
            bits=self.bits,
        )
        found = LayerKernels(problem, self.split, device_of(device.type, device.index or 0))
        self._direct[causal] = found
        return found

    def cache_kernels(
        self, query: torch.Tensor, k_cache: torch.Tensor, step: StepMetadata, causal: bool
    ) -> LayerKernels:
        """Returns the kernels of attention to a cache, for the query heads of this rank or of all
        ranks."""
        ranks = query.shape[1] // self.num_heads
        found = self._kernels.get((causal, ranks))
        if found is not None:
            return found
        page = k_cache.shape[1]
        keys = page * step.block_table.shape[1]
        return self._over_cache(page, query.dtype, keys, query.device, causal, ranks)

    def _over_cache(
        self,
        page: int,
        dtype: torch.dtype,
        keys: int,
        device: torch.device,
        causal: bool,
        ranks: int = 1,
    ) -> LayerKernels:
        problem = cache_problem(
            heads=self.num_heads * ranks,
            kv_heads=self.num_kv_heads,
            d=self.head_size,
            dtype=dtype,
            mask=check_mask(causal, self._window(causal)),
            softcap=self.softcap,
            page=page,
            keys=keys,
            bits=self.bits,
            cache=self.cache_format,
        )
        found = LayerKernels(problem, self.split, device_of(device.type, device.index or 0))
        self._kernels[causal, ranks] = found
        return found
