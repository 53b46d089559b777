"""Gradients through score and mask functions against PyTorch's own flex_attention, eager and in
fp32; kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_run import full_after
from torch.nn.attention import flex_attention as pytorch

import flashsmith
from flashsmith.families import parse_kernel_name_into_config

FORWARD = parse_kernel_name_into_config(
    "(BF16, 64, 128, 48, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
    "+static_persistent+separate_O"
)
BACKWARD = parse_kernel_name_into_config(
    "(BF16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
    "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+early_rows"
)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
IDS = torch.randint(0, 4, (2, 201), generator=torch.Generator().manual_seed(2)).sort().values


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q) / 8


def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (IDS[b, q] == IDS[b, k]) & (q % 7 != 3)  # some rows see no key


def draw(*, heads_k: int = 2) -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(1)
    shapes = (2, 4, 100, 64), *2 * [(2, heads_k, 131, 64)]
    made = (torch.randn(shape, generator=of).bfloat16() for shape in shapes)
    return tuple(it.requires_grad_() for it in made)


def eager(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[Any, ...], do: Any, *functions: Any
) -> tuple[torch.Tensor, ...]:
    """PyTorch's gradients in fp32."""
    # Without it, PyTorch compiles its own function.
    monkeypatch.setattr(pytorch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    # It refuses gradients on CPUs, which its eager path has.
    monkeypatch.setattr(pytorch, "_validate_device", lambda *_: None)
    own = [it.detach().float().requires_grad_() for it in tensors]
    o = pytorch.flex_attention(*own, *functions, enable_gqa=True)
    return torch.autograd.grad(o, own, do.float())


def compare(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        size = other.abs().max()
        torch.testing.assert_close(one.float() / size, other / size, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    "score", full_after(1, [alibi, capped, None]), ids=["alibi", "capped", "none"]
)
def test_gradients(monkeypatch: pytest.MonkeyPatch, score: Callable[..., Any] | None) -> None:
    tensors = draw()
    do = torch.randn((2, 4, 100, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    mask = pytorch.create_block_mask(documents, 2, None, 100, 131, "cpu", BLOCK_SIZE=64)
    o = flashsmith.attention(
        *(it.transpose(1, 2) for it in tensors),
        score_mod=score,
        mask_mod=documents,
        config=FORWARD,
        backward_config=BACKWARD,
    )
    found = torch.autograd.grad(o, tensors, do.transpose(1, 2))
    compare(found, eager(monkeypatch, tensors, do, score, mask))


def test_a_chosen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention() itself, with a causal mask function, of which no program remains."""
    tensors = draw()
    do = torch.randn((2, 4, 100, 64), generator=torch.Generator().manual_seed(3)).bfloat16()

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = pytorch.create_block_mask(causal, None, None, 100, 131, "cpu", BLOCK_SIZE=64)
    o = flashsmith.flex_attention(
        *tensors, alibi, mask, enable_gqa=True, kernel_options={"config": FORWARD}
    )
    found = torch.autograd.grad(o, tensors, do)
    compare(found, eager(monkeypatch, tensors, do, alibi, mask))


def test_changed_captured_tensors_are_refused() -> None:
    tensors, slopes = draw(), SLOPES.clone()
    o = flashsmith.attention(
        *(it.transpose(1, 2) for it in tensors),
        score_mod=lambda score, b, h, q, k: score + slopes[h] * (k - q) / 8,
        config=FORWARD,
        backward_config=BACKWARD,
    )
    slopes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
