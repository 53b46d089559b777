"""Resolves kv_cache_dtype, an engine's name for the element type of its caches."""

from __future__ import annotations

from typing import Any

import torch

from flashsmith.semantics.cache_format import CacheFormat

_SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SERVED_CACHES = ["auto", *_SIXTEEN_BITS, *_EIGHT_BITS]
# Kernels copy rows of 8-bit floats in units of 16 bytes.
_HEAD_STEP = 16


def unserved_cache(head_size: int, dtype: Any, kv_cache_dtype: str | None) -> str | None:
    """Returns why no kernel serves queries of ``dtype`` over a cache of this head size and element
    type; None if one does."""
    name = kv_cache_dtype or "auto"
    if name in _EIGHT_BITS:
        if head_size % _HEAD_STEP:
            return (
                f"kv_cache_dtype {name} with head_size {head_size} not supported: it must be a "
                f"multiple of {_HEAD_STEP}"
            )
        return None
    if _SIXTEEN_BITS.get(name, dtype) != dtype:
        return f"kv_cache_dtype {name} with queries of {dtype} not supported"
    return None


def format_of(kv_cache_dtype: str) -> CacheFormat:
    """Returns the CacheFormat of a cache of this element type."""
    eight_bits = _EIGHT_BITS.get(kv_cache_dtype)
    return CacheFormat.of_dtype(str(eight_bits).removeprefix("torch."))


def in_own_dtype(kv_cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Returns the cache as a tensor of its real dtype; the engine stores 8-bit floats as bytes."""
    eight_bits = _EIGHT_BITS.get(kv_cache_dtype)
    return kv_cache if eight_bits is None else kv_cache.view(eight_bits)
