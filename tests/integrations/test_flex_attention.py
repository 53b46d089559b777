"""flex_attention() against PyTorch's own, eager and in fp32; kernels run in the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_run import full_after
from torch.nn.attention import flex_attention as pytorch

import flashsmith
from flashsmith import masks, scores
from flashsmith.errors import ArgumentError, TraceError
from flashsmith.families import parse_kernel_name_into_config

CONFIG = parse_kernel_name_into_config(
    "(BF16, 64, 128, 48, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
    "+static_persistent+separate_O"
)
OPTIONS = {"config": CONFIG}


def draw(
    batch: int = 2,
    heads: int = 4,
    heads_k: int = 2,
    seq_q: int = 150,
    seq_k: int = 201,
    d: int = 64,
) -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(1)
    shapes = (batch, heads, seq_q, 64), *2 * [(batch, heads_k, seq_k, 64)]
    return tuple(torch.randn(shape, generator=of).bfloat16() for shape in shapes)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    # Without it, PyTorch compiles its own function.
    monkeypatch.setattr(pytorch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def flex(q: Any, k: Any, v: Any, *functions: Any, **keywords: Any) -> Any:
        aux = pytorch.AuxRequest(lse=True)
        keywords |= {"enable_gqa": True, "return_aux": aux}
        return pytorch.flex_attention(q.float(), k.float(), v.float(), *functions, **keywords)

    return flex


def compare(eager: Callable[..., Any], tensors: tuple[Any, ...], *functions: Any) -> None:
    aux = pytorch.AuxRequest(lse=True, max_scores=True)
    found, statistics = flashsmith.flex_attention(
        *tensors, *functions, enable_gqa=True, kernel_options=OPTIONS, return_aux=aux
    )
    expected, wanted = eager(*tensors, *functions)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(statistics.lse, wanted.lse, rtol=1e-3, atol=2e-3)
    assert ((statistics.max_scores <= statistics.lse + 1e-3) | wanted.lse.isinf()).all()


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
IDS = torch.randint(0, 4, (2, 201), generator=torch.Generator().manual_seed(2)).sort().values


def test_a_score_and_a_block_mask(eager: Callable[..., Any]) -> None:
    documents = lambda b, h, q, k: IDS[b, q] == IDS[b, k]  # noqa: E731
    made = pytorch.create_block_mask(documents, 2, None, 150, 201, "cpu", BLOCK_SIZE=64)
    compare(eager, draw(), lambda s, b, h, q, k: s + SLOPES[h] * (k - q) / 8, made)


def test_values_of_ours_are_functions_of_pytorch(eager: Callable[..., Any]) -> None:
    mask = masks.documents(IDS) | masks.window(3, 3)
    made = pytorch.create_block_mask(mask, 2, None, 150, 201, "cpu", BLOCK_SIZE=64)
    compare(eager, draw(), scores.alibi(SLOPES) + scores.softcap(5.0), made)


def test_lists_hide_what_the_function_shows(eager: Callable[..., Any]) -> None:
    """Rows without keys, too."""
    counts = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 2, 1], [0, 1, 2], [3, 0, 0]]]], dtype=torch.int32)
    indices = torch.nn.functional.pad(indices, (0, 1), value=2**30)
    made = pytorch.BlockMask(
        (150, 201), counts, indices, None, None, None, None, None, None, (64, 64)
    )
    tensors = draw()
    found = flashsmith.flex_attention(*tensors, None, made, enable_gqa=True, kernel_options=OPTIONS)
    assert not found[:, :, 64:128].any()
    # PyTorch's eager function ignores the lists; ours is compared with a dense mask.
    states = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    dense = masks.blocks(states, 64)
    expected, _ = eager(
        *tensors, lambda s, b, h, q, k: torch.where(dense(b, h, q, k), s, float("-inf"))
    )
    rows = [*range(64), *range(128, 150)]
    torch.testing.assert_close(
        found.float()[:, :, rows], expected[:, :, rows], rtol=2e-2, atol=2e-2
    )


def test_a_causal_function_runs_the_causal_kernel() -> None:
    """The same kernel and the same bits as causal=True."""
    tensors = draw(seq_q=130, seq_k=130)
    found = flashsmith.attention(
        *(it.transpose(1, 2) for it in tensors),
        mask_mod=lambda b, h, q, k: q >= k,
        config=CONFIG,
    )
    causal = flashsmith.attention(
        *(it.transpose(1, 2) for it in tensors), causal=True, config=CONFIG
    )
    assert torch.equal(found, causal)
    block_mask = pytorch.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 130, 130, device="cpu"
    )
    found = flashsmith.flex_attention(
        *tensors, block_mask=block_mask, enable_gqa=True, kernel_options=OPTIONS
    )
    assert torch.equal(found.transpose(1, 2), causal)


def test_keywords_of_attention(eager: Callable[..., Any]) -> None:
    """causal, a bool tensor and a mask function hide keys together."""
    tensors = draw()
    shown = torch.rand(150, 201, generator=torch.Generator().manual_seed(3)) < 0.7
    shown[:, 0] = True
    found, lse = flashsmith.attention(
        *(it.transpose(1, 2) for it in tensors),
        causal=True,
        mask=shown,
        mask_mod=lambda b, h, q, k: (h != 2) | (k < 90),
        score_mod=lambda s, b, h, q, k: s * 0.5,
        config=CONFIG,
        return_lse=True,
    )
    q, k = torch.arange(150)[:, None], torch.arange(201)
    dense = shown & (k <= q + 51) & ((torch.arange(4)[:, None, None] != 2) | (k < 90))
    score = tensors[0].float() @ tensors[1].float().repeat_interleave(2, 1).transpose(2, 3) / 16
    score = score.masked_fill(~dense, float("-inf"))
    expected = score.softmax(-1) @ tensors[2].float().repeat_interleave(2, 1)
    torch.testing.assert_close(found.transpose(1, 2).float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, score.logsumexp(-1), rtol=1e-3, atol=2e-3)


def branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    # fmt: off
    if q==k: return s  # noqa: E701
    # fmt: on
    return -s


def test_refused() -> None:
    q, k, v = draw(1, 2, 1, 16, 16)
    call = flashsmith.flex_attention
    with pytest.raises(ArgumentError, match="enable_gqa=False: query has 2 heads and key 1"):
        call(q, k, v)
    with pytest.raises(ArgumentError, match=r"query: shape \(2, 16, 64\)"):
        call(q[0], k, v)
    # The line that an error quotes is the caller's: "q" stays "q" there.
    with pytest.raises(TraceError, match=r"if q==k"):
        call(q, q, q, branches)
    with pytest.raises(TraceError, match="dot product"):
        call(q, q, q, lambda s, b, h, i, j: s + torch.dot(SLOPES[i], SLOPES[j]))
    with pytest.raises(ArgumentError, match="return_lse"):
        call(q, q, q, return_lse=True, return_aux=pytorch.AuxRequest(lse=True))
    with pytest.raises(ArgumentError, match=r"^query: dtype torch\.float32"):
        call(q.float(), q.float(), q.float())
    with pytest.raises(ArgumentError, match=r"^block_mask=3: give a function"):
        call(q, q, q, block_mask=3)
    with pytest.raises(ArgumentError, match=r"^mask=3: give a function"):
        flashsmith.attention(*(it.transpose(1, 2) for it in draw()), mask=3)
    with pytest.raises(ArgumentError, match="positions='middle'"):
        flashsmith.attention(
            *(it.transpose(1, 2) for it in draw()), mask=masks.causal(), positions="middle"
        )


@pytest.mark.parametrize(
    ("dtype", "shape"),
    full_after(
        2,
        [
            *((torch.bool, (2, 1, 1, 201)), (torch.bfloat16, (150, 201))),
            *((torch.bool, (150, 201)), (torch.bfloat16, (2, 1, 1, 201))),
            *((dtype, (2, 4, 150, 201)) for dtype in (torch.bool, torch.bfloat16)),
        ],
    ),
)
def test_sdpa_applies_mask_tensors(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashsmith.integrations import sdpa as module

    q, k, v = draw(heads_k=4)
    of = torch.Generator().manual_seed(4)
    mask = torch.rand(shape, generator=of) < 0.8
    if dtype is not torch.bool:
        mask = (torch.randn(shape, generator=of) * 2).to(dtype)
    with_config = functools.partial(flashsmith.attention, config=CONFIG)
    monkeypatch.setattr(module, "attention", with_config)
    found = flashsmith.sdpa(q, k, v, mask, strict=True, emulate=True)
    wide = mask if dtype is torch.bool else mask.float()
    expected = module.pytorch_sdpa(q.float(), k.float(), v.float(), wide)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_alibi_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.integrations import flash_attn as module

    q, k, v = (it.transpose(1, 2) for it in draw())
    with_config = functools.partial(flashsmith.attention, config=CONFIG)
    monkeypatch.setattr(module, "attention", with_config)
    found = flashsmith.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES)
    places = torch.arange(150)[:, None] + 51 - torch.arange(201)
    wide = [it.transpose(1, 2).float() for it in (q, k, v)]
    score = wide[0] @ wide[1].repeat_interleave(2, 1).transpose(2, 3) / 8
    score = score - SLOPES[:, None, None] * places.abs()
    score = score.masked_fill(places < 0, float("-inf"))
    expected = score.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    torch.testing.assert_close(found.transpose(1, 2).float(), expected, rtol=2e-2, atol=2e-2)


def test_sdpa_rows_that_hide_all_keys() -> None:
    """The lowest number hides like PyTorch's: a row of it is the mean of v; a row of -inf is 0."""
    q, k, v = draw(1, 2, 2, 70, 70)
    mask = torch.zeros(70, 70)
    mask[3] = mask[5, 40:] = torch.finfo(torch.float32).min
    mask[7] = float("-inf")
    found = flashsmith.sdpa(q, k, v, mask, strict=True, emulate=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), mask
    )
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
