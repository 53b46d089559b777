"""Random score and mask functions: programs and their derivatives have PyTorch's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.program import SCORE, is_uniform
from flashsmith.tracing import trace
from tests.tracing.eager_flex import check

Function = Callable[..., Any]
SIZES = (2, 3, 9, 11)
SLOPES = torch.linspace(-1, 1, 3)
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4])

_INTS: list[Function] = [
    lambda b, h, q, k: q,
    lambda b, h, q, k: k,
    lambda b, h, q, k: k - 2 * q + h,
    lambda b, h, q, k: IDS[k] - IDS[q],
    lambda b, h, q, k: (q - k) // 3 + b,
    lambda b, h, q, k: (q - k) % 4 - 1,
]


def _compared(one: Function, other: Function, name: str) -> Function:
    def compare(*at: Any) -> Any:
        a, b = one(*at), other(*at)
        return {"<": a < b, "<=": a <= b, "==": a == b, "!=": a != b}[name]

    return compare


def _joined(one: Function, other: Function, name: str) -> Function:
    def join(*at: Any) -> Any:
        a, b = one(*at), other(*at)
        return {"&": a & b, "|": a | b, "^": a ^ b, "~": ~a | b}[name]

    return join


ints = st.sampled_from(_INTS)
masks = st.recursive(
    st.builds(_compared, ints, ints, st.sampled_from(["<", "<=", "==", "!="])),
    lambda inner: st.builds(_joined, inner, inner, st.sampled_from(["&", "|", "^", "~"])),
    max_leaves=6,
)


def _of_ints(index: Function) -> Function:
    return lambda s, *at: index(*at) / 8


def _scaled(one: Function, factor: float) -> Function:
    return lambda s, *at: one(s, *at) * factor


_UNARY: dict[str, Function] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "exp": lambda x: torch.exp(-x * x),
    "negative": lambda x: -x,
    "square": lambda x: torch.tanh(x) ** 2,
}
_BINARY: dict[str, Function] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: torch.tanh(x) * torch.sigmoid(y),
    "/": lambda x, y: x / (1.5 + torch.tanh(y)),
    "min": torch.minimum,
    "max": torch.maximum,
}


def _unary(one: Function, name: str) -> Function:
    return lambda s, *at: _UNARY[name](one(s, *at))


def _binary(one: Function, other: Function, name: str) -> Function:
    return lambda s, *at: _BINARY[name](one(s, *at), other(s, *at))


def _chosen(one: Function, other: Function, mask: Function) -> Function:
    return lambda s, *at: torch.where(mask(*at), one(s, *at), other(s, *at))


leaves = st.one_of(
    st.just(lambda s, *at: s),
    st.just(lambda s, b, h, q, k: s * SLOPES[h]),
    st.builds(_of_ints, ints),
)
scores = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_unary, inner, st.sampled_from(list(_UNARY))),
        st.builds(_binary, inner, inner, st.sampled_from(list(_BINARY))),
        st.builds(_chosen, inner, inner, masks),
        st.builds(_scaled, inner, st.floats(-2, 2, width=32)),
    ),
    max_leaves=8,
)
quickly = settings(max_examples=40, deadline=None, derandomize=True)


@quickly
@given(masks)
def test_masks(mask: Function) -> None:
    check(mask=lambda b, h, q, k: mask(b, h, q, k), sizes=SIZES)


@quickly
@given(scores)
def test_scores_and_their_derivatives(score: Function) -> None:
    """A function that reads no score has a derivative of 0."""

    def used(s: Any, *at: Any) -> Any:
        return score(s, *at) + 0.5 * s

    bound = trace(used)
    program = bound.program
    values: dict[str, Any] = {
        "b": np.arange(SIZES[0])[:, None, None, None],
        "h": np.arange(SIZES[1])[:, None, None],
        "q": np.arange(SIZES[2])[:, None],
        "k": np.arange(SIZES[3]),
    }
    values |= {it.name: n for it, n in zip(program.numbers, bound.numbers, strict=True)}
    reads = zip(program.reads, bound.tensors, strict=True)
    tensors = {it.name: tensor.numpy() for it, tensor in reads}
    drawn = torch.randn(SIZES, generator=torch.Generator().manual_seed(0)).requires_grad_()
    values["score"] = drawn.detach().double().numpy()
    expected = _vmap_for_bhqkv(used, prefix=(0,))(drawn, *map(torch.arange, SIZES))
    (slope,) = torch.autograd.grad(expected.sum(), drawn)
    assert program.score is not None
    for it, want in (
        (program.score, expected.detach()),
        (derivative(program.score, SCORE, is_uniform), slope),
    ):
        got = np.broadcast_to(it.evaluate(values, tensors), SIZES)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-3, atol=2e-4)
