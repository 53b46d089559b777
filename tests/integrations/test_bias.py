"""attention(bias=...) against PyTorch's attention in fp32; kernels run in the emulator."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import flashsmith
from flashsmith import masks, scores
from flashsmith.chooser.functions import CallFunctions, bound_functions, sizes_of
from flashsmith.errors import ArgumentError
from flashsmith.families import parse_kernel_name_into_config

FORWARD = parse_kernel_name_into_config(
    "(BF16, 64, 128, 48, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
    "+static_persistent+separate_O"
)
BACKWARD = parse_kernel_name_into_config(
    "(BF16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
    "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+early_rows"
)
SIZES = BATCH, HEADS, SEQ_Q, SEQ_K = 2, 4, 100, 131


def draw() -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(1)
    shapes = (BATCH, SEQ_Q, HEADS, 64), *2 * [(BATCH, SEQ_K, 2, 64)]
    return tuple(torch.randn(it, generator=of).bfloat16().requires_grad_() for it in shapes)


def program(**functions: Any) -> Any:
    q, k, _ = draw()
    return bound_functions(CallFunctions(**functions), (False, (None, None)), sizes_of(q, k))[0]


def evaluate(made: Any, expression: Any) -> np.ndarray:
    """The values for a score of 0 in the first sequence and head, (SEQ_Q, SEQ_K)."""
    q, k = np.arange(SEQ_Q)[:, None], np.arange(SEQ_K)
    values = {"score": 0.0, "b": 0, "h": 0, "q": q, "k": k, "seq_q": SEQ_Q, "seq_k": SEQ_K}
    numbers = zip(made.program.numbers, made.numbers, strict=True)
    read = {it.name: given for it, given in zip(made.program.reads, made.tensors, strict=True)}
    found = expression.evaluate({**values, **{it.name: n for it, n in numbers}}, read)
    return np.broadcast_to(found, (SEQ_Q, SEQ_K))


def by_pytorch(q: Any, k: Any, v: Any, bias: Any, shown: Any) -> torch.Tensor:
    wide = [it.float().transpose(1, 2) for it in (q, k, v)]
    k, v = (it.repeat_interleave(2, 1) for it in wide[1:])
    score = wide[0] @ k.mT / 8 + bias.float()
    return (score.masked_fill(~shown, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]
)
def test_output_and_gradients(dtype: torch.dtype) -> None:
    """With causal and a bool tensor, and with a bias that all sequences share."""
    of, tensors = torch.Generator().manual_seed(2), draw()
    bias = torch.randn((1, HEADS, SEQ_Q, SEQ_K), generator=of).to(dtype).requires_grad_()
    shown = torch.rand((SEQ_Q, SEQ_K), generator=of) < 0.8
    shown[:, 0] = True
    kernels = {"config": FORWARD, "backward_config": BACKWARD}
    o = flashsmith.attention(*tensors, bias=bias, mask=shown, causal=True, **kernels)
    do = torch.randn(o.shape, generator=of).bfloat16()
    found = torch.autograd.grad(o, (*tensors, bias), do)
    position = torch.arange(SEQ_Q)[:, None] + SEQ_K - SEQ_Q
    expected = by_pytorch(*tensors, bias, shown & (torch.arange(SEQ_K) <= position))
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad(expected, (*tensors, bias), do.float())
    assert found[3].dtype == dtype
    for one, other in zip(found, wanted, strict=True):
        size = other.abs().max()
        torch.testing.assert_close(one.float() / size, other.float() / size, rtol=0.02, atol=0.01)


def test_it_is_the_ready_score() -> None:
    """The same program, and so the same kernels, as scores.bias(), alone and after others."""
    bias = torch.zeros(SIZES)
    slopes = torch.zeros(HEADS)
    assert program(bias=bias)[:3] == program(score_mod=scores.bias(bias))[:3]
    both = program(score_mod=scores.alibi(slopes), bias=bias)
    assert both[:3] == program(score_mod=scores.alibi(slopes) + scores.bias(bias))[:3]
    assert both.tensors[both.names.index("bias")] is bias


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_rows_of_tensors_count_from_the_first_query(name: str) -> None:
    """Also where functions count from the last key."""
    of = torch.Generator().manual_seed(3)
    tensor = torch.rand(SIZES[2:], generator=of)
    tensor = tensor < 0.5 if name == "mask" else tensor
    made = program(**{name: tensor}, score_mod=lambda s, b, h, q, k: s + q, positions="end")
    q = np.arange(SEQ_Q)[:, None]
    added = evaluate(made, made.program.score) - (q + SEQ_K - SEQ_Q)
    found = added if name == "bias" else evaluate(made, made.program.mask)
    np.testing.assert_allclose(found, tensor.numpy(), atol=1e-5)
    assert (added == 0).all() == (name == "mask")


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_call_keeps_no_tensor(name: str) -> None:
    """A new tensor in each step must not stay in memory."""
    tensor = torch.zeros(SIZES, dtype=torch.bool if name == "mask" else torch.float32)
    program(**{name: tensor}, mask_mod=masks.causal())
    known = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert known() is None


def test_two_masks_are_not_kept() -> None:
    """The results of two functions go when the functions do."""

    def call() -> weakref.ref[torch.Tensor]:
        ids = torch.zeros(SEQ_K, dtype=torch.int32)
        program(mask_mod=lambda b, h, q, k: ids[k] == 0, mask=lambda b, h, q, k: ids[k] >= q % 3)
        return weakref.ref(ids)

    known = call()
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"bias": 3.0}, "bias=3.0: give a float tensor"),
        ({"bias": torch.zeros(SIZES, dtype=torch.bool)}, "bias: .*torch.bool.*give it as mask"),
        ({"bias": torch.zeros(SIZES, dtype=torch.float64)}, "bias: .*torch.float64; give one of"),
        ({"bias": torch.zeros(SEQ_K)}, r"bias: a tensor of shape \(131,\)"),
        ({"bias": torch.zeros(3, 1, SEQ_Q, SEQ_K)}, r"bias: shape \(3, 1, 100, 131\); .*2 or 1, 4"),
        ({"mask": torch.ones(SEQ_Q, 200, dtype=torch.bool)}, r"mask: shape \(100, 200\)"),
        ({"mask": torch.ones(SEQ_Q, SEQ_K)}, "mask: .*torch.float32; give a bool"),
        ({"bias": torch.zeros(SIZES), "score_mod": 3}, "score_mod=3: give a function"),
    ],
)
def test_refused(functions: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flashsmith.attention(*draw(), **functions)


def test_names_of_the_tensors() -> None:
    bias = torch.zeros(SIZES, device="meta")
    with pytest.raises(ArgumentError, match=r"^bias:"):
        flashsmith.attention(*draw(), bias=bias, config=FORWARD)
    with pytest.raises(ArgumentError, match=r"^mask:"):
        flashsmith.attention(*draw(), mask=bias.bool(), config=FORWARD)
