"""attention_with_cache() with score and mask functions: absolute positions, and skipped blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cache_calls import (
    BLOCK,
    CAPACITY,
    CHUNKS,
    EARLY,
    GROUP,
    ROWS,
    Cache,
    Emulation,
    Function,
    in_documents,
    listed,
    run,
)
from plain_run import full_except
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as eager_flex_attention

import flashsmith
from flashsmith import masks, scores
from flashsmith.chooser.functions import CacheSizes, CallFunctions, bound_over_cache
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.semantics.ranges import keys_alike
from flashsmith.tracing import trace
from ptxlab.checks import all_checks


def check(
    cache: Cache,
    cfg: KernelConfig | None,
    score: Function | None = None,
    mask: Function | None = None,
    *,
    causal: bool = True,
    paged: bool = False,
    **asked: Any,
) -> None:
    found = run(cache, cfg, paged=paged, score_mod=score, mask=mask, causal=causal, **asked)
    for got, want in zip(found, cache.expected(score, mask, causal=causal), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize(("queries", "paged"), [(3, True), (70, False)], ids=["few", "chunks"])
def test_documents(queries: int, *, paged: bool) -> None:
    cache = Cache((queries, 150, 317), (queries,) * 3, seed=queries)
    check(cache, CHUNKS, *in_documents(cache), paged=paged)


def omitting_blocks(queries: int) -> tuple[Cache, np.ndarray, Function]:
    """Sequences of which one sees nothing, and one only its first and last blocks."""
    cache = Cache((queries, 300, 317, 255), (queries,) * 4, seed=queries)
    table, mask = listed(cache)
    table[1] = False
    table[2, :, :, 1:9] = False
    return cache, table, mask


@pytest.mark.parametrize(
    ("queries", "paged"),
    [
        pytest.param(1, False, id="a query-dense", marks=pytest.mark.full),
        pytest.param(1, True, id="a query-paged"),
        pytest.param(3, False, id="few-dense"),
        pytest.param(3, True, id="few-paged", marks=pytest.mark.full),
        pytest.param(70, False, id="chunks-dense"),
        pytest.param(70, True, id="chunks-paged"),
    ],
)
def test_blocks_that_a_table_omits_are_not_read(queries: int, *, paged: bool) -> None:
    """Warps that share stages read a whole step if a query sees any of its keys."""
    cache, table, mask = omitting_blocks(queries)
    cache.hide_unread(table, CHUNKS.B_c if queries > 16 else BLOCK)
    check(cache, CHUNKS, None, mask, paged=paged)


@pytest.mark.parametrize("sm_count", [2, 12], ids=["two SMs", "clusters"])
@pytest.mark.parametrize(
    ("cfg", "queries", "together"),
    [
        pytest.param(EARLY, 3, BLOCK, id="own keys"),
        pytest.param(ROWS, 20, ROWS.B_c, id="own rows", marks=pytest.mark.full),
    ],
)
def test_hopper_kernels_skip_them_too(
    cfg: KernelConfig, queries: int, together: int, sm_count: int
) -> None:
    cache, table, mask = omitting_blocks(queries)
    cache.hide_unread(table, together)
    call = Emulation(cfg, 90, None, mask, sm_count)
    for paged, append in ((False, False), (True, True)):
        checks = all_checks() if paged else ()
        assert call.wrong(cache, paged=paged, append=append, observers=checks) == ""


@pytest.mark.full
def test_rows_of_warps_in_documents() -> None:
    cache = Cache((20, 150, 317), (20,) * 3, seed=20)
    check(cache, ROWS, *in_documents(cache), paged=True)


@pytest.mark.full
def test_packed_queries_in_a_rolling_cache() -> None:
    cache = Cache((90, 0, 317, 200), (4, 0, 1, 80), seed=4, dropped=(0, 37, 200, 16))
    check(cache, CHUNKS, *in_documents(cache), paged=True)


@pytest.mark.parametrize("queries", [1, 70])
def test_blocks_of_a_rolling_cache_count_dropped_keys(queries: int) -> None:
    cache = Cache((317, 96, 250), (queries,) * 3, seed=queries, dropped=(7, 0, 250))
    check(cache, CHUNKS, None, listed(cache)[1])


@pytest.mark.parametrize("split", ["invariant", "free"])
def test_a_sequence_has_its_own_outputs_in_any_batch(split: str) -> None:
    whole = Cache((317, 40, 255), (3,) * 3, seed=8)
    table, mask = listed(whole)
    check(whole, CHUNKS, None, mask, split=split)
    if split == "free":
        return
    few = replace(whole, lens=(255, 317), queries=(3, 3))
    for of_few, of_all in ((few.k, whole.k), (few.v, whole.v), (few.q, whole.q)):
        of_few[0], of_few[1] = of_all[2], of_all[0]
    of_few = masks.blocks(table[[2, 0]], None, BLOCK, group=GROUP)
    first, _, last = run(whole, CHUNKS, paged=True, mask=mask)
    for got, want in zip(run(few, CHUNKS, paged=False, mask=of_few), (last, first), strict=True):
        assert np.array_equal(got, want)


def test_a_mask_that_is_a_window_narrows_the_window() -> None:
    narrowed = CallFunctions(mask=masks.window(20))
    assert bound_over_cache(narrowed, (False, (40, 5)), CacheSizes()) == (None, False, (20, 5))
    causal = CallFunctions(mask_mod=masks.causal())
    assert bound_over_cache(causal, (False, (None, None)), CacheSizes()) == (
        None,
        True,
        (None, None),
    )


def test_rows_of_tensors_are_the_queries() -> None:
    cache = Cache((317, 90), (3, 3), seed=7)
    mask = cache.draw.random((2, 1, 3, CAPACITY)) < 0.5
    bias = cache.draw.standard_normal((4, 3, CAPACITY)).astype(np.float32)

    def row(b: int, q: np.ndarray) -> np.ndarray:
        return q - cache.lens[b] + 3

    expected = cache.expected(
        lambda s, b, h, q, k: s + bias[h, row(b, q), k],
        lambda b, h, q, k: mask[b, 0, row(b, q), k],
        causal=True,
    )
    found = run(cache, CHUNKS, paged=True, mask=mask, bias=bias)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


def value_over_a_cache(name: str, draw: np.random.Generator) -> Function:
    """A value of flashsmith.masks for two sequences of up to CAPACITY keys."""
    starts = np.arange(CAPACITY, dtype=np.int32)
    ends = (starts + draw.integers(1, 200, CAPACITY)).astype(np.int32)
    first = draw.integers(0, 200, (2, 1, CAPACITY, 2))
    bounds = np.stack((first, first + draw.integers(0, 90, first.shape)), axis=4)
    made = {
        "prefix": lambda: masks.prefix_lm(np.array([30, 200], np.int32)),
        "chunks": lambda: masks.chunks(48) & masks.causal(),
        "window and global": lambda: masks.window_and_global(20, 0, 5),
        "tree": lambda: masks.prefix_tree(starts, ends),
        "images": lambda: masks.image_blocks(np.repeat(np.arange(-1, 9), 32).astype(np.int32)),
        "intervals": lambda: masks.intervals(bounds.reshape(2, 1, CAPACITY, 4).astype(np.int32)),
        "not a document": lambda: ~masks.documents((starts // 70)[None].repeat(2, 0)),
    }
    value: Function = made[name]()
    return value


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name",
    ["prefix", "chunks", "window and global", "tree", "images", "intervals", "not a document"],
)
def test_values_of_masks(name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for queries in (1, 5, 70):
        lens = tuple(draw.integers(queries, CAPACITY + 1, 2).tolist())
        cache = Cache(lens, (queries,) * 2, seed=seed)
        mask = value_over_a_cache(name, cache.draw)
        check(cache, CHUNKS, None, mask, causal=False, paged=bool(seed))


# --- BlockMasks -----------------------------------------------------------------------------------


def listed_blocks(seq_q: int, seq_k: int, function: Function | None = None) -> BlockMask:
    function = function or masks.causal()
    size = {"BLOCK_SIZE": (64, 32), "device": "cpu"}
    return create_block_mask(function, None, None, seq_q, seq_k, **size)


class Listed(NamedTuple):
    """Random lists, with garbage behind their counts, of a random function of positions."""

    block_mask: BlockMask
    states: np.ndarray
    ids: np.ndarray

    @classmethod
    def draw(cls, draw: np.random.Generator, batch: int, heads: int) -> Listed:
        rows, columns = -(-CAPACITY // 64), -(-CAPACITY // BLOCK)
        states = draw.choice(3, (batch, heads, rows, columns), p=(0.4, 0.3, 0.3))
        lists = []
        for state in (1, 2):
            chosen = states == state
            indices = np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)
            count = chosen.sum(-1).astype(np.int32)
            indices[np.arange(columns) >= count[..., None]] = draw.choice([-7, 1 << 30])
            lists += [torch.from_numpy(count), torch.from_numpy(indices)]
        ids = draw.integers(0, 3, CAPACITY).astype(np.int32)
        read = torch.from_numpy(ids)

        def alike(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return read[q_idx] == read[kv_idx]

        lengths = CAPACITY, CAPACITY
        made = BlockMask(lengths, *lists, None, None, None, None, (64, BLOCK), alike)
        return cls(made, states, ids)

    def __call__(self, b: Any, h: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        batch, heads, *_ = self.states.shape
        state = self.states[b % batch, h % heads, q // 64, k // BLOCK]
        return (state == 2) | ((state == 1) & (self.ids[q] == self.ids[k]))


def check_block_mask(cache: Cache, mask: BlockMask, says: Function, *, paged: bool) -> None:
    tensors = {name: torch.tensor(it) for name, it in cache.call(paged=paged).items()}
    asked = {"mask": mask, "config": CHUNKS, "emulate": True}
    found = cache.split(flashsmith.attention_with_cache(**tensors, **asked).numpy())
    for got, want in zip(found, cache.expected(None, says, causal=True), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize(
    ("queries", "paged"),
    [
        pytest.param((1, 1, 1), False, id="a query-dense", marks=pytest.mark.full),
        pytest.param((1, 1, 1), True, id="a query-paged"),
        pytest.param((70, 3, 1), False, id="packed-dense", marks=pytest.mark.full),
        pytest.param((70, 3, 1), True, id="packed-paged", marks=pytest.mark.full),
    ],
)
def test_a_block_mask_of_positions(queries: tuple[int, ...], *, paged: bool) -> None:
    cache = Cache((317, 64, 255), queries, seed=len(set(queries)))
    made = Listed.draw(cache.draw, *((3, 4) if paged else (1, 1)))
    check_block_mask(cache, made.block_mask, made, paged=paged)


@pytest.mark.parametrize("paged", full_except([False, True], True), ids=["dense", "paged"])
def test_a_sliced_block_mask_of_the_queries(*, paged: bool) -> None:
    """FlexAttention's way to decode: a block of rows, and a function that adds an offset."""
    cache = Cache((201, 201), (3, 3), seed=5)
    made = Listed.draw(cache.draw, 1, 4)
    whole, offset = made.block_mask, torch.tensor(198)
    row = whole[:, :, offset[None] // 64]
    row.seq_lengths = 3, CAPACITY
    row.mask_mod = lambda b, h, q, k: whole.mask_mod(b, h, q + offset, k)
    check_block_mask(cache, row, made, paged=paged)


def test_a_block_mask_of_a_window_is_the_window() -> None:
    made = listed_blocks(CAPACITY, CAPACITY, masks.window(20))
    functions, over = CallFunctions(mask=made), CacheSizes(None, 1, CAPACITY)
    assert bound_over_cache(functions, (True, (None, None)), over) == (None, False, (20, 0))


def test_a_block_mask_over_a_rolling_cache_is_refused() -> None:
    cache = Cache((317, 96), (3, 3), dropped=(7, 0))
    with pytest.raises(ArgumentError, match="kv_offset: given, and a BlockMask's lists count"):
        run(cache, None, paged=False, mask=listed_blocks(CAPACITY, CAPACITY))


def test_flex_attention_says_the_same() -> None:
    cache = Cache((317, 90), (3, 3), seed=6)
    ids = torch.tensor(np.sort(cache.draw.integers(0, 5, (2, CAPACITY)), axis=1).astype(np.int32))
    slopes = torch.tensor(cache.draw.uniform(0, 0.4, 4).astype(np.float32))
    tensors = {name: torch.tensor(it) for name, it in cache.call(append=False).items()}
    o = flashsmith.attention_with_cache(
        **tensors, score_mod=scores.alibi(slopes), mask=masks.documents(ids), config=CHUNKS,
        emulate=True,
    )  # fmt: skip
    for b, length in enumerate(cache.lens):
        at, own = length - 3, ids[b]

        def seen(_: Any, h: Any, i: Any, j: Any, at: int = at, own: Any = own) -> Any:
            return (own[i + at] == own[j]) & (j <= i + at)

        def alibi(s: Any, _: Any, h: Any, i: Any, j: Any, at: int = at) -> Any:
            return s - slopes[h] * (i + at - j).abs()

        names = "q", "k_cache", "v_cache"
        rows = [tensors[it][b : b + 1, :length].transpose(1, 2).float() for it in names]
        block_mask = create_block_mask(seen, None, None, 3, length, device="cpu")
        want = eager_flex_attention(*rows, alibi, block_mask, enable_gqa=True)
        torch.testing.assert_close(o[b].float(), want[0].transpose(0, 1), atol=2e-3, rtol=0)


def test_the_kernel_of_a_function_does_not_depend_on_the_batch() -> None:
    program = trace(None, masks.blocks(np.ones((1, 9), bool), None, 64)).program
    device = device_spec(90)
    found = set()
    for batch, seq_k, packed in ((1, 900, False), (64, 100_000, True)):
        semantics = Semantics("causal", packed=packed, uneven=True, program=program)
        problem = Problem.parse(f"b{batch} s1:{seq_k} h32:8 d128 bf16 decode")
        found.add(flashsmith.choose(replace(problem, semantics=semantics), device).config)
    assert len(found) == 1


def test_chunks_of_a_prompt_with_functions_take_kernels_without_warpgroups() -> None:
    device = device_spec(90)
    plain = Problem.parse("b4 s4096:8192 h32:8 d128 bf16 causal decode")
    program = trace(None, masks.blocks(np.ones((1, 9), bool), None, 64)).program
    semantics = replace(plain.semantics, uneven=True, program=program)
    assert flashsmith.choose(plain, device).config.chunk_warpgroups
    choice = flashsmith.choose(replace(plain, semantics=semantics), device)
    assert choice.config.chunk_rows
    assert not choice.config.chunk_warpgroups
    assert "adapted to a score or mask function" in str(choice)


@pytest.mark.parametrize(
    ("mask", "alike"),
    [
        (masks.blocks(np.ones((2, 1, 9), bool), None, 64, group=3), 64),
        (masks.blocks(np.ones((2, 9), bool), 16, 48) | masks.blocks(np.ones((2, 9), bool), 64), 16),
        (masks.documents(np.zeros(9, np.int32)), 1),
        (masks.blocks(np.ones((2, 9), bool), 64) & masks.causal(), 1),
        (lambda b, h, q, k: (q // 2 == k // 2) & (h < 3), 2),
        (lambda b, h, q, k: 64 // (k + 1) > b, 1),
        (lambda b, h, q, k: q > 3, 1 << 28),
    ],
)
def test_how_many_neighbouring_keys_a_mask_sees_alike(mask: Function, alike: int) -> None:
    assert keys_alike(trace(None, mask).program.mask) == alike


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mask": np.ones((2, 1, 3, 9), bool)}, r"mask: shape \(2, 1, 3, 9\); the scores"),
        ({"bias": np.ones((3, 3, 9), np.float32)}, r"bias: shape \(3, 3, 9\); the scores"),
        ({"mask": listed_blocks(200, 200)}, "mask: a BlockMask of 200 queries and 200 keys, and"),
        ({"mask": listed_blocks(2, CAPACITY)}, "or of 3 queries, those of this call, with 320"),
        ({"mask": listed_blocks(400, 400)[:, :, 3]}, "of which 1 blocks of 64 are left; set its"),
        ({"mask": 3}, "mask=3: give a function"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run(Cache((9,), (3,)), None, paged=False, **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"block_q": None, "block_k": 0}, "sizes of at least 1"),
        ({"block_q": None}, "sizes of at least 1"),
        ({"block_q": 4, "group": 0}, "group=0"),
        ({"block_q": None, "block_k": 4}, r"shape \(2, 9\) with block_q=None"),
    ],
)
def test_tables_of_blocks_are_checked(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        masks.blocks(np.ones((2, 9), bool), **asked)
