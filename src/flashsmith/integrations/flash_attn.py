"""flash_attn_func and flash_attn_varlen_func: attention() under FlashAttention's argument names."""

from __future__ import annotations

from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.integrations.traceable import attention
from flashsmith.printable import quoted
from flashsmith.runtime.tensors import Array

_UNLIMITED = -1


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (_UNLIMITED, _UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """attention() for code written for FlashAttention; differentiable, the log-sum-exp too.

    Args:
        q: (batch, seq_q, heads, d); k, v: (batch, seq_k, heads_k, d).
        softmax_scale: None is 1/sqrt(d).
        causal, window_size: aligned to the bottom right; -1 is no limit.
        softcap: 0 is none.
        deterministic: whether dq has to be bitwise repeatable; the output, dk and dv always are.
            False leaves it to torch.use_deterministic_algorithms.
        return_attn_probs: return (out, lse, None); the probabilities are never stored.
        dropout_p, alibi_slopes: must be left at their defaults.

    Raises:
        ArgumentError: an argument is unusable or not supported; names it.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes)
    results = attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        scale=softmax_scale,
        return_lse=return_attn_probs,
        deterministic=deterministic or None,
    )
    return (*results, None) if return_attn_probs else results


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (_UNLIMITED, _UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
) -> Any:
    """attention() on packed sequences for code written for FlashAttention; differentiable.

    Args:
        q: (total_q, heads, d); k, v: (total_k, heads_k, d).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1), int32, where each sequence begins.
        max_seqlen_q, max_seqlen_k: the longest sequence.
        block_table: must be None; the rest as for flash_attn_func.

    Raises:
        ArgumentError: an argument is unusable or not supported; names it.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    results = attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=return_attn_probs,
        deterministic=deterministic or None,
    )
    return (*results, None) if return_attn_probs else results


def _check_unsupported(dropout_p: float, **tensors: Any) -> None:
    if dropout_p != 0.0:
        raise ArgumentError(
            f"dropout_p={quoted(dropout_p)}: must be 0; the kernels drop no weights "
            "(flashsmith.sdpa() "
            "leaves dropout to PyTorch)"
        )
    for name, tensor in tensors.items():
        if tensor is not None:
            raise ArgumentError(f"{name}: not supported; must be None")


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """window_size with None for no limit. Raises ArgumentError unless it is two whole numbers."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left = right = None
    for limit in (left, right):
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < _UNLIMITED:
            raise ArgumentError(
                f"window_size={quoted(window_size)}: give (left, right), whole numbers from 0 up "
                "or -1 "
                "for no limit"
            )
    return _limit(left), _limit(right)


def _limit(limit: Any) -> int | None:
    return None if limit == _UNLIMITED else int(limit)
