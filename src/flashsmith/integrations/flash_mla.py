"""attention_with_cache(v_width=) under the names and arguments of FlashMLA."""

from __future__ import annotations

from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.integrations.traceable import attention_with_cache, without_torchscript
from flashsmith.integrations.translated_calls import Translated, run_translated
from flashsmith.runtime.tensors import Array


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """Returns (None, None) in place of FlashMLA's tile_scheduler_metadata and num_splits, which
    flashsmith's kernels do not need, because they read the lengths themselves."""
    return None, None


@without_torchscript
def flash_mla_with_kvcache(
    q: Array,
    k_cache: Array,
    block_table: Array | None,
    cache_seqlens: Array,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Array | None = None,
) -> tuple[Any, Any]:
    """Attention over a latent cache for code written for FlashMLA; see attention_with_cache().

    Args:
        q: (batch, seq_q, heads, d), d 576 or 320.
        k_cache: (pages, page, 1, d) with block_table, where a page has a multiple of 8 keys;
            without, (batch, capacity, 1, d).
        block_table: (batch, maximum pages of a sequence) int32.
        cache_seqlens: (batch,) int32, the number of keys of each sequence.
        head_dim_v: d - 64, the number of columns that are also values.
        tile_scheduler_metadata, num_splits: have no effect; keys are split by the lengths.
        softmax_scale: None means 1/sqrt(d).
        causal: aligned to the bottom right.
        is_fp8_kvcache, indices: must be left at their defaults.

    Returns:
        (out, lse): (batch, seq_q, heads, head_dim_v), and fp32 (batch, heads, seq_q). The
        log-sum-exp of a row without keys is -inf, not +inf.

    Raises:
        ArgumentError: the named argument is unusable or not supported.
    """
    if is_fp8_kvcache is not False:
        raise ArgumentError(
            "is_fp8_kvcache: FlashMLA's rows of 656 bytes are not served; must be False. Give rows "
            "of 8-bit floats with one scale to attention_with_cache(k_scale=)"
        )
    if indices is not None:
        raise ArgumentError("indices: not supported; must be None: every key is visited")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keywords = {
        "v_width": head_dim_v,
        "cache_lens": cache_seqlens,
        "page_table": block_table,
        "scale": scale,
        "causal": causal,
        "split": "free",
        "return_lse": True,
    }
    call = Translated(attention_with_cache, (q, k_cache, None), keywords, (), _NAMES)
    outputs: tuple[Any, Any] = run_translated(call)
    return outputs


_NAMES = {
    **{"v_width": "head_dim_v", "cache_lens": "cache_seqlens"},
    **{"page_table": "block_table", "scale": "softmax_scale"},
}
