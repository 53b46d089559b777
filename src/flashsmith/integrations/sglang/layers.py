"""Describes the attention of a layer of SGLang, and finds the kernels that serve the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from flashsmith.families import DeviceSpec
from flashsmith.integrations.layer_kernels import LayerKernels, cache_problem
from flashsmith.semantics.cache_format import D_STEP_OF_8BIT, CacheFormat
from flashsmith.semantics.signature import check_mask

_LARGEST_HEAD, _HEAD_STEP = 512, 8
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention.

    window: how many keys before its own key a query sees; None if it sees all of them.
    """

    heads: int
    d: int
    scale: float
    softcap: float
    causal: bool
    window: int | None
    kernels: LayerKernels

    @classmethod
    def of(
        cls,
        layer: RadixAttention,
        *,
        dtype: Any,
        page: int,
        keys: int,
        split: str,
        bits: str,
        cache: CacheFormat,
        device: DeviceSpec,
    ) -> LayerAttention:
        """Returns the attention of ``layer`` over pages of ``page`` tokens, with room for ``keys``
        keys a request."""
        causal = layer.attn_type == AttentionType.DECODER
        # The engine's window does not count the query's own key, and -1 means no window.
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        softcap = float(layer.logit_cap or 0.0)
        problem = cache_problem(
            heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            d=layer.head_dim,
            dtype=dtype,
            mask=check_mask(causal, _limits(window, causal)),
            softcap=softcap,
            page=page,
            keys=keys,
            bits=bits,
            cache=cache,
        )
        return cls(
            layer.tp_q_head_num,
            layer.head_dim,
            float(layer.scaling),
            softcap,
            causal,
            window,
            LayerKernels(problem, split, device),
        )

    @property
    def window_limits(self) -> Window:
        return _limits(self.window, self.causal)


def _limits(window: int | None, causal: bool) -> Window:
    return (None, None) if window is None else (window, 0 if causal else window)


def unserved_layer(layer: RadixAttention, cache: CacheFormat) -> str:
    """Returns why a layer cannot be served over a cache of this format, or ''."""
    d, number = layer.head_dim, layer.layer_id
    if layer.is_cross_attention:
        return f"cross attention (layer {number}) is not served"
    step = D_STEP_OF_8BIT if cache.is_8bit else _HEAD_STEP
    if not 0 < d <= _LARGEST_HEAD or d % step:
        return (
            f"d {d} (layer {number}) is not served; it must be a multiple of {step} up to "
            f"{_LARGEST_HEAD}"
        )
    if layer.v_head_dim != d:
        return f"values of d {layer.v_head_dim} with keys of d {d} (layer {number}) are not served"
    if layer.xai_temperature_len > 0:
        return f"a temperature by position (layer {number}) is not served"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"logit_capping_method {layer.logit_capping_method} (layer {number}) is not served"
    return ""
