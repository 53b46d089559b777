"""A d that is no multiple of 8: every way in says to pad, and what it says to do is right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith import attention, forward, sdpa  # noqa: E402
from flashsmith.chooser import choose  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import DType, get_kernel_configs  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning  # noqa: E402
from flashsmith.integrations.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
)
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime import forward_timed  # noqa: E402

CFG = next(cfg for cfg in get_kernel_configs("tune") if cfg.dtype is DType.FP16)
OFFSETS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 9, 20], dtype=torch.int32)
)
STARTS = (*OFFSETS.values(), 11, 11)


def dense(d: int) -> Any:
    return torch.ones(2, 20, 3, d, dtype=torch.float16)


def packed(d: int) -> Any:
    return torch.ones(20, 3, d, dtype=torch.float16)


DOORS: dict[str, Callable[[int], object]] = {
    "attention": lambda d: attention(*[dense(d)] * 3),
    "attention, a view": lambda d: attention(*[dense(d)[:, ::2]] * 3),
    "attention, empty": lambda d: attention(*[dense(d)[:0]] * 3),
    "attention, out": lambda d: attention(*[dense(d)] * 3, out=dense(d)),
    "attention, packed": lambda d: attention(*[packed(d)] * 3, **OFFSETS),
    "forward": lambda d: forward(CFG, *[dense(d)] * 3),
    "forward, NumPy": lambda d: forward(CFG, *[dense(d).numpy()] * 3),
    "forward_timed": lambda d: forward_timed(CFG, *[dense(d)] * 3),
    "flash_attn_func": lambda d: flash_attn_func(*[dense(d)] * 3),
    "flash_attn_varlen_func": lambda d: flash_attn_varlen_func(*[packed(d)] * 3, *STARTS),
    "choose": lambda d: choose(f"b2 s20 h3 d{d} fp16"),
}  # fmt: skip


@pytest.mark.parametrize(("d", "padded"), [(1, 8), (12, 16), (100, 104), (250, 256)])
@pytest.mark.parametrize("door", DOORS)
def test_the_advice_is_to_pad(door: str, d: int, padded: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        DOORS[door](d)
    said = str(caught.value)
    assert re.match(r"problem: d=" if door == "choose" else rf"q: d_head {d} ", said)
    for part in (
        "multiple", "of 8", f"pad q, k and v with zeros to d {padded}",
        f"scale=1/sqrt({d})", f"first {d} columns",
    ):  # fmt: skip
        assert part in said
    assert "contiguous" not in said


@pytest.mark.parametrize("d", [12, 100])
def test_sdpa_falls_back(d: int) -> None:
    q = torch.randn(2, 3, 20, d).half()
    with pytest.raises(ArgumentError, match=f"query: d {d}; the kernels take multiples of 8"):
        sdpa(q, q, q, strict=True)
    with pytest.warns(FallbackWarning, match=f"query: d {d}"):
        output = sdpa(q, q, q)
    assert torch.equal(output, pytorch_sdpa(q, q, q))


def test_following_the_advice_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(1, 20, 2, 12, generator=generator).half() for _ in range(3))
    wide = (torch.nn.functional.pad(tensor, (0, 4)) for tensor in (q, k, v))
    output = attention(*wide, scale=1 / math.sqrt(12))[..., :12]
    heads_first = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("d", "d_v"), [(16, 24), (24, 16)])
def test_v_of_another_d_has_the_values_of_padded_tensors(d: int, d_v: int) -> None:
    """The default scale is of the d of q and k."""
    generator = torch.Generator().manual_seed(13)
    q, k = (torch.randn(1, 20, 2, d, generator=generator).half() for _ in "qk")
    v = torch.randn(1, 20, 2, d_v, generator=generator).half()
    output = attention(q, k, v)
    assert output.shape == (1, 20, 2, d_v)
    widest = max(d, d_v)
    wide = [torch.nn.functional.pad(it, (0, widest - it.shape[-1])) for it in (q, k, v)]
    padded = attention(*wide, scale=1 / math.sqrt(d))[..., :d_v]
    torch.testing.assert_close(output, padded, atol=2e-3, rtol=2e-3)
    heads_first = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    torch.testing.assert_close(output.float(), expected, atol=2e-3, rtol=2e-3)


def test_k_of_another_d_gets_no_advice_to_pad_to_8() -> None:
    with pytest.raises(
        ArgumentError, match=r"^k: .*d_head must be q's .*, or pad k with zeros to d 16$"
    ):
        attention(dense(16), dense(12), dense(12))
    with pytest.raises(
        ArgumentError, match=r"^k: .*, or pad q with zeros to d 24, and pass scale=1/sqrt\(16\)"
    ):
        attention(dense(16), dense(24), dense(24))
    with pytest.raises(ArgumentError, match=r"^v: d_head 12 .*must be a multiple of 8"):
        attention(dense(16), dense(16), dense(12))
