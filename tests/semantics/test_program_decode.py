"""Score and mask functions over a cache: rows count from the sequence's first key."""

from __future__ import annotations

import numpy as np
import pytest
from program_calls import PROGRAMS, Call

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Semantics
from flashsmith.families.mma_sync_decode import MMA_SYNC_DECODE
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors, run_decode
from flashsmith.semantics.program import BoundProgram

BATCH, CAPACITY, HEADS_Q, HEADS_K, D, PAGE = 3, 160, 4, 2, 56, 16
LENS = 70, 0, 150
# Warps with their own keys, with their own rows, and chunks of many rows.
CONFIGS = MMA_SYNC_DECODE.proof_configs(DType.FP16, D)
KEYS = CONFIGS[0]
ROWS = next(cfg for cfg in CONFIGS if cfg.own_rows)
CHUNKS = next(cfg for cfg in CONFIGS if cfg.chunk_rows)


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    b: int,
    h: int,
    bound: BoundProgram,
    *,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The output and the log-sum-exp of one head's queries, the last ones of a sequence."""
    program, keys, n = bound.program, len(k), len(q)
    at = {"b": b, "h": h, "q": np.arange(n)[:, None] + keys - n, "k": np.arange(keys)}
    values = {name: np.asarray(it) for name, it in (at | {"seq_q": keys, "seq_k": keys}).items()}
    values |= {
        it.name: it_value for it, it_value in zip(program.numbers, bound.numbers, strict=True)
    }
    tensors = {it.name: tensor for it, tensor in zip(program.reads, bound.tensors, strict=True)}
    scores = q.astype(float) @ k.astype(float).T * D**-0.5
    if program.score is not None:
        scores = program.score.evaluate({**values, "score": scores}, tensors, np)
    seen = (values["k"] <= values["q"]) | (not causal)
    if program.mask is not None:
        seen = seen & program.mask.evaluate(values, tensors, np)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    return weights @ v.astype(float) / np.where(total > 0, total, 1), lse


def in_pages(cache: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The cache in pages, in random order, and its page table."""
    pages = cache.reshape(-1, PAGE, HEADS_K, D)
    order = draw.permutation(len(pages))
    table = np.argsort(order).astype(np.int32).reshape(BATCH, -1)
    return np.ascontiguousarray(pages[order]), table


@pytest.mark.parametrize(
    ("cfg", "name", "queries", "paged", "causal"),
    [
        (KEYS, "alibi_in_documents", 3, True, True),
        (KEYS, "widths", 1, False, False),
        (ROWS, "alibi_in_documents", 20, False, True),
        (CHUNKS, "alibi_in_documents", 70, True, True),
    ],
    ids=["own keys", "one query", "own rows", "chunks"],
)
def test_over_a_cache(
    cfg: KernelConfig, name: str, queries: int, *, paged: bool, causal: bool
) -> None:
    draw = np.random.default_rng(queries)
    call = Call(CAPACITY, CAPACITY, BATCH, HEADS_Q, HEADS_K, D)
    bound = PROGRAMS[name](call, draw)
    q = draw.standard_normal((BATCH, queries, HEADS_Q, D)).astype(np.float16)
    k, v = draw.standard_normal((2, BATCH, CAPACITY, HEADS_K, D)).astype(np.float16)
    new = draw.standard_normal((2, BATCH, queries, HEADS_K, D)).astype(np.float16)
    lens = np.maximum(np.array(LENS) - queries, 0).astype(np.int32)
    caches, table = [k.copy(), v.copy()], None
    if paged:
        (k_pages, table), (v_pages, _) = (in_pages(it, np.random.default_rng(9)) for it in caches)
        caches = [k_pages, v_pages]
    o, lse = run_decode(
        MMA_SYNC_DECODE.adapt_to_program(cfg, Semantics(uneven=True, program=bound.program)),
        DecodeTensors(q, *caches, lens, page_table=table, k=new[0], v=new[1]),
        DecodeOptions(causal=causal, return_lse=True, program=bound),
        True,
    )
    for b, length in enumerate(lens):
        for cache, added in ((k, new[0]), (v, new[1])):
            cache[b, length : length + queries] = added[b]
        keys = length + queries
        for h in range(HEADS_Q):
            own = h // (HEADS_Q // HEADS_K)
            parts = q[b, :, h], k[b, :keys, own], v[b, :keys, own]
            want, want_lse = expected(*parts, b, h, bound, causal=causal)
            np.testing.assert_allclose(o[b, :, h], want, atol=2e-3)
            np.testing.assert_allclose(lse[b, h], want_lse, atol=1e-4)


def test_canonical_bits_are_refused() -> None:
    bound = PROGRAMS["alibi"](Call(), np.random.default_rng(0))
    q = np.zeros((1, 1, HEADS_Q, D), np.float16)
    cache = np.zeros((1, 16, HEADS_K, D), np.float16)
    tensors = DecodeTensors(q, cache, cache.copy(), np.zeros(1, np.int32))
    with pytest.raises(ArgumentError, match="bits"):
        run_decode(KEYS, tensors, DecodeOptions(bits="canonical", program=bound), True)
