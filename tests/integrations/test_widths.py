"""attention() and its relatives with a d of v that is not that of q and k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

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
    with pytest.raises(ArgumentError, match=r"^bits='canonical': not with d=40 and d_v=72"):
        flashsmith.attention(q, k, v, bits="canonical", emulate=True)


def test_a_cache_of_another_width_is_refused() -> None:
    q, cache, values = _drawn(1, 1), _drawn(1, 16), _drawn(1, 16, d=D_V)
    with pytest.raises(ArgumentError, match=r"^v_cache: shape .* d_head must be q's, 40"):
        flashsmith.attention_with_cache(q, cache, values, cache_lens=torch.tensor([5]).int())


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
    assert (o.shape, lse.shape) == ((2, 8, 4, 24), (2, 4, 8))
