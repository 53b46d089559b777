"""Public calls for a type checker: what it accepts, and what it refuses. Nothing here is run.

An ignore that is not needed is an error, so each line of refused() has to be one.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import flashsmith

if TYPE_CHECKING:
    from typing_extensions import assert_type


def accepted(tensor: torch.Tensor, weights: torch.nn.Parameter, array: np.ndarray) -> None:
    flashsmith.attention(tensor, tensor, weights, sinks=tensor, out=tensor, window=(3, None))
    flashsmith.attention(array, array, array, causal=True, cu_seqlens_q=array, cu_seqlens_k=array)
    config = flashsmith.choose("b1 s64 h1 d64 fp16").config
    flashsmith.attention(tensor, tensor, tensor, config=config)
    flashsmith.forward(config, array, array, array, array)
    flashsmith.flash_attn_func(tensor, tensor, tensor, window_size=(-1, 0))
    flashsmith.flash_attn_varlen_func(tensor, tensor, tensor, tensor, tensor, 3, 3)
    flashsmith.sdpa(tensor, tensor, tensor, tensor)


def results(a: np.ndarray, config: flashsmith.FlashForwardKernelConfig, known: bool) -> None:
    """Like the first tensor, as many as were asked for."""
    assert_type(flashsmith.attention(a, a, a), np.ndarray)
    assert_type(flashsmith.attention(a, a, a, return_lse=True), tuple[np.ndarray, np.ndarray])
    assert_type(flashsmith.attention(a, a, a, partial=True), tuple[np.ndarray, np.ndarray])
    three = flashsmith.attention(a, a, a, return_lse=True, return_row_max=True)
    assert_type(three, tuple[np.ndarray, np.ndarray, np.ndarray])
    assert_type(flashsmith.attention(a, a, a, return_lse=known), Any)
    assert_type(flashsmith.forward(config, a, a, a, causal=True), np.ndarray)
    assert_type(flashsmith.forward(config, a, a, a, return_row_max=True)[1], np.ndarray)
    assert_type(flashsmith.attention_with_cache(a, a, a, cache_lens=a), np.ndarray)
    decoded = flashsmith.attention_with_cache(a, a, a, cache_lens=a, return_lse=True)
    assert_type(decoded, tuple[np.ndarray, np.ndarray])
    merged = flashsmith.merge_attention([a, a], [a, a], dtype=np.float16)
    assert_type(merged, tuple[np.ndarray, np.ndarray])
    flashsmith.merge_attention([a], [a], dtype=np.dtype("float32"))
    flashsmith.merge_attention([a], [a], dtype=flashsmith.DType.BF16)
    flashsmith.backward(a, a, a, a, a, a, grad_dtype=np.float32)
    assert_type(flashsmith.flash_attn_func(a, a, a, 0.0, None, True), np.ndarray)
    assert_type(flashsmith.flash_attn_varlen_func(a, a, a, a, a, 3, 3), np.ndarray)
    assert_type(flashsmith.flash_attn_func(a, a, a, return_attn_probs=True)[1], np.ndarray)
    assert_type(flashsmith.flash_attn_with_kvcache(a, a, a, cache_seqlens=3), np.ndarray)
    assert_type(flashsmith.choose("b1 s64 h1 d64 fp16").config.d_head, int)


def refused(a: np.ndarray, config: Any) -> None:
    flashsmith.attention(1, a, a)  # type: ignore[call-overload]
    flashsmith.attention(a, "x", a)  # type: ignore[call-overload]
    flashsmith.attention(a, a, None)  # type: ignore[call-overload]
    flashsmith.attention(a, a, [[1.0]])  # type: ignore[call-overload]
    flashsmith.attention(a, a, a, sinks=1.0)  # type: ignore[call-overload]
    flashsmith.attention(a, a, a, cu_seqlens_q=[0, 3])  # type: ignore[call-overload]
    flashsmith.attention(a, a, a, out="o")  # type: ignore[call-overload]
    flashsmith.attention(a, a, a, casual=True)  # type: ignore[call-overload]
    flashsmith.attention(a, a, a, config="tune")  # type: ignore[call-overload]
    flashsmith.forward("x", a, a, a)  # type: ignore[call-overload]
    flashsmith.forward(config, a, a, 3)  # type: ignore[call-overload]
    flashsmith.forward_timed(config, a, a, 3)  # type: ignore[arg-type]
    flashsmith.flash_attn_func(a, a, 3)  # type: ignore[call-overload]
    flashsmith.flash_attn_varlen_func(a, a, a, None, a, 3, 3)  # type: ignore[call-overload]
    flashsmith.choose(3)  # type: ignore[arg-type]
    flashsmith.attention(a, a, a).foo()  # type: ignore[attr-defined]
    flashsmith.attention(a, a, a, return_lse=True).foo()  # type: ignore[attr-defined]
    flashsmith.forward(config, a, a, a).foo()  # type: ignore[attr-defined]
    flashsmith.attention_with_cache(a, a, a, cache_lens=a).foo()  # type: ignore[attr-defined]
    flashsmith.merge_attention([a], [a])[0].foo()  # type: ignore[attr-defined]
    flashsmith.flash_attn_func(a, a, a).foo()  # type: ignore[attr-defined]
    flashsmith.flash_attn_with_kvcache(a, a, a).foo()  # type: ignore[attr-defined]
    flashsmith.choose("b1 s64 h1 d64 fp16").config.foo()  # type: ignore[attr-defined]
    flashsmith.get_kernel_configs("prog")[0].foo()  # type: ignore[attr-defined]
    flashsmith.atention(a, a, a)  # type: ignore[attr-defined]
