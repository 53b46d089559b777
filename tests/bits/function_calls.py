"""Calls of canonical kernels with score and mask functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bit_kernels import Kernels
from oracle import CHUNK
from sequence import Sequence

import flashsmith
from flashsmith import masks, scores
from flashsmith.families import DType, KernelConfig, Semantics
from flashsmith.tracing import bind

KERNELS = Kernels(DType.FP16, 64)
HEADS, GROUP, QUERIES = 2, 2, 70
Function = Callable[..., Any]


class Functions(NamedTuple):
    """Keywords of a call, for a number of keys."""

    score_mod: Function | None
    mask: Any

    @classmethod
    def draw(cls, keys: int, *, omits_chunk: bool = False) -> Functions:
        """ALiBi, and few keys of the blocks that a table shows, which may omit a whole chunk."""
        rng = np.random.default_rng(keys)
        table = rng.random((1, HEADS, -(-keys // 32), -(-keys // 48))) < 0.15
        if omits_chunk:
            table[:, 0, :, : CHUNK // 48 + 1] = False
        slopes = rng.uniform(-1e-3, 1e-3, HEADS).astype(np.float32)
        ids = (np.arange(keys) // 11 % 3).astype(np.int32)
        return cls(scores.alibi(slopes), masks.blocks(table, 32, 48) & masks.documents(ids))


@cache
def semantics() -> Semantics:
    functions = Functions.draw(99)
    bound = bind(functions.score_mod, (functions.mask,), None, "end").program
    assert bound is not None
    return Semantics("causal", uneven=True, program=bound.program.exact)


FORWARD = (KERNELS.mma_sync, KERNELS.wgmma, KERNELS.wgmma_in_turns)


def tensors(keys: int) -> tuple[np.ndarray, ...]:
    return Sequence(QUERIES, keys, heads_k=HEADS // GROUP, group=GROUP).tensors


def forward(cfg: KernelConfig, functions: Functions, q: Any, k: Any, v: Any) -> Any:
    return flashsmith.attention(
        *(q, k, v), **functions._asdict(), causal=True, positions="end", bits="canonical",
        return_lse=True, config=cfg, emulate=True,
    )  # fmt: skip


def cached(functions: Functions, q: Any, k: Any, v: Any) -> Any:
    lens = np.array([k.shape[1]], np.int32)
    return flashsmith.attention_with_cache(
        *(q, k, v), cache_lens=lens, **functions._asdict(), bits="canonical", return_lse=True,
        config=KERNELS.decode, emulate=True,
    )  # fmt: skip
