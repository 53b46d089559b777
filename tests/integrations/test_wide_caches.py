"""attention_with_cache() with a d above 256, whose columns the warps of a CTA share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import shared_kernels  # noqa: E402
from test_wide_heads import drawn, exact  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import device_spec  # noqa: E402
from flashsmith.integrations.flash_attn import flash_attn_with_kvcache  # noqa: E402

shared_kernels.want_chosen("b2 s1:300 h8:1 d512 fp16 decode causal")
LENS, CAPACITY, PAGE = [300, 33], 320, 20


def caches(d: int, lens: list[int] = LENS, heads: int = 1) -> tuple[Any, Any]:
    """Keys and values, which are NaN behind each sequence."""
    found = [drawn(len(lens), CAPACITY, heads, d, seed=seed) for seed in (1, 2)]
    for cache in found:
        for sequence, length in enumerate(lens):
            cache[sequence, length:] = torch.nan
    return found[0], found[1]


def in_pages(*tensors: Any) -> tuple[list[Any], Any]:
    """The caches in pages in random order, and the table of pages."""
    batch, capacity = tensors[0].shape[:2]
    order = torch.randperm(batch * capacity // PAGE, generator=torch.Generator().manual_seed(5))
    pages = [
        torch.empty(it.reshape(-1, PAGE, *it.shape[2:]).shape, dtype=it.dtype) for it in tensors
    ]
    for page, tensor in zip(pages, tensors, strict=True):
        page[order] = tensor.reshape(page.shape)
    return pages, order.reshape(batch, -1).int()


def attend(q: Any, k: Any, v: Any, lens: list[int], /, **how: Any) -> Any:
    how = {"cache_lens": torch.tensor(lens).int(), "causal": True, "emulate": True, **how}
    return flashsmith.attention_with_cache(q, k, v, **how)


def assert_right(o: Any, q: Any, k: Any, v: Any, lens: list[int]) -> None:
    expected = exact(q, k.nan_to_num(), v.nan_to_num(), lens)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("seq_q", "heads"), [(1, (8, 1)), (3, (6, 2))])
def test_dense_and_in_pages(seq_q: int, heads: tuple[int, int]) -> None:
    q, (k, v) = drawn(2, seq_q, heads[0], 512), caches(512, heads=heads[1])
    o, lse = attend(q, k, v, LENS, out=torch.full_like(q, torch.nan), return_lse=True)
    assert_right(o, q, k, v, LENS)
    assert lse.isfinite().all()
    pages, table = in_pages(k, v)
    assert torch.equal(attend(q, *pages, LENS, page_table=table), o)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor(LENS).int(),
                                               causal=True), o)  # fmt: skip


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    q, (k, v) = drawn(2, 2, 8, 512), caches(512)
    both = attend(q, k, v, LENS)
    for i, length in enumerate(LENS):
        assert torch.equal(attend(q[i, None], k[i, None], v[i, None], [length]), both[i, None])
    assert torch.equal(attend(q, k, v, LENS), both)


def test_appended_keys() -> None:
    q, (k, v) = drawn(2, 3, 8, 512), caches(512)
    new_k, new_v = drawn(2, 3, 1, 512, seed=6), drawn(2, 3, 1, 512, seed=7)
    o = attend(q, k, v, LENS, k=new_k, v=new_v)
    for i, length in enumerate(LENS):
        assert torch.equal(k[i, length : length + 3], new_k[i])
        assert torch.equal(v[i, length : length + 3], new_v[i])
        assert k[i, length + 3 :].isnan().all()
    assert_right(o, q, k, v, [length + 3 for length in LENS])


def test_slots() -> None:
    caches = [torch.full((5, 16, 1, 512), torch.nan, dtype=torch.float16) for _ in range(2)]
    rows = [drawn(3, 1, 512, seed=seed) for seed in (1, 2)]
    slots = torch.tensor([70, -1, 3])
    flashsmith.write_slots(*rows, *caches, slots)
    for cache, row in zip(caches, rows, strict=True):
        written = cache.reshape(-1, 1, 512)
        assert torch.equal(written[[70, 3]], row[[0, 2]])
        assert written.isfinite().all(dim=-1).sum() == 2


@pytest.mark.full
def test_rows_shorter_than_the_kernels() -> None:
    """Packed sequences of different lengths, with a window, softcap and sinks."""
    counts, d = [3, 1], 328
    q, (k, v) = drawn(sum(counts), 4, d), caches(d)
    sinks = torch.tensor([0.5, -1.0, torch.inf * -1, 2.0])
    o = attend(
        q, k, v, LENS, cu_seqlens_q=torch.tensor([0, 3, 4]).int(), max_seqlen_q=3,
        window=(40, None), softcap=5.0, sinks=sinks,
    )  # fmt: skip
    for i, (first, count) in enumerate(zip((0, 3), counts, strict=True)):
        rows = q[first : first + count].double().transpose(0, 1)
        keys, values = (it[i, : LENS[i], 0].double() for it in (k, v))
        scores = 5 * torch.tanh(rows @ keys.T * d**-0.5 / 5)
        distance = torch.arange(LENS[i]) - (torch.arange(count)[:, None] + LENS[i] - count)
        scores = scores.masked_fill((distance > 0) | (distance < -40), -torch.inf)
        weights = torch.softmax(
            torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], dim=-1), dim=-1
        )[..., :-1]
        expected = (weights @ values).transpose(0, 1)
        torch.testing.assert_close(o[first : first + count].double(), expected, rtol=0, atol=3e-3)


@pytest.mark.full
def test_caches_of_8_bits() -> None:
    q, (k, v) = drawn(2, 1, 8, 512), caches(512)
    codes = [it.to(torch.float8_e4m3fn) for it in (k, v)]
    o = attend(q, *codes, LENS, k_scale=0.5, v_scale=2.0)
    k, v = (it.to(torch.float16) for it in codes)
    expected = exact(q, k.nan_to_num() * 0.5, v.nan_to_num() * 2, LENS)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=4e-3)


@pytest.mark.full
def test_a_mask_function() -> None:
    q, (k, v) = drawn(2, 1, 8, 512), caches(512)
    seen = torch.arange(CAPACITY) // 32 % 3 != 1
    o = attend(
        q, k, v, LENS, causal=False, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx // 32 % 3 != 1
    )
    for i, length in enumerate(LENS):
        keys, values = (it[i, None, :length][:, seen[:length]] for it in (k, v))
        torch.testing.assert_close(
            o[i, None].double(), exact(q[i, None], keys, values, [10**6]), rtol=0, atol=2e-3
        )


@pytest.mark.full
@pytest.mark.parametrize("d", [512, 272])
def test_canonical_rows_have_the_bits_of_attention(d: int) -> None:
    """Of a chunk and of a decode step, in pages, and beside another sequence."""
    rows, length = 5, LENS[0]
    q, (k, v) = drawn(1, length, 8, d), caches(d)
    o = flashsmith.attention(
        q, k[:1, :length], v[:1, :length], causal=True, bits="canonical", emulate=True
    )
    assert_right(o, q, k[:1], v[:1], [length])
    last = q[:, -rows:].repeat(2, 1, 1, 1)
    pages, table = in_pages(k, v)
    for count in (1, rows):
        how = {"bits": "canonical", "page_table": table}
        assert torch.equal(attend(last[:, -count:], *pages, LENS, **how)[0], o[0, -count:])


def test_what_is_missing_is_named() -> None:
    q, (k, v) = drawn(2, 1, 8, 512), caches(512)
    with pytest.raises(ArgumentError, match=r"d=512, d_v=256: decode has kernels of the pairs"):
        attend(q, k, v[..., :256].contiguous(), LENS)
    with pytest.raises(ArgumentError, match=r"d=520: decode has kernels of d_head 64, .* 512"):
        attend(*[drawn(2, 1, 1, 520)] * 3, [1, 1])
    with pytest.raises(
        ArgumentError, match=r"101376 bytes .* too few for every kernel of d_head 512"
    ):
        flashsmith.choose("b1 s1:300 h8:1 d512 fp16 decode causal", device_spec(89))
