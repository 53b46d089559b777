"""FlashMLA's function, and FlashAttention 3's qv: attention over a latent cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata

LENS = torch.tensor([100, 33], dtype=torch.int32)


def drawn() -> tuple[Any, Any, Any]:
    """q, pages of 64 rows, and the table of two sequences."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 2, 16, 576, generator=generator).bfloat16()
    pages = torch.randn(4, 64, 1, 576, generator=generator).bfloat16()
    return q, pages, torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)


def test_flash_mla_is_attention_over_the_pages() -> None:
    q, pages, table = drawn()
    metadata = get_mla_metadata(LENS, 2 * 16, 1)
    out, lse = flash_mla_with_kvcache(q, pages, table, LENS, 512, *metadata, causal=True)
    want = flashsmith.attention_with_cache(
        q,
        pages,
        v_width=512,
        cache_lens=LENS,
        page_table=table,
        scale=576**-0.5,
        split="free",
        return_lse=True,
    )
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


@pytest.mark.parametrize("changed", ["is_fp8_kvcache", "indices"])
def test_what_flash_mla_has_besides_is_refused(changed: str) -> None:
    q, pages, table = drawn()
    keywords: dict[str, Any] = {changed: True}
    with pytest.raises(ArgumentError, match=f"^{changed}: "):
        flash_mla_with_kvcache(q, pages, table, LENS, 512, **keywords)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": LENS.long()}, "cache_seqlens: dtype torch.int64"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table: shape \(3, 1\)"),
        ({"softmax_scale": 0.0}, r"softmax_scale=0\.0: "),
        ({"head_dim_v": 500}, "head_dim_v=500: "),
    ],
)
def test_errors_have_flash_mlas_names(changes: dict[str, Any], message: str) -> None:
    q, pages, table = drawn()
    call = {"block_table": table, "cache_seqlens": LENS, "head_dim_v": 512, **changes}
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_mla_with_kvcache(q, pages, **call)


def test_qv_takes_the_columns_apart() -> None:
    """q and the rows in two parts, as FlashAttention 3 takes them, and a row to append."""
    q, pages, table = drawn()
    new = torch.randn(2, 2, 1, 576).bfloat16()
    whole = pages.clone()
    keywords: dict[str, Any] = {"page_table": table, "causal": True, "softmax_scale": 0.07}
    out = flashsmith.flash_attn_with_kvcache(
        q[..., 512:],
        pages[..., 512:],
        pages[..., :512],
        new[..., 512:],
        new[..., :512],
        qv=q[..., :512],
        cache_seqlens=LENS - 2,
        **keywords,
    )
    want = flashsmith.attention_with_cache(
        q, whole, v_width=512, cache_lens=LENS - 2, page_table=table, k=new, scale=0.07
    )
    assert torch.equal(out, want)
    assert torch.equal(pages, whole)


def test_qv_without_v_cache_is_refused() -> None:
    q, pages, table = drawn()
    with pytest.raises(ArgumentError, match="v_cache"):
        flashsmith.flash_attn_with_kvcache(
            q[..., 512:],
            pages[..., 512:],
            None,
            qv=q[..., :512],
            cache_seqlens=LENS,
            page_table=table,
        )


def test_qv_over_separate_caches_is_refused() -> None:
    q, pages, table = drawn()
    with pytest.raises(ArgumentError, match="qv: k_cache does not follow v_cache in the same rows"):
        flashsmith.flash_attn_with_kvcache(
            q[..., 512:],
            pages[..., 512:].clone(),
            pages[..., :512],
            qv=q[..., :512],
            cache_seqlens=LENS,
            page_table=table,
        )
