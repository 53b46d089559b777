"""attention() and its relatives with a d of v that is not that of q and k."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

D, D_V = 40, 72


def _drawn(*rows: int, d: int = D, heads: int = 2, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*rows, heads, d, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.float16)


def _exact(q: Any, k: Any, v: Any) -> torch.Tensor:
    """Plain attention in float64, (batch, seq, heads, d_v); two query heads share a head of k."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2) * D**-0.5, dim=-1)
    return (weights @ v).transpose(1, 2)


def test_output_and_gradients_have_the_width_of_what_they_are_of() -> None:
    inputs = _drawn(1, 33, heads=4), _drawn(1, 50, seed=1), _drawn(1, 50, d=D_V, seed=2)
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    o = flashsmith.attention(*ours, emulate=True)
    expected = _exact(*exact)
    do = _drawn(1, 33, d=D_V, heads=4, seed=3)
    o.backward(do)
    expected.backward(do.double())
    assert o.shape == (1, 33, 4, D_V)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.shape == mine.shape
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=0, atol=6e-3)


def test_an_output_of_another_width_is_refused() -> None:
    q, k, v = _drawn(1, 9), _drawn(1, 9), _drawn(1, 9, d=D_V)
    with pytest.raises(
        ArgumentError, match=r"^out: shape .* must be q's with v's d, \(1, 9, 2, 72"
    ):
        flashsmith.attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises(ArgumentError, match=r"^v: d_head 44 .* must be a multiple of 8"):
        flashsmith.attention(q, k, v[..., :44].contiguous())


LENS, MORE = torch.tensor([5, 41]).int(), 3


def _cached() -> tuple[Any, ...]:
    """Queries, a cache of 60 keys, and rows to append; the expected output after appending."""
    q, keys, values = _drawn(2, MORE, heads=4), _drawn(2, 60, seed=1), _drawn(2, 60, d=D_V, seed=2)
    new = _drawn(2, MORE, seed=3), _drawn(2, MORE, d=D_V, seed=4)
    expected = []
    for i, before in enumerate(LENS.tolist()):
        k, v = (
            torch.cat([old[i, :before], it[i]]) for old, it in zip((keys, values), new, strict=True)
        )
        seen = [_exact(q[i : i + 1, [j]], k[None, : before + j + 1], v[None, : before + j + 1])
                for j in range(MORE)]  # fmt: skip
        expected.append(torch.cat(seen, dim=1))
    return q, keys, values, new, torch.cat(expected)


def test_a_cache_of_another_width_is_served_and_appended_to() -> None:
    q, keys, values, (k, v), expected = _cached()
    o, lse = flashsmith.attention_with_cache(
        q, keys, values, cache_lens=LENS, k=k, v=v, return_lse=True
    )
    assert (o.shape, lse.shape) == ((2, MORE, 4, D_V), (2, 4, MORE))
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)
    for i, before in enumerate(LENS.tolist()):
        for cache, new in ((keys, k), (values, v)):
            assert torch.equal(cache[i, before : before + MORE], new[i])
    after, out = LENS + MORE, torch.full_like(o, torch.nan)
    flashsmith.attention_with_cache(q, keys, values, cache_lens=after, out=out, split="free")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    order = torch.tensor([7, 2, 9, 0, 4, 11, 1, 3, 10, 5, 8, 6])
    pages = [torch.empty_like(it.reshape(12, 10, 2, -1)) for it in (keys, values)]
    for page, cache in zip(pages, (keys, values), strict=True):
        page[order] = cache.reshape(page.shape)
    table = order.reshape(2, 6).int()
    paged = flashsmith.attention_with_cache(q, *pages, cache_lens=after, page_table=table)
    assert torch.equal(paged, o)
    with_kvcache = flash_attn_with_kvcache(
        q, *pages, cache_seqlens=after, block_table=table, causal=True
    )
    assert torch.equal(with_kvcache, o)


def test_caches_whose_widths_do_not_fit_are_refused() -> None:
    q, keys, values, (k, v), _ = _cached()
    refused = partial(flashsmith.attention_with_cache, q, cache_lens=LENS)
    with pytest.raises(ArgumentError, match=r"^k_cache: shape .* d_head must be q's, 40"):
        refused(values, keys)
    with pytest.raises(ArgumentError, match=r"^v_cache: shape .* all but d_head must be k_cache's"):
        refused(keys, values[:, :50])
    with pytest.raises(ArgumentError, match=r"^v_cache: d_head 44 .* must be a multiple of 8: pad"):
        refused(keys, values[..., :44].contiguous())
    with pytest.raises(ArgumentError, match=r"^v: shape .* with the cache's heads and d, \(2, 3"):
        refused(keys, values, k=k, v=k)
    with pytest.raises(ArgumentError, match=r"^k: shape .* with the cache's heads, \(2, 3, 2, 40"):
        refused(keys, values, k=v, v=v)
    with pytest.raises(ArgumentError, match=r"^out: shape .* must be q's with v's d, \(2, 3, 4"):
        refused(keys, values, out=torch.empty_like(q))
    wide = torch.zeros(2, 60, 2, 264, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=r"d=40, d_v=264: decode has kernels of the pairs"):
        refused(keys, wide)
    bytes_of_values = values[..., :40].to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match=r"^k_cache: float8_e4m3fn with d_head 40"):
        refused(bytes_of_values, bytes_of_values[..., :32].contiguous())
    with pytest.raises(ArgumentError, match=r"^v_cache: float8_e4m3fn with d_head 40"):
        flashsmith.attention_with_cache(
            q[..., :32].contiguous(), bytes_of_values[..., :32].contiguous(), bytes_of_values,
            cache_lens=LENS,
        )  # fmt: skip


def test_sdpa_and_flash_attn_take_it() -> None:
    q, k, v = _drawn(1, 33, heads=4), _drawn(1, 50, seed=1), _drawn(1, 50, d=D_V, seed=2)
    expected = _exact(q, k, v)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    found = flashsmith.sdpa(*heads_first, enable_gqa=True, strict=True, emulate=True)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, rtol=0, atol=2e-3)
    found = flash_attn_func(q, k, v)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.full
def test_packed_sequences_take_it() -> None:
    lens_q, lens_k = (0, 9, 17), (0, 20, 53)
    q, k, v = _drawn(17, heads=4), _drawn(53, seed=1), _drawn(53, d=D_V, seed=2)
    cu_q, cu_k = torch.tensor(lens_q).int(), torch.tensor(lens_k).int()
    found = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 33)
    for i in range(2):
        rows, keys = slice(lens_q[i], lens_q[i + 1]), slice(lens_k[i], lens_k[i + 1])
        expected = _exact(q[rows][None], k[keys][None], v[keys][None])[0]
        torch.testing.assert_close(found[rows].double(), expected, rtol=0, atol=2e-3)


def test_shapes_without_values_have_it() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, 4, d, dtype=torch.bfloat16, device="cuda") for d in (D, D, 24))
        o, lse = flashsmith.attention(q, k, v, return_lse=True)
        cache = k, torch.empty(2, 8, 4, 24, dtype=torch.bfloat16, device="cuda")
        lens = torch.empty(2, dtype=torch.int32, device="cuda")
        over_cache = flashsmith.attention_with_cache(q, *cache, cache_lens=lens)
    assert (o.shape, lse.shape) == ((2, 8, 4, 24), (2, 4, 8))
    assert over_cache.shape == (2, 8, 4, 24)
