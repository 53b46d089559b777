"""Random intervals and random block lists, each by one kernel in the emulator: rows without keys,
one block, one row, one head, garbage behind counts, and blocks of 64 against tiles of 192."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

import flashsmith
from flashsmith import masks
from flashsmith.families import parse_kernel_name_into_config

pytestmark = pytest.mark.torch
D, BLOCK = 64, 64
CONFIG = parse_kernel_name_into_config(
    "(FP16, 64, 192, 128, 3wg): tma+stages_2+q_buffers_1+regs_32_160+overlap+dynamic"
)
IDS = torch.tensor([0, 1, 1, 0, 2], dtype=torch.int32).repeat(200)
quickly = settings(max_examples=12, deadline=None, derandomize=True)
lengths = st.sampled_from([1, 2, 63, 64, 65, 130, 192, 193, 300])


class Call(NamedTuple):
    """Sizes, and a seed for what a call holds."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    seed: int

    def wrong(self, mask: Any, seen: np.ndarray) -> float:
        """The largest error of a call, of which ``seen`` has the pairs that the mask shows."""
        draw = np.random.default_rng(self.seed + 1)
        shapes = (self.seq_q, self.seq_k, self.seq_k)
        tensors = [
            draw.standard_normal((self.batch, length, self.heads, D)).astype(np.float16)
            for length in shapes
        ]
        given = [torch.from_numpy(it) for it in tensors]
        o = flashsmith.attention(*given, mask=mask, config=CONFIG, emulate=True).numpy()
        q, k, v = (it.astype(float).swapaxes(1, 2) for it in tensors)
        s = np.where(seen, q @ k.swapaxes(2, 3) * D**-0.5, -np.inf)
        weights = np.exp(s - s.max(axis=3, keepdims=True, initial=-1e30))
        total = weights.sum(axis=3, keepdims=True)
        expected = (weights @ v / np.where(total > 0, total, 1)).swapaxes(1, 2)
        error: float = np.abs(o - expected).max()
        return error


calls = st.builds(
    Call, st.integers(1, 2), st.integers(1, 2), lengths, lengths, st.integers(0, 1 << 20)
)


@quickly
@given(calls, st.floats(0, 0.6))
def test_intervals(call: Call, empty: float) -> None:
    """Two for each row: empty ones, such that end before they begin, and such that overlap."""
    draw = np.random.default_rng(call.seed)
    bounds = draw.integers(-5, call.seq_k + 9, (call.seq_q, 4)).astype(np.int32)
    bounds[draw.random(call.seq_q) < empty] = (7, 7, 9, 2)
    k = np.arange(call.seq_k)
    first, second = ((bounds[:, i, None] <= k) & (k < bounds[:, i + 1, None]) for i in (0, 2))
    assert call.wrong(masks.intervals(torch.from_numpy(bounds)), first | second) < 4e-3


@quickly
@given(calls, st.sampled_from([(0.0, 0.0), (0.9, 0.05), (0.4, 0.3), (0.0, 1.0), (0.6, 0.0)]))
def test_block_lists(call: Call, shares: tuple[float, float]) -> None:
    """``shares`` of blocks are absent and full."""
    draw = np.random.default_rng(call.seed)
    rows, columns = -(-call.seq_q // BLOCK), -(-call.seq_k // BLOCK)
    absent, full = shares
    states = draw.choice(3, (rows, columns), p=(absent, 1 - absent - full, full))
    lists: list[Any] = []
    for state in (1, 2):
        chosen = states == state
        count = chosen.sum(axis=1).astype(np.int32)
        indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
        behind = np.arange(columns) >= count[:, None]
        indices[behind] = draw.integers(-(2**31), 2**31, behind.sum())
        lists += [torch.from_numpy(count)[None, None], torch.from_numpy(indices)[None, None]]

    def alike(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return IDS[q_idx] == IDS[kv_idx]

    own = call.seq_q, call.seq_k
    mask = BlockMask(own, *lists, None, None, None, None, (BLOCK, BLOCK), alike)
    state = np.repeat(np.repeat(states, BLOCK, 0), BLOCK, 1)[: call.seq_q, : call.seq_k]
    ids = IDS.numpy()
    same = ids[: call.seq_q, None] == ids[: call.seq_k]
    assert call.wrong(mask, (state == 2) | ((state == 1) & same)) < 4e-3
