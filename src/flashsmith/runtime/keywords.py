"""The keywords of attention() and related functions that do not change the type of the result.

All overloads use these definitions. Only type checkers need this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from flashsmith.families import KernelConfig
from flashsmith.runtime.tensors import Array


class ForwardKeywords(TypedDict, total=False):
    """Keywords of forward()."""

    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    scale: float | None
    sinks: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_k: Array | None
    k_begin: Array | None
    bits: str | None
    emulate: bool


class AttentionKeywords(ForwardKeywords, total=False):
    """Keywords of attention()."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    mask: Any
    bias: Array | None
    positions: str
    out: Array | None
    config: KernelConfig | None
    backward_config: KernelConfig | None
    deterministic: bool | None


class CacheKeywords(TypedDict, total=False):
    """Keywords of attention_with_cache()."""

    v_width: int | None
    page_table: Array | None
    kv_offset: Array | None
    k: Array | None
    v: Array | None
    cos: Array | None
    sin: Array | None
    rotary_interleaved: bool
    cu_seqlens_q: Array | None
    max_seqlen_q: int | None
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    scale: float | None
    sinks: Array | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    mask: Any
    bias: Array | None
    k_scale: float | Array | None
    v_scale: float | Array | None
    split: str
    bits: str | None
    out: Array | None
    config: KernelConfig | None
    emulate: bool


class FlashAttnKeywords(TypedDict, total=False):
    """Keywords of flash_attn_func() that are rarely given by position."""

    softcap: float
    alibi_slopes: Array | None
    deterministic: bool
    s_aux: Array | None
    bits: str | None


class FlashVarlenKeywords(FlashAttnKeywords, total=False):
    """Keywords of flash_attn_varlen_func() that are rarely given by position."""

    block_table: Array | None
    seqused_k: Array | None


class FlashCacheKeywords(TypedDict, total=False):
    """Keywords of flash_attn_with_kvcache() that are rarely given by position."""

    qv: Array | None
    rotary_cos: Array | None
    rotary_sin: Array | None
    cache_seqlens: Array | int | None
    cache_batch_idx: Array | None
    cache_leftpad: Array | None
    page_table: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k_new: Array | None
    max_seqlen_q: int | None
    rotary_seqlens: Array | None
    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    attention_chunk: int
    softcap: float
    rotary_interleaved: bool
    scheduler_metadata: Array | None
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    block_table: Array | None
    alibi_slopes: Array | None
    s_aux: Array | None
    bits: str | None
