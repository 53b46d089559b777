"""attention_with_cache(): what is right, its two promises, appending, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import shared_kernels

import flashsmith
from flashsmith import parse_kernel_name_into_config
from flashsmith.chooser import decode
from flashsmith.chooser.batch_invariant import without_batch
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.errors import ArgumentError, KernelNotBuiltError
from flashsmith.families import DType, Problem, Semantics, device_spec, is_legal
from flashsmith.runtime import fallback_kernels
from flashsmith.verify.reference import compute_references
from flashsmith.verify.tolerance import compare

# Parts of 64 keys: sequences of a few hundred have several.
CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
shared_kernels.want([CFG], Semantics("causal"))
shared_kernels.want([CFG], Semantics("causal", packed=True, uneven=True))
HEADS, HEADS_K, D = 4, 2, 64
NAN = np.float16("nan")


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    shared_kernels.load([CFG], Semantics("causal"))
    shared_kernels.load([CFG], Semantics("causal", packed=True, uneven=True))


def run(*tensors: Any, **keywords: Any) -> Any:
    return flashsmith.attention_with_cache(*tensors, config=CFG, emulate=True, **keywords)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(np.float16)


class Batch:
    """Sequences with keys, values and queries of their own, from a seed each."""

    def __init__(self, lens: tuple[int, ...], queries: tuple[int, ...] = (), seed: int = 0) -> None:
        self.lens, self.queries = lens, queries or (1,) * len(lens)
        drawn = [np.random.default_rng([seed, n, length]) for n, length in enumerate(lens)]
        self.keys = [normal(rng, n, HEADS_K, D) for rng, n in zip(drawn, lens, strict=True)]
        self.values = [normal(rng, n, HEADS_K, D) for rng, n in zip(drawn, lens, strict=True)]
        self.q = [normal(rng, n, HEADS, D) for rng, n in zip(drawn, self.queries, strict=True)]

    def dense(self, capacity: int = 0, which: list[int] | None = None) -> dict[str, Any]:
        """A call on dense caches of NaN where there is no key; of some sequences."""
        chosen = list(range(len(self.lens))) if which is None else which
        capacity = capacity or max(self.lens[i] for i in chosen)
        caches = [np.full((len(chosen), capacity, HEADS_K, D), NAN) for _ in "kv"]
        for cache, contents in zip(caches, (self.keys, self.values), strict=True):
            for row, i in enumerate(chosen):
                cache[row, : self.lens[i]] = contents[i]
        return self._call(caches, chosen)

    def paged(self, page: int, seed: int = 0) -> dict[str, Any]:
        """The same in shuffled pages amid pages of NaN; unused entries are -1."""
        used = [-(-n // page) for n in self.lens]
        free = np.random.default_rng(seed).permutation(sum(used) + 3).tolist()
        table = np.full((len(self.lens), max(used) + 1), -1, np.int32)
        caches = [np.full((len(free), page, HEADS_K, D), NAN) for _ in "kv"]
        for i, n in enumerate(self.lens):
            table[i, : used[i]] = [free.pop() for _ in range(used[i])]
            at = np.arange(n)
            for cache, contents in zip(caches, (self.keys, self.values), strict=True):
                cache[table[i, at // page], at % page] = contents[i]
        return self._call(caches, list(range(len(self.lens)))) | {"page_table": table}

    def _call(self, caches: list[np.ndarray], chosen: list[int]) -> dict[str, Any]:
        queries = [self.q[i] for i in chosen]
        call: dict[str, Any] = {
            "k_cache": caches[0],
            "v_cache": caches[1],
            "cache_lens": np.array([self.lens[i] for i in chosen], np.int32),
        }
        if len({len(q) for q in queries}) == 1:
            return call | {"q": np.stack(queries)}
        offsets = np.cumsum([0, *map(len, queries)]).astype(np.int32)
        return call | {"q": np.concatenate(queries), "cu_seqlens_q": offsets}

    def check(self, o: np.ndarray, lse: np.ndarray, lens: tuple[int, ...] | None = None) -> None:
        """Raises AssertionError unless o and the LSE are right, all rows of them."""
        packed = o.reshape(-1, HEADS, D)
        rows = lse if lse.ndim == 2 else np.moveaxis(lse, 1, 0).reshape(HEADS, -1)
        references = compute_references(
            np.concatenate(self.q), np.concatenate(self.keys), np.concatenate(self.values),
            D**-0.5, causal=True, lens_q=self.queries, lens_k=lens or self.lens,
        )  # fmt: skip
        verdict = compare(DType.FP16, packed, rows, references, lens_q=self.queries)
        assert verdict.ok, verdict.reasons


MIXED = (300, 0, 1, 64, 65, 129, 15)


def test_sequences_of_any_length_are_right_and_every_row_is_written() -> None:
    # Rows after the first sequence were once left unwritten (pytorch#194167).
    batch = Batch(MIXED)
    call = batch.dense()
    out = np.full_like(call["q"], NAN)
    o, lse = run(**call, out=out, return_lse=True)
    assert o is out
    batch.check(o, lse)
    assert (o[1] == 0).all()
    assert (lse[1] == -np.inf).all()


def test_paged_equals_dense_bitwise_whatever_the_page_and_the_order() -> None:
    batch = Batch(MIXED)
    o, lse = run(**batch.dense(), return_lse=True)
    for page in (1, 16, 24, 256):
        paged, paged_lse = run(**batch.paged(page, seed=page), return_lse=True)
        np.testing.assert_array_equal(paged.view(np.uint16), o.view(np.uint16))
        np.testing.assert_array_equal(paged_lse, lse)


def test_a_sequence_has_the_same_bits_alone_in_any_batch_and_at_any_capacity() -> None:
    # What vllm#27433, sglang#10278, pytorch#176905, FA#1897 and FI#2424 ask for, or pay for with
    # one part a sequence.
    batch = Batch((300, 0, 129, 64))
    together = run(**batch.dense(capacity=320))
    for i in (0, 2, 3):
        alone = run(**batch.dense(which=[i]))
        np.testing.assert_array_equal(alone[0].view(np.uint16), together[i].view(np.uint16))
    turned = run(**batch.dense(which=[3, 2, 1, 0]))
    np.testing.assert_array_equal(turned[::-1].view(np.uint16), together.view(np.uint16))


def test_a_ragged_call_gives_a_sequence_the_bits_of_a_call_of_its_own() -> None:
    # One token beside a chunk of a prompt, and a sequence without queries.
    batch = Batch((200, 130, 70), (1, 5, 0))
    o, lse = run(**batch.dense(), return_lse=True)
    batch.check(o, lse)
    alone = run(**batch.dense(which=[0]))
    np.testing.assert_array_equal(alone[0].view(np.uint16), o[:1].view(np.uint16))
    chunk = run(**batch.dense(which=[1]))
    np.testing.assert_array_equal(chunk[0].view(np.uint16), o[1:6].view(np.uint16))


def test_two_calls_give_the_same_bits_and_a_free_split_the_same_numbers() -> None:
    batch = Batch((300, 17))
    call = batch.dense()
    first, second = run(**call), run(**call)
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))
    o, lse = run(**call, split="free", return_lse=True)
    batch.check(o, lse)


@pytest.mark.parametrize("page", [0, 16])
def test_keys_are_appended_at_the_lengths_and_nothing_else_changes(page: int) -> None:
    # At a page's end, its beginning, and the last slot: FA#772 was wrong next to a boundary.
    lens, new = (15, 16, 0, 63), 1
    batch = Batch(tuple(n + new for n in lens))
    call = batch.paged(page) if page else batch.dense(capacity=64)
    call["cache_lens"] = np.array(lens, np.int32)
    wanted = {name: call[name].copy() for name in ("k_cache", "v_cache")}
    for name, contents in (("k", batch.keys), ("v", batch.values)):
        call[name] = np.stack([it[-new:] for it in contents])
        cache = call[f"{name}_cache"]
        for i, n in enumerate(lens):
            at = (call["page_table"][i, n // page], n % page) if page else (i, n)
            assert (cache[at] == contents[i][-1]).all()
            cache[at] = NAN
    given = {name: call[name].copy() for name in ("k_cache", "v_cache", "cache_lens")}
    o, lse = run(**call, return_lse=True)
    batch.check(o, lse)
    for name, cache in wanted.items():
        np.testing.assert_array_equal(call[name].view(np.uint16), cache.view(np.uint16))
        assert (call[name].view(np.uint16) != given[name].view(np.uint16)).any()
    np.testing.assert_array_equal(call["cache_lens"], given["cache_lens"])  # not advanced


def test_surplus_ctas_of_a_large_capacity_touch_nothing() -> None:
    # A batch padded with empty sequences, in a cache far larger than it needs (FI#4002,
    # sglang#31387): their rows are written with 0, and nobody else's.
    batch = Batch((70, *[0] * 5))
    call = batch.dense(capacity=2048)
    whole = np.full((8, 1, HEADS, D), NAN)
    o = run(**call, out=whole[1:7])
    batch.check(o, run(**call, return_lse=True)[1])
    assert np.isnan(whole[[0, 7]]).all()
    assert (o[1:] == 0).all()


def test_unused_entries_of_a_table_may_be_anything() -> None:
    # An illegal access in vllm#15113.
    batch = Batch((40, 3))
    call = batch.paged(16)
    expected = run(**call)
    for garbage in (2**31 - 1, -(2**31), 10**6):
        call["page_table"][call["page_table"] == -1] = garbage
        np.testing.assert_array_equal(run(**call).view(np.uint16), expected.view(np.uint16))


def test_k_and_v_may_be_halves_of_one_tensor() -> None:
    batch = Batch((33, 5))
    call = batch.dense()
    expected = run(**call)
    both = np.stack((call["k_cache"], call["v_cache"]), axis=1)
    call |= {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    np.testing.assert_array_equal(run(**call), expected)
    call |= {"k": batch.keys[0][:2, None], "v": batch.values[0][:2, None]}
    run(**call | {"cache_lens": np.array([3, 4], np.int32)})
    assert (both[1, 0, 4] == batch.keys[0][1]).all()
    assert (both[1, 1, 4] == batch.values[0][1]).all()


def test_a_sequence_may_share_the_pages_of_its_beginning() -> None:
    batch = Batch((40, 40))
    batch.keys[1][:32], batch.values[1][:32] = batch.keys[0][:32], batch.values[0][:32]
    call = batch.paged(16)
    separate = run(**call)
    call["page_table"][1, :2] = call["page_table"][0, :2]
    np.testing.assert_array_equal(run(**call).view(np.uint16), separate.view(np.uint16))


def test_a_call_without_queries_returns_nothing_and_appends_nothing() -> None:
    call = Batch((5, 3)).dense()
    call["q"] = call["q"][:, :0]
    o, lse = run(**call, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 0, HEADS, D), (2, HEADS, 0))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def test_nothing_and_nobody_gives_nothing() -> None:
    """Caches without room, tables without columns, and no sequence at all."""
    call = Batch((0, 0)).dense(capacity=1)
    empty = {name: call[name][:, :0] for name in ("k_cache", "v_cache")}
    paged = {name: np.zeros((3, 16, HEADS_K, D), np.float16) for name in empty}
    no_columns = {**paged, "page_table": np.zeros((2, 0), np.int32)}
    for caches in (empty, no_columns):
        o, lse = run(**{**call, **caches}, return_lse=True)
        assert not o.any()
        assert (lse == -np.inf).all()
    nobody = {"q": call["q"][:0], "cache_lens": call["cache_lens"][:0]}
    for caches in (
        {name: cache[:0] for name, cache in empty.items()},
        {**paged, "page_table": no_columns["page_table"][:0]},
    ):
        assert run(**nobody, **caches).shape == (0, 1, HEADS, D)
    offsets = np.zeros(3, np.int32)
    o, lse = run(**{**call, "q": call["q"][0, :0]}, cu_seqlens_q=offsets, return_lse=True)
    assert (o.shape, lse.shape) == ((0, HEADS, D), (HEADS, 0))


def test_nan_and_infinities_of_a_query_are_its_own_rows_alone() -> None:
    batch = Batch((70, 5))
    call = batch.dense()
    expected = run(**call)
    for value in (np.nan, np.inf):
        call["q"] = batch.q[0][None].repeat(2, 0)
        call["q"][1] = batch.q[1]
        call["q"][0, 0, 1] = value
        o = run(**call)
        assert np.isnan(o[0, 0, 1]).all()
        o[0, 0, 1] = expected[0, 0, 1]
        np.testing.assert_array_equal(bits(o), bits(expected))


def test_caches_of_odd_strides_are_read_as_they_are() -> None:
    """One line for all sequences, and keys that run backwards."""
    batch = Batch((20, 20))
    call = batch.dense()
    call["k_cache"][1] = call["k_cache"][0]
    expected = run(**call)
    one = np.broadcast_to(call["k_cache"][:1], call["k_cache"].shape)
    backwards = np.ascontiguousarray(call["v_cache"][:, ::-1])[:, ::-1]
    o = run(**{**call, "k_cache": one, "v_cache": backwards})
    np.testing.assert_array_equal(bits(o), bits(expected))


def test_what_is_written_shares_no_memory_with_what_is_read() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    call = Batch((19, 5)).dense(capacity=20)
    both = np.concatenate([call["k_cache"], call["v_cache"]], 2)
    halves = {"k_cache": both[:, :, :HEADS_K], "v_cache": both[:, :, HEADS_K:]}
    new = {"k": NEW, "v": NEW}
    for changes, message in (
        ({"out": call["q"]}, "out: shares memory with q"),
        ({**halves, "out": both[:, :1]}, "out: shares memory with k_cache"),
        ({"k": call["k_cache"][:, :1], "v": NEW}, "k_cache: shares memory with k"),
        ({"q": both[:, :1], **halves, **new}, "k_cache: shares memory with q"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run(**{**call, **changes})
    lent = {name: torch.from_numpy(array) for name, array in {**call, **new}.items()}
    for cache in (
        lent["k_cache"][:1].expand(2, -1, -1, -1),
        lent["k_cache"][:, :, :1].expand(-1, -1, HEADS_K, -1),
        torch.zeros(9999).half().as_strided((2, 20, HEADS_K, D), (D, 2 * D, D, 1)),
    ):
        with pytest.raises(ArgumentError, match=r"k_cache: strides .* several elements"):
            run(**{**lent, "k_cache": cache})


def test_strides_beyond_32_bits_lead_to_their_own_sequence() -> None:
    # FA#772: with rows of the batch 2^30 elements apart the wrong one was written.
    batch = Batch((40, 30, 20, 10))
    call = batch.dense(capacity=64)
    new = {name: np.stack([it[:1] for it in getattr(batch, many)])
           for name, many in (("k", "keys"), ("v", "values"))}  # fmt: skip
    # Memory that nobody touches is none.
    far = np.empty(3 * 2**30 + 64 * HEADS_K * D, np.float16)
    strides = (2**31, *call["k_cache"].strides[1:])
    caches = np.lib.stride_tricks.as_strided(far, call["k_cache"].shape, strides)
    caches[:] = call["k_cache"]
    expected = run(**call, **new)
    o = run(**{**call, "k_cache": caches}, **new)
    np.testing.assert_array_equal(bits(o), bits(expected))
    np.testing.assert_array_equal(bits(caches.copy()), bits(call["k_cache"]))


def test_a_merge_writes_rows_wherever_the_output_has_them() -> None:
    # FlagGems#5235: rows of a contiguous output were written as if heads came first.
    batch = Batch((700, 130))
    call = batch.dense()
    expected = run(**call)
    heads_first = np.full((2, HEADS, 1, D), NAN).transpose(0, 2, 1, 3)
    amid = np.full((2, 3, HEADS + 2, D + 8), NAN)
    for out in (heads_first, amid[:, 1:2, 1:-1, :D]):
        o = run(**call, out=out)
        np.testing.assert_array_equal(bits(o.copy()), bits(expected))
    amid[:, 1:2, 1:-1, :D] = 0
    assert np.isnan(amid).sum() == amid.size - expected.size


def test_packed_queries_over_pages_and_split_keys_write_every_row() -> None:
    # All three together: rows after the first sequence stayed unwritten (pytorch#194167); others
    # refuse the split (FA#1217, FA PR#2550), or read the keys once per query (vllm-FA#193).
    batch = Batch((700, 300, 0, 129), (1, 8, 2, 1))
    call = batch.paged(16)
    o, lse = run(**call, out=np.full_like(call["q"], NAN), return_lse=True)
    batch.check(o, lse)


def test_a_split_gives_what_one_part_gives() -> None:
    # FI#4749: short queries on long keys were wrong where keys were split.
    lens = (63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 513)
    batch = Batch(lens)
    o, lse = run(**batch.dense(), return_lse=True)
    whole = parse_kernel_name_into_config(str(CFG).replace("least_64", "least_1024"))
    shared_kernels.load([whole], Semantics("causal"))
    once = flashsmith.attention_with_cache(
        **batch.dense(), config=whole, emulate=True, return_lse=True
    )
    batch.check(*once)
    batch.check(o, lse)
    np.testing.assert_allclose(lse, once[1], rtol=1e-5)
    assert (o != once[0]).any()


def test_a_row_without_keys_weighs_nothing_in_a_merge() -> None:
    # FlashAttention-3 gives such rows a log-sum-exp of +inf, FlashInfer all of them in base 2.
    batch = Batch((0, 40))
    o, lse = run(**batch.dense(), return_lse=True)
    outs = np.stack([o, np.ones_like(o)]).astype(np.float32)
    merged, merged_lse = flashsmith.merge_attention(
        [outs[1], outs[0]], [np.zeros_like(lse), lse], emulate=True
    )
    np.testing.assert_allclose(merged[0], 1)
    assert (merged_lse[0] == 0).all()
    np.testing.assert_allclose(merged_lse[1], np.logaddexp(0, lse[1]), rtol=1e-5, atol=1e-6)


def test_jax_arrays_are_read_and_not_appended_to() -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
    batch = Batch((33, 5))
    call = batch.dense()
    expected = run(**call)
    lent = {name: jax.numpy.asarray(array) for name, array in call.items()}
    np.testing.assert_array_equal(np.asarray(run(**lent)), expected)
    new = jax.numpy.zeros((2, 1, HEADS_K, D), np.float16)
    with pytest.raises(ArgumentError, match="k_cache: is read-only"):
        run(**lent, k=new, v=new)


def test_a_choice_depends_on_neither_batch_nor_page_nor_capacity() -> None:
    device = device_spec(90)
    texts = [
        "b1 s1:100 h32:8 d128 bf16 decode causal", "b64 s5:65536 h32:8 d128 bf16 decode causal",
        "b8 s7:4096 h32:8 d128 bf16 decode causal packed page16",
    ]  # fmt: skip
    problems = [Problem.parse(text) for text in texts]
    assert len({without_batch(problem) for problem in problems}) == 1
    assert len({CHOOSERS["invariant"](problem, device) for problem in problems}) == 1
    for text in texts:
        choice = flashsmith.choose(text, device)
        assert choice.config == CHOOSERS["invariant"](problems[0], device)
        assert str(choice.problem) == str(Problem.parse(text))
    assert CHOOSERS["free"](problems[2], device).FAMILY == CFG.FAMILY


def test_kernels_for_chunks_of_prompts_join_where_a_call_may_have_some() -> None:
    """What serves all other sequences stays: they have the same bits with and without."""
    for arch, d, tile in ((90, 128, 128), (89, 128, 128), (89, 256, 64)):
        device = device_spec(arch)
        chosen = {
            rows: CHOOSERS["invariant"](
                Problem.parse(f"b3 s{rows}:4096 h8:8 d{d} bf16 decode causal packed page16"), device
            )
            for rows in (1, tile // 2, tile // 2 + 1, 512)
        }
        assert [cfg.chunk_rows for cfg in chosen.values()] == [0, 0, tile, tile]
        # Two full tiles of 16 rows are merged at once.
        assert [cfg.full_tiles for cfg in chosen.values()] == [False, d == 128, False, False]
        # From 64 queries on a sequence may be computed by wgmma, where there is one.
        warpgroups = [2 * (arch == 90 and rows >= 64) for rows in chosen]
        assert [cfg.chunk_warpgroups for cfg in chosen.values()] == warpgroups
        knobs = {"chunk_rows": 0, "full_tiles": False, "chunk_warpgroups": 0}
        assert {replace(cfg, **knobs) for cfg in chosen.values()} == {chosen[1]}
    text = "b1 s512:8192 h32:8 d128 bf16 decode causal"
    choice = flashsmith.choose(text, 90)
    assert choice.config == CHOOSERS["invariant"](Problem.parse(text), device_spec(90))
    # Three of them where their fewer tiles still fill the GPU.
    longer = Problem.parse("b1 s8192:8192 h32:8 d128 bf16 decode causal")
    h200 = device_spec("H200")
    for changes, count in (
        *(({}, 3), ({"d": 256, "d_v": 256}, 2), ({"seq_q": 1024}, 2), ({"seq_q": 2048}, 3)),
        *(({"seq_q": 512, "page": 16}, 2), ({"seq_q": 512, "page": 1}, 3)),
    ):
        chosen_for = CHOOSERS["invariant"](replace(longer, **changes), h200)
        assert chosen_for.chunk_warpgroups == count, changes
    plain = replace(choice.config, chunk_rows=0, chunk_warpgroups=0)
    assert choice.ms < 0.5 * estimate(plain, choice.problem, device_spec(90)).ms


@pytest.mark.full
def test_a_chunk_has_the_bits_of_a_dense_call_of_its_own() -> None:
    """Packed beside a token and another chunk, or alone, which are other kernels' semantics."""
    cfg = replace(CFG, chunk_rows=64)
    batch = Batch((200, 1100, 700, 30), (1, 33, 17, 9))
    how = {"config": cfg, "emulate": True, "return_lse": True}
    o, lse = flashsmith.attention_with_cache(**batch.dense(), **how)
    batch.check(o, lse)
    begin = np.cumsum((0, *batch.queries))
    for i in range(len(batch.lens)):
        for call in (batch.dense(which=[i]), batch.dense(which=[i, i])):
            one, its_lse = flashsmith.attention_with_cache(**call, **how)
            rows = slice(begin[i], begin[i + 1])
            np.testing.assert_array_equal(one[-1].view(np.uint16), o[rows].view(np.uint16))
            np.testing.assert_array_equal(its_lse[-1], lse[:, rows])


# --- errors --------------------------------------------------------------------------------------


def changed(**others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**Batch((20, 5)).dense(), **others}


def table(*rows: list[int]) -> Callable[[], dict[str, Any]]:
    return lambda: {**Batch((20, 5)).paged(16), "page_table": np.array(rows, np.int32)}


NEW = np.zeros((2, 1, HEADS_K, D), np.float16)
NO_PAGES = np.zeros((0, 16, HEADS_K, D), np.float16)
ANGLES = np.zeros((5, 8), np.float16)
LENS = np.array([20, 5], np.int32)
LENS_IN_ONE_PAGE = np.array([3, 5], np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (changed(cache_lens=np.array([21, 5], np.int32)),
         r"cache_lens\[0\]=21: must be from 0 to what the cache can hold, 20; give a larger cache"),
        (changed(cache_lens=np.array([3, -1], np.int32)), r"cache_lens\[1\]=-1: must be from 0"),
        (changed(k=NEW, v=NEW), r"cache_lens\[0\]=20: .* 20 minus the 1 appended"),
        (changed(cache_lens=LENS.astype(np.int64)), "cache_lens: dtype int64; must be int32"),
        (changed(cache_lens=LENS[:1]), "cache_lens: 1 lengths, but q has 2 sequences"),
        (table([0, 9, -1], [1, -1, -1]), r"page_table\[0, 1\]=9: .* need 2 pages, and there are"),
        (table([0, -1, -1], [1, -1, -1]), r"page_table\[0, 1\]=-1: the sequence's 20 keys"),
        (table([0, 1, -1]), "page_table: shape .* q has 2 sequences"),
        (lambda: {**table([0, 1], [1, 1])(), "k": NEW, "v": NEW,
                  "cache_lens": np.array([20, 4], np.int32)},
         "page_table: sequence 0 appends to slot 4 of page 1, which sequence 1 also appends to; "
         "give each sequence its own page"),
        (lambda: {**table([0], [0])(), "k": NEW, "v": NEW, "cache_lens": LENS_IN_ONE_PAGE},
         "page_table: sequence 0 appends to slot 3 of page 0, which sequence 1 also reads; give"),
        (lambda: {**table([0], [0])(), "k": NEW, "v": NEW,
                  "cache_lens": LENS_IN_ONE_PAGE[::-1].copy()},
         "page_table: sequence 1 appends to slot 3 of page 0, which sequence 0 also reads; give"),
        (lambda: {**table([0, 0], [1, -1])(), "k": NEW, "v": NEW,
                  "cache_lens": np.array([20, 4], np.int32)},
         r"page_table\[0\]: names page 0 at 0 and at 1, and the sequence appends to it; name each"),
        (lambda: {**table([0, 1], [1, 1])(), "k_cache": NO_PAGES, "v_cache": NO_PAGES},
         r"page_table\[0, 0\]=0: .* need 2 pages, and there is none; give some"),
        (table([0], [1]), r"cache_lens\[0\]=20: .* can hold, 16; give a larger cache or more"),
        (lambda: {**table([0, 1], [1, 1])(), "page_table": np.zeros((2, 4), np.int32)[:, ::2]},
         "page_table: stride of the last dimension is 2"),
        (lambda: {**table([0, 1], [1, 1])(), "page_table": np.zeros((2, 2), np.int64)},
         "page_table: dtype int64; must be int32"),
        (lambda: {**table([0], [1])(), "k_cache": NO_PAGES[:, :0], "v_cache": NO_PAGES[:, :0]},
         "k_cache: shape .* a page must have at least one key"),
        (changed(cache_lens=np.repeat(LENS, 2)[::2]), "cache_lens: stride 2; must be 1"),
        (changed(q=np.zeros((2, 1, HEADS, D), np.float32)), "q: dtype float32; allowed are"),
        (changed(k_cache=np.zeros((2, 20, HEADS_K, D), np.float32)), "k_cache: dtype float32"),
        (changed(k_cache=np.zeros((2, 20, HEADS_K, 2 * D), np.float16)[..., ::2]),
         "k_cache: stride of the last dimension is 2"),
        (changed(k_cache=np.zeros((2, 20, HEADS_K, 67), np.float16)[..., :D]),
         "k_cache: stride 134 of dimension 1 is not a multiple of 8"),
        (changed(v=NEW), "k: missing, and v is given; both are appended"),
        (changed(k=NEW, v=NEW, cache_lens=LENS - 5, sin=ANGLES), "cos: missing, and sin is given"),
        (changed(k=NEW, v=NEW, cache_lens=LENS - 5, cos=ANGLES[None], sin=ANGLES[None]),
         "cos: rank 3 .* must be 2"),
        (changed(k=NEW, v=NEW, cache_lens=LENS - 5, cos=np.zeros((64, 8)), sin=np.zeros((64, 8))),
         "cos: dtype float64; allowed are float16 and float32"),
        (changed(k=NEW), "v: missing, and k is given; both are appended"),
        (changed(k=NEW[:1], v=NEW[:1]), "k: shape .* a key and a value for every query"),
        (changed(cos=ANGLES), "sin: missing, and cos is given"),
        (changed(cos=ANGLES, sin=ANGLES), "k: missing, and cos is given"),
        (changed(k=NEW, v=NEW, cos=ANGLES, sin=ANGLES, cache_lens=np.array([2, 5], np.int32)),
         "cos: 5 positions, and the longest sequence has 6 keys after appending"),
        (changed(k=NEW, v=NEW, cos=np.zeros((64, 33), np.float16),
                 sin=np.zeros((64, 33), np.float16)), "cos: shape .* has at most 32 pairs"),
        (changed(k=NEW, v=NEW, cos=ANGLES, sin=ANGLES.astype(np.float32)), "sin: float32 of shape"),
        (changed(split="other"), "split='other': give 'invariant'"),
        (changed(window=3), "window=3: give a pair"),
        (changed(max_seqlen_q=3), "max_seqlen_q=3: is for packed sequences"),
        (changed(q=np.zeros((2, HEADS, D), np.float16)), "q: rank 3 .* must be 4"),
        (changed(q=np.zeros((2, 1, 3, D), np.float16)), "k_cache: 2 heads and q 3"),
        (changed(q=np.zeros((3, 1, HEADS, D), np.float16)), "cache_lens: 2 lengths, but q has 3"),
        (changed(q=np.zeros((2, 1, HEADS, 60), np.float16)), "q: d_head 60 .* multiple of 8"),
        (changed(k_cache=np.zeros((2, 20, HEADS_K, 32), np.float16)), "k_cache: shape .* d_head"),
        (changed(v_cache=np.zeros((2, 21, HEADS_K, D), np.float16)), "v_cache: shape .* k_cache's"),
        (changed(v_cache=np.zeros((2, 20, HEADS_K, 2 * D), np.float16)),
         "v_cache: d_v 128 is not d, 64; the config's kernel has one width"),
        (changed(v_cache=np.zeros((2, 20, HEADS_K, 60), np.float16)),
         "v_cache: d_head 60 .* multiple of 8: pad v_cache with zeros"),
        (changed(k_cache=np.zeros((2, 20, HEADS_K, 2 * D), np.float16)),
         r"k_cache: shape .* pad q with zeros to d 128, and pass scale=1/sqrt\(64\)"),
        (changed(k_cache=np.zeros((3, 20, HEADS_K, D), np.float16),
                 v_cache=np.zeros((3, 20, HEADS_K, D), np.float16)),
         "k_cache: shape .* q has 2 sequences: give a cache of as many, or a page_table"),
        (changed(out=np.zeros((2, 1, HEADS, 32), np.float16)), "out: shape"),
        (changed(sinks=np.zeros(3, np.float32)), "sinks: shape"),
        (changed(return_lse=1), "return_lse=1: allowed are True and False"),
        (changed(softcap=-1.0), "softcap=-1.0"),
        (changed(rotary_interleaved="yes"), "rotary_interleaved='yes'"),
    ],
)  # fmt: skip
def test_the_error_names_the_argument_its_value_and_what_is_allowed(
    call: Callable[[], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(**call())


def test_caches_that_cannot_be_written_are_errors_only_where_they_are() -> None:
    call = Batch((19, 5)).dense(capacity=20)
    call["k_cache"].flags.writeable = False
    run(**call)
    with pytest.raises(ArgumentError, match=r"k_cache: is read-only .* k and v are appended"):
        run(**call, k=NEW, v=NEW)
    call["k_cache"] = call["v_cache"]
    with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
        run(**call, k=NEW, v=NEW)


def test_a_config_of_another_operation_is_an_error() -> None:
    other = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): async+load_0_0_0_tiles")
    with pytest.raises(ArgumentError, match=r"config: got .* give a FlashDecodeKernelConfig"):
        flashsmith.attention_with_cache(**Batch((20, 5)).dense(), config=other)


def test_without_a_compiler_a_canonical_call_takes_any_canonical_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With any split: no bit depends on which one it is."""
    caplog.set_level("INFO", "flashsmith")
    built = CFG.family.canonical(CFG, device_spec("A100"))
    shared_kernels.load([built], Semantics("causal"))
    unbuilt = replace(built, stages=5)
    call = Batch((65, 15)).dense()

    def chosen(problem: Problem, device: Any, *, among: Any = None, **how: Any) -> Any:
        return unbuilt if among is None else among[0]

    monkeypatch.setattr(decode, "choose_config", chosen)
    kernels = (CFG, Semantics("causal")), (built, Semantics("causal"))
    monkeypatch.setattr(fallback_kernels, "built_kernels", lambda **_: kernels)
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    how = {**call, "bits": "canonical", "return_lse": True}
    found = flashsmith.attention_with_cache(**how)
    expected = flashsmith.attention_with_cache(**how, config=built)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert f"{built} [causal] is built and serves instead: it" in caplog.text
    assert "bits are the same" in caplog.text


def test_without_a_compiler_a_free_call_takes_what_is_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With split='invariant' no other kernel serves: a sequence would have other bits."""
    caplog.set_level("INFO", "flashsmith")
    batch = Batch((65, 15))
    call = batch.dense()
    unbuilt = replace(CFG, stages=2, min_keys=128)

    def chosen(problem: Problem, device: Any, *, among: Any = None, **how: Any) -> Any:
        if among is None:
            return unbuilt
        return CFG if CFG in among else among[0]

    monkeypatch.setattr(decode, "choose_config", chosen)
    monkeypatch.setattr(
        fallback_kernels, "built_kernels", lambda **_: ((CFG, Semantics("causal")),)
    )
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    free = flashsmith.attention_with_cache(**call, split="free", return_lse=True)
    batch.check(*free)
    assert f"{CFG} [causal] is built and serves instead" in caplog.text
    with pytest.raises(KernelNotBuiltError, match="is not built"):
        flashsmith.attention_with_cache(**call, split="invariant")


@pytest.mark.parametrize("gpu", ["A100", "L4", "H200"])
@pytest.mark.parametrize("cache", ["e4m3", "scaled"])
def test_kernels_of_a_cache_in_another_format_are_the_plain_ones(gpu: str, cache: str) -> None:
    """With as many stages as the plain one's memory has room for, and legal on the GPU."""
    device = device_spec(gpu)
    for d, seq_q, bits in product((64, 128, 192), (1, 300), ("", "canonical")):
        words = f"b1 s{seq_q}:4096 h32:8 d{d} bf16 decode causal {bits}"
        plain, problem = (Problem.parse(f"{words} {more}") for more in ("", f"cache_{cache}"))
        config = CHOOSERS["invariant"](problem, device)
        assert is_legal(config, device)
        assert config.cache.label == cache
        assert bool(config.canonical) == bool(bits)
        wanted = CHOOSERS["invariant"](plain, device)
        if not wanted.chunk_cluster:
            same = ("B_r", "B_c", "n_warps", "min_keys", "parts_per_sm")
            assert [getattr(config, it) for it in same] == [getattr(wanted, it) for it in same]
            assert config.smem_bytes() <= wanted.smem_bytes()
        assert config.stages >= (2 if bits else wanted.stages)
