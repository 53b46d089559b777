"""Rows with score and mask functions have the same bits whichever way they are computed.

Decode kernels compute the tiles that a few rows see, forward kernels those that many do: equal bits
show that what a mask hides changes none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import shared_kernels
from function_calls import (
    FORWARD,
    GROUP,
    HEADS,
    KERNELS,
    QUERIES,
    Functions,
    cached,
    forward,
    semantics,
    tensors,
)
from oracle import CHUNK
from plain_run import full_after
from rounding import unrounded_of
from sequence import Sequence, differing

import flashsmith
from flashsmith import masks
from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.semantics.program_cuda import program_struct
from flashsmith.tracing import trace

for _cfg in (*FORWARD[:2], KERNELS.decode):
    shared_kernels.want([_cfg], semantics(), 90)


@cache
def expected(keys: int, omits_chunk: bool) -> Any:
    return forward(FORWARD[0], Functions.draw(keys, omits_chunk=omits_chunk), *tensors(keys))


LENGTHS = [(330, False), (CHUNK + 330, True)]


@pytest.mark.parametrize(("keys", "omits_chunk"), LENGTHS)
@pytest.mark.parametrize("cfg", full_after(1, FORWARD[1:]), ids=["wgmma", "two warpgroups"])
def test_forward_kernels(cfg: KernelConfig, keys: int, omits_chunk: bool) -> None:
    found = forward(cfg, Functions.draw(keys, omits_chunk=omits_chunk), *tensors(keys))
    for got, want in zip(found, expected(keys, omits_chunk), strict=True):
        assert differing(got, want) == 0


@pytest.mark.parametrize(("keys", "omits_chunk"), LENGTHS)
@pytest.mark.parametrize("count", [1, 7])
def test_over_a_cache(count: int, keys: int, omits_chunk: bool) -> None:
    """The last rows, and rows before them, which see fewer keys."""
    functions, (q, k, v) = Functions.draw(keys, omits_chunk=omits_chunk), tensors(keys)
    o, lse = expected(keys, omits_chunk)
    for end in (QUERIES, QUERIES - 29):
        rows, length = slice(end - count, end), keys - QUERIES + end
        found = cached(functions, q[:, rows], k[:, :length], v[:, :length])
        assert differing(found[0], o[:, rows]) == 0
        assert differing(found[1], lse[..., rows]) == 0


@pytest.mark.parametrize("shown", ["few", "in the second chunk", "none"])
def test_tiles_without_a_visible_key_are_not_read(shown: str) -> None:
    """They may hold NaN."""
    keys, tile = CHUNK + 330, KERNELS.decode.B_c
    functions, (q, k, v) = Functions.draw(keys), tensors(keys)
    table = np.random.default_rng(3).random((1, HEADS, -(-keys // 32), -(-keys // 48))) < 0.04
    table[..., : CHUNK // 48 + 1] &= shown == "few"
    table &= shown != "none"
    ids = (np.arange(keys) // 11 % 3).astype(np.int32)
    functions = functions._replace(mask=masks.blocks(table, 32, 48) & masks.documents(ids))
    rows, columns = keys - 2 + np.arange(2)[:, None], np.arange(keys)
    seen = np.any([functions.mask(0, h, rows, columns) for h in range(HEADS)], axis=(0, 1))
    seen_tiles = [seen[first : first + tile].any() for first in range(0, keys, tile)]
    hidden = ~np.repeat(seen_tiles, tile)[:keys]
    assert hidden.any()
    assert hidden.all() == (shown == "none")
    o, lse = forward(FORWARD[0], functions, q, k, v)
    caches = [np.where(hidden[:, None, None], np.float16(np.nan), it) for it in (k, v)]
    found = cached(functions, q[:, -2:], *caches)
    for got, wanted in zip(found, (o[:, -2:], lse[..., -2:]), strict=True):
        assert not np.isnan(wanted).any()
        assert differing(got, wanted) == 0


@pytest.mark.parametrize(
    "cfg", full_after(1, [KERNELS.wgmma, KERNELS.mma_sync]), ids=["wgmma", "mma_sync"]
)
def test_a_mask_of_equal_meaning(cfg: KernelConfig) -> None:
    """A tensor that shows what causal=True shows has its bits, which are the specification's."""
    keys = CHUNK + 76
    sequence = Sequence(QUERIES, keys, heads_k=HEADS // GROUP, group=GROUP)
    shown = np.tri(QUERIES, keys, keys - QUERIES, dtype=bool)
    found = flashsmith.attention(
        *sequence.tensors, mask=shown, bits="canonical", return_lse=True, config=cfg, emulate=True
    )
    assert sequence.differing(found) == 0


@pytest.mark.parametrize("cfg", [*FORWARD, KERNELS.decode], ids=str)
def test_every_sum_and_product_names_its_rounding(cfg: KernelConfig) -> None:
    assert unrounded_of(cfg, 90, semantics()) == []


def test_scores_do_not_depend_on_where_a_key_is_in_a_tile() -> None:
    """Free kernels compute with a tile's first key and the column apart."""
    program = trace(lambda s, b, h, q, k: s + 0.3 * (k - q), None).program
    assert "column)" in program_struct(program).replace("key.base + key.column", "")
    exact = program.exact
    assert exact.exact is exact
    assert exact != program
    assert (exact.score, exact.mask) == (program.score, program.mask)
    text = program_struct(exact).replace("key.base + key.column", "")
    assert "column" not in text.replace("row.base + row.column", "")
    assert "__fadd_rn(score, __fmul_rn(" in text


def test_chosen_kernels_are_canonical() -> None:
    device = device_spec(90)
    program = semantics().program
    for text in ("b2 s4096 h32:8 d128 bf16 causal", "b8 s1:8192 h32:8 d128 bf16 causal decode"):
        problem = Problem.parse(f"{text} canonical")
        changed = Semantics("causal", uneven=True, program=program)
        problem = replace(problem, semantics=changed)
        assert flashsmith.choose(problem, device).config.canonical == 1
