"""Compares traced functions with PyTorch's own evaluation of them, as its eager flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, create_mask

from flashsmith.semantics.program import BoundProgram
from flashsmith.tracing import trace


def check(
    score: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    sizes: tuple[int, int, int, int] = (2, 4, 24, 24),
) -> BoundProgram:
    """Traces the functions, and compares all values of the program with PyTorch's."""
    bound = trace(score, mask)
    program = bound.program
    batch, heads, seq_q, seq_k = sizes
    values: dict[str, Any] = {
        "b": np.arange(batch)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "q": np.arange(seq_q)[:, None],
        "k": np.arange(seq_k),
        "seq_q": seq_q,
        "seq_k": seq_k,
    }
    for number, value in zip(program.numbers, bound.numbers, strict=True):
        values[number.name] = value
    tensors = {
        read.name: tensor if isinstance(tensor, np.ndarray) else _as_numpy(tensor)
        for read, tensor in zip(program.reads, bound.tensors, strict=True)
    }
    if mask is not None:
        assert program.mask is not None
        found = np.broadcast_to(program.mask.evaluate(values, tensors), sizes)
        expected = create_mask(mask, batch, heads, seq_q, seq_k, "cpu").numpy()
        np.testing.assert_array_equal(found, expected)
    if score is not None:
        assert program.score is not None
        scores = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
        values["score"] = scores.double().numpy()
        found = np.broadcast_to(program.score.evaluate(values, tensors), sizes)
        ranges = [torch.arange(size) for size in sizes]
        expected = _vmap_for_bhqkv(score, prefix=(0,))(scores, *ranges).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    return bound


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach()
    return (plain.float() if plain.dtype.is_floating_point else plain).numpy()
