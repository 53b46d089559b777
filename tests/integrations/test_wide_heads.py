"""attention() with a d above 256: what it computes, and what it says to be missing."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402


def drawn(*shape: int, seed: int = 0) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.float16)


def exact(q: Any, k: Any, v: Any, keys: list[int]) -> Any:
    """Causal attention in float64 over the first keys of each sequence."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    position = torch.arange(q.shape[2])[None, :, None] - q.shape[2]
    seen = torch.arange(k.shape[2]) <= position + torch.tensor(keys)[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1)
    return (weights @ v).transpose(1, 2)


def test_output_and_gradients() -> None:
    inputs = drawn(1, 70, 2, 264), drawn(1, 100, 1, 264, seed=1), drawn(1, 100, 1, 264, seed=2)
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    o = flashsmith.attention(*ours, causal=True, emulate=True)
    expected = exact(*theirs, [100])
    do = drawn(1, 70, 2, 264, seed=3)
    o.backward(do)
    expected.backward(do.double())
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-3)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=0, atol=6e-3)


def test_queries_over_a_dense_cache() -> None:
    """Without attention_with_cache(), which has no kernels: the lengths stay on the device."""
    q, cache, values = drawn(2, 1, 8, 512), drawn(2, 96, 1, 512, seed=1), drawn(2, 96, 1, 512)
    lengths = [33, 90]
    for sequence, length in enumerate(lengths):
        cache[sequence, length:] = values[sequence, length:] = torch.nan
    o, lse = flashsmith.attention(
        *(q, cache, values), causal=True, partial=True, emulate=True,
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    expected = exact(q, cache.nan_to_num(), values.nan_to_num(), lengths)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-4)
    assert lse.isfinite().all()


def test_what_is_missing_is_named() -> None:
    q, k = drawn(1, 9, 2, 320), drawn(1, 9, 1, 320)
    with pytest.raises(ArgumentError, match=r"^bits='canonical': no kernel of canonical-1"):
        flashsmith.attention(q, k, k, bits="canonical", emulate=True)
    with pytest.raises(
        ArgumentError, match=r"^deterministic=True: no backward kernel of d_head 512"
    ):
        flashsmith.attention(
            *(x.clone().requires_grad_() for x in (q, k, k)), deterministic=True, emulate=True
        )
    with pytest.raises(ArgumentError, match=r"^q: d=320: decode has kernels of d_head 64"):
        flashsmith.attention_with_cache(q, k, k, cache_lens=torch.tensor([5]).int(), emulate=True)
    with pytest.raises(ArgumentError, match=r"^q: d=320, d_v=256: .* to one width, and"):
        flashsmith.attention(q, k, k[..., :256].contiguous(), emulate=True)
    with pytest.raises(ArgumentError, match=r"^q: d=520: kernels exist for .* 8 to 512"):
        flashsmith.attention(*[drawn(1, 9, 1, 520)] * 3, emulate=True)
