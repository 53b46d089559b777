"""flashsmith.masks and flashsmith.scores against brute force and PyTorch's own evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashsmith import masks, scores
from flashsmith.errors import ArgumentError
from flashsmith.tracing import trace
from tests.tracing.eager_flex import check

BATCH, HEADS, N = 2, 4, 24
IDS = torch.randint(0, 4, (BATCH, N)).sort().values
IMAGES = torch.tensor([-1] * 3 + [0] * 4 + [-1] * 5 + [1] * 6 + [-1] * 6)
BOUNDS = torch.randint(0, N, (BATCH, 1, N, 4), dtype=torch.int32)
# A walk through the tree 0 (1 (2 3) 4 (5)), with tokens in the order of the walk.
STARTS = torch.tensor([0, 1, 2, 3, 4, 5])
ENDS = torch.tensor([6, 4, 3, 4, 6, 6])

Sees = Callable[[int, int, int, int], bool]
MASKS: dict[str, tuple[Callable[..., Any], Sees]] = {
    "causal": (masks.causal(), lambda b, h, q, k: k <= q),
    "window": (masks.window(3, 2), lambda b, h, q, k: -3 <= k - q <= 2),
    "left": (masks.window(3), lambda b, h, q, k: k >= q - 3),
    "documents": (masks.documents(IDS), lambda b, h, q, k: bool(IDS[b, q] == IDS[b, k])),
    "causal documents": (
        masks.documents(IDS[1]) & masks.causal(),
        lambda b, h, q, k: bool(IDS[1, q] == IDS[1, k]) and k <= q,
    ),
    "one batch": (masks.documents(IDS[:1]), lambda b, h, q, k: bool(IDS[0, q] == IDS[0, k])),
    "prefix": (masks.prefix_lm(5), lambda b, h, q, k: k < 5 or k <= q),
    "prefixes": (
        masks.prefix_lm(torch.tensor([3, 9])),
        lambda b, h, q, k: k < (3, 9)[b] or k <= q,
    ),
    "chunks": (masks.chunks(7), lambda b, h, q, k: q // 7 == k // 7),
    "global": (
        masks.window_and_global(2, 1, 4),
        lambda b, h, q, k: -2 <= k - q <= 1 or k < 4 or q < 4,
    ),
    "images": (
        masks.image_blocks(IMAGES),
        lambda b, h, q, k: k <= q or bool(IMAGES[q] == IMAGES[k] >= 0),
    ),
    "intervals": (
        masks.intervals(BOUNDS),
        lambda b, h, q, k: any(
            int(BOUNDS[b, 0, q, i]) <= k < int(BOUNDS[b, 0, q, i + 1]) for i in (0, 2)
        ),
    ),
    "blocks": (
        masks.blocks(torch.eye(3, dtype=torch.bool), 8, 8),
        lambda b, h, q, k: q // 8 == k // 8,
    ),
    "union": (
        masks.chunks(5) | masks.window(1, 1),
        lambda b, h, q, k: q // 5 == k // 5 or abs(q - k) <= 1,
    ),
    "not": (~masks.causal(), lambda b, h, q, k: k > q),
}


def brute_force(sees: Sees, sizes: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(
        [
            [[[sees(b, h, q, k) for k in range(sizes[3])] for q in range(sizes[2])] for h in (0,)]
            for b in range(sizes[0])
        ]
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    value, sees = MASKS[name]
    bound = check(mask=value)
    program = bound.program
    assert program.mask is not None
    values: dict[str, Any] = {
        "b": np.arange(BATCH)[:, None, None, None],
        "h": 0,
        "q": np.arange(N)[:, None],
        "k": np.arange(N),
    }
    values |= {it.name: n for it, n in zip(program.numbers, bound.numbers, strict=True)}
    tensors = {it.name: t for it, t in zip(program.reads, bound.tensors, strict=True)}
    found = np.broadcast_to(program.mask.evaluate(values, tensors), (BATCH, 1, N, N))
    np.testing.assert_array_equal(found, brute_force(sees, (BATCH, 1, N, N)))


def test_a_prefix_tree_shows_the_path_from_the_root() -> None:
    check(mask=masks.prefix_tree(STARTS, ENDS), sizes=(1, 1, 6, 6))
    bound = trace(None, masks.prefix_tree(STARTS, ENDS))
    assert bound.program.mask is not None
    tensors = {it.name: t for it, t in zip(bound.program.reads, bound.tensors, strict=True)}
    q, k = np.arange(6)[:, None], np.arange(6)
    found = bound.program.mask.evaluate({"b": 0, "q": q, "k": k}, tensors)
    paths = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 4}, {0, 4, 5}]
    assert [{int(it) for it in np.flatnonzero(row)} for row in found] == paths


def test_all_bounds_are_one_program() -> None:
    other = torch.zeros((1, HEADS, 7, 4), dtype=torch.int32)
    assert trace(None, masks.intervals(BOUNDS)).program.mask is not None
    names = {str(trace(None, masks.intervals(it[None])).program) for it in (BOUNDS[0], other[0])}
    assert len(names) == 2, "broadcast over heads and not are two programs"
    again = torch.ones((3, 1, 50, 4), dtype=torch.int32)
    assert (
        trace(None, masks.intervals(again)).program is trace(None, masks.intervals(BOUNDS)).program
    )


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SCORES = {
    "alibi": scores.alibi(SLOPES),
    "alibi by batch": scores.alibi(torch.rand(BATCH, HEADS)),
    "relative": scores.relative(torch.randn(HEADS, 9), 4),
    "one head": scores.relative(torch.randn(9), 4),
    "t5": scores.t5(torch.randn(8, HEADS), bidirectional=False, max_distance=16),
    "squared": scores.squared_distance(0.01),
    "squared by head": scores.squared_distance(SLOPES),
    "softcap": scores.softcap(3.0),
    "bias": scores.bias(torch.randn(BATCH, 1, N, N)),
    "bias of 2": scores.bias(torch.randn(N, N)),
    "sum": scores.softcap(3.0) + scores.alibi(SLOPES),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(score=SCORES[name])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_are_those_of_transformers(bidirectional: bool) -> None:
    pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    from transformers.models.t5 import modeling_t5 as t5

    positions = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(positions, bidirectional, 32, 128)
    found = scores._t5_buckets(positions.numpy(), 32, bidirectional, 128)
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize(
    "call",
    [
        lambda: masks.documents(torch.zeros(1, 2, 3)),
        lambda: masks.intervals(torch.zeros(2, 3)),
        lambda: masks.blocks(torch.zeros(2, 2), 0),
        lambda: scores.alibi(torch.zeros(1, 2, 3)),
        lambda: scores.bias(torch.zeros(3)),
    ],
)
def test_other_shapes_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="give"):
        call()
