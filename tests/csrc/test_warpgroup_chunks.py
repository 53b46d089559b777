"""Chunks of a prompt that the kernel with warpgroups computes over a cache: right rows without
races, the bits of the canonical order, and the same bits in any batch and in any pages.

Devices of few SMs stand for long chunks: a sequence's tiles must fill most SMs."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith.families import (
    DType,
    FlashDecodeKernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.families.canonical import canonical_tile
from flashsmith.runtime import kernel_choice, run_operation
from flashsmith.runtime.emulation import exact_mma
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.verify import prove
from flashsmith.verify.decode_reference import DecodeReference

sys.path.insert(0, str(Path(__file__).parents[1] / "bits"))
from sequence import Sequence

H200 = device_spec("H200")
ONE_SM = replace(H200, sm_count=1)
CAUSAL = Semantics("causal")
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)


def config(text: str) -> FlashDecodeKernelConfig:
    found = parse_kernel_name_into_config(text)
    assert isinstance(found, FlashDecodeKernelConfig)
    return found


# Beside kernels for sequences of few rows, and for those of more than 32.
MIXED = config(
    "(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2+chunks_64+chunk_warpgroups_2"
)
CANONICAL = config(
    "(FP16, 64, 16, 128, 4): decode+stages_2+least_128+parts_1+canonical_1+chunk_warpgroups_2"
)
shared_kernels.want([MIXED], WINDOW, arch=90)
shared_kernels.want([CANONICAL], CAUSAL, arch=90)
# Other panels, tiles of keys and numbers of warpgroups.
OTHERS = (
    ("(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2", 2, "causal page16", {}),
    ("(FP16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2", 3, "causal", {"append": True}),
    ("(FP16, 96, 16, 64, 4): decode+stages_3+least_128+parts_2", 2, "page48", {}),
    ("(BF16, 96, 16, 64, 4): decode+stages_3+least_128+parts_2", 3, "causal page6", {}),
    ("(FP16, 64, 16, 64, 4): decode+stages_3+least_128+parts_2", 3, "softcap packed causal", {}),
    ("(BF16, 192, 16, 64, 4): decode+stages_2+least_128+parts_2", 2, "window page64", {}),
    ("(FP16, 256, 16, 32, 2): decode+stages_3+least_128+parts_2", 2, "packed causal page8", {}),
    ("(BF16, 256, 16, 32, 2): decode+stages_3+least_128+parts_2", 2, "causal page1", {}),
)
# The same where v has another d than q and k.
PAIRED = (
    ("(FP16, 64:128, 16, 128, 4): decode+stages_2+least_128+parts_2", 3, "causal page64", {}),
    ("(BF16, 128:64, 16, 64, 4): decode+stages_4+least_128+parts_2", 2, "page6", {"append": True}),
    (
        *("(BF16, 192:128, 16, 64, 4): decode+stages_2+least_128+parts_2", 2, "packed causal"),
        {"lens_q": (200, 99), "lens_k": (450, 130)},
    ),
    ("(FP16, 192:128, 16, 64, 4): decode+stages_2+least_128+parts_2", 2, "window page2", {}),
    ("(FP16, 256:128, 16, 64, 4): decode+stages_2+least_128+parts_2", 2, "causal page96", {}),
    ("(BF16, 256:256, 16, 32, 2): decode+stages_3+least_128+parts_2", 2, "causal page1", {}),
)


def products(verdict: Any) -> dict[str, int]:
    """Instructions by the beginning of their name."""
    counts = {"wgmma": 0, "mma": 0}
    for name, count in verdict.emulation.instructions.items():
        for kind in counts:
            counts[kind] += count * name.startswith((f"{kind}.mma", f"{kind}.sync"))
    return counts


def proven(cfg: Any, text: str, sms: int, **options: Any) -> Any:
    problem = Problem.parse(text)
    seed = options.pop("seed", 0)
    kind = options.pop("inputs", "random")
    shared_kernels.load([cfg], problem.required_semantics(cfg), arch=90)
    verdict = prove(
        *(cfg, problem),
        options=DecodeReference().options(problem, seed=seed, **options),
        inputs=kind,
        arch=90,
        sm_count=sms,
        checks=True,
        seed=seed,
        schedule_seed=seed or None,
    )
    assert verdict.ok, str(verdict)
    return verdict


def test_chunks_beside_single_tokens_have_no_race() -> None:
    """A sequence of one query, an empty one, and one of 40 rows: each by a kernel of its own."""
    verdict = proven(
        MIXED,
        "b4 s150:300 h4:2 d64 fp16 window softcap packed decode page16",
        1,
        lens_q=(1, 150, 0, 20),
        lens_k=(300, 290, 64, 70),
        left=200,
        right=0,
        seed=1,
    )
    assert min(products(verdict).values()) > 0


def test_a_cache_without_keys_gives_zeros() -> None:
    verdict = proven(
        MIXED,
        "b2 s100:70 h2:1 d64 fp16 window softcap packed decode page16",
        1,
        lens_q=(100, 90),
        lens_k=(0, 70),
        left=10,
        right=0,
        sinks=True,
    )
    assert products(verdict)["mma"] == 0


@pytest.mark.full
@pytest.mark.parametrize("inputs", ["large_scores", "one_hot", "far_scores", "lost_keys"])
def test_scores_of_any_size(inputs: str) -> None:
    text = "b2 s150:500 h4:2 d64 fp16 window softcap packed decode page16"
    proven(MIXED, text, 1, inputs=inputs)


@pytest.mark.full
@pytest.mark.parametrize(("text", "warpgroups", "words", "options"), OTHERS)
def test_other_head_dimensions(
    text: str, warpgroups: int, words: str, options: dict[str, Any]
) -> None:
    cfg = replace(config(text), chunk_warpgroups=warpgroups)
    problem = f"b2 s200:450 h4:2 d{cfg.d_head} {cfg.dtype.name.lower()} {words} decode"
    verdict = proven(cfg, problem, 1, seed=warpgroups, **options)
    assert products(verdict)["wgmma"] > 0


PAIR = config("(FP16, 64:128, 16, 128, 4): decode+stages_2+least_128+parts_1+chunk_warpgroups_2")


@pytest.mark.parametrize("page", ["page64", "page6"])
def test_values_may_have_another_width(page: str) -> None:
    """In boxes, and row by row: neither fills its tiles' columns."""
    text = f"b2 s150:300 h4:2 d40:104 fp16 packed causal {page} decode"
    verdict = proven(PAIR, text, 1, lens_q=(150, 70), lens_k=(300, 90), layout="heads first")
    assert products(verdict)["wgmma"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("text", "warpgroups", "words", "options"), PAIRED)
def test_every_pair(text: str, warpgroups: int, words: str, options: dict[str, Any]) -> None:
    cfg = replace(config(text), chunk_warpgroups=warpgroups)
    widths = f"d{cfg.d_head - 8}:{cfg.d_head_v - 16}"
    problem = f"b2 s200:450 h4:2 {widths} {cfg.dtype.name.lower()} {words} decode"
    verdict = proven(cfg, problem, 1, seed=warpgroups, **options)
    assert products(verdict)["wgmma"] > 0


# --- bits ----------------------------------------------------------------------------------------


def attend(
    sequences: SequenceOf[tuple[np.ndarray, ...]],
    page: int = 0,
    capacity: int = 700,
    cfg: FlashDecodeKernelConfig = MIXED,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """o and LSE of packed sequences (q, k, v) over a cache of NaN beyond their keys."""
    batch, (heads_k, d) = len(sequences), sequences[0][1].shape[1:]
    lengths = [len(k) for _, k, _ in sequences]
    caches = {}
    for name, i in (("k_cache", 1), ("v_cache", 2)):
        cache = np.full((batch, capacity, heads_k, d), np.nan, np.float16)
        for row, one in zip(cache, sequences, strict=True):
            row[: len(one[i])] = one[i]
        caches[name] = cache
    table = None
    if page:
        of_each = -(-capacity // page)
        table = np.random.default_rng(page).permutation(batch * of_each).astype(np.int32)
        for name, cache in caches.items():
            padded = np.full((batch, of_each * page, heads_k, d), np.nan, np.float16)
            padded[:, :capacity] = cache
            pages = np.empty((batch * of_each, page, heads_k, d), np.float16)
            pages[table] = padded.reshape(pages.shape)
            caches[name] = pages
        table = table.reshape(batch, of_each)
        # Entries beyond a sequence's keys are never read.
        for row, length in zip(table, lengths, strict=True):
            row[-(-length // page) :] = -1
    q = np.concatenate([one[0] for one in sequences])
    offsets = np.cumsum([0, *(len(one[0]) for one in sequences)])
    heads = f"h{q.shape[1]}:{heads_k}"
    text = f"b{batch} s{np.diff(offsets).max()}:{capacity} {heads} d{d} fp16 decode window softcap"
    keys = table.shape[1] * page if table is not None else capacity
    problem = replace(Problem.parse(f"{text} packed" + f" page{page}" * (page > 0)), seq_k=keys)
    shared_kernels.load([cfg], problem.required_semantics(cfg), arch=90)
    found = run_operation(
        cfg,
        problem,
        {
            "q": q,
            **caches,
            "cache_lens": np.array(lengths, np.int32),
            "cu_seqlens_q": offsets.astype(np.int32),
            **({} if table is None else {"page_table": table}),
        },
        options={"left": 300, "right": 0, "softcap": 20.0},
        wanted=["lse"],
        arch=ONE_SM,
        emulate=True,
        poisoned=True,
    )
    o, lse = found.outputs["o"], found.outputs["lse"]
    return [(o[begin:end], lse[:, begin:end]) for begin, end in pairwise(offsets)]


def draw(queries: int, keys: int, heads_k: int = 1, group: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(queries + keys)
    shapes = ((queries, heads_k * group), (keys, heads_k), (keys, heads_k))
    return tuple(rng.standard_normal((*shape, 64)).astype(np.float16) for shape in shapes)


def assert_same(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_a_chunk_has_the_same_bits_in_any_batch_and_pages() -> None:
    sequences = [draw(100, 450), draw(1, 333), draw(20, 64), draw(131, 131)]
    expected = [attend([one])[0] for one in sequences]
    for i, page in enumerate((0, 16, 24)):
        order = np.roll(np.arange(len(sequences)), i)
        found = attend([sequences[j] for j in order], page, 450 + 17 * i)
        for j, its in zip(order, found, strict=True):
            assert_same(its, expected[j])


@pytest.mark.full
@pytest.mark.parametrize("page", [1, 2, 7, 8, 64, 96, 100, 128, 256])
def test_pages_of_any_size_leave_every_bit(page: int) -> None:
    sequences = [draw(100, 450), draw(1, 333), draw(131, 131)]
    for its, expected in zip(attend(sequences, page), attend(sequences), strict=True):
        assert_same(its, expected)


@pytest.mark.full
def test_the_number_of_warpgroups_affects_no_bit() -> None:
    sequences = [draw(100, 450), draw(250, 690), draw(131, 131)]
    three = replace(MIXED, chunk_warpgroups=3)
    for page in (0, 16):
        found = attend(sequences, page, cfg=three)
        for its, expected in zip(found, attend(sequences, page), strict=True):
            assert_same(its, expected)


def canonical_differing(sequence: Sequence, page: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many elements differ from those that the specification gives."""
    monkeypatch.setattr(kernel_choice, "emulated_arch", lambda cfg: ONE_SM)
    cfg = replace(CANONICAL, dtype=sequence.dtype, d_head=sequence.d, d_v=sequence.d_v)
    cfg = replace(cfg, B_c=canonical_tile(cfg.d_head, 90, cfg.d_v))
    shared_kernels.load([cfg], sequence.semantics_of_cache(cfg), arch=90)
    rows = slice(0, sequence.queries)
    with exact_mma():
        return sequence.differing(sequence.cached(cfg, rows, page, beside=300), rows)


def test_chunks_keep_the_canonical_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a chunk of keys and the beginning of the next one."""
    sequence = Sequence(70, 4096 + 75, DType.FP16, 64, group=2)
    assert canonical_differing(sequence, 16, monkeypatch) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("sequence", "page"),
    [
        (Sequence(200, 200, DType.FP16, 64, group=1), 0),
        (Sequence(130, 4097, DType.BF16, 128, group=2, sinks=(0.5, -1.0)), 64),
        (Sequence(70, 4300, DType.FP16, 96, group=2, window=(4100, 0), softcap=3.0), 2),
        (Sequence(90, 4200, DType.BF16, 256, group=1, packed=True), 8),
        (Sequence(80, 4200, DType.FP16, 64, group=2, causal=False), 48),
        (Sequence(90, 4200, DType.BF16, 192, group=2, d_v=128), 64),
        (Sequence(70, 4300, DType.FP16, 64, group=2, d_v=128), 2),
    ],
)
def test_canonical_chunks_of_other_kinds(
    sequence: Sequence, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert canonical_differing(sequence, page, monkeypatch) == 0


# --- plans ---------------------------------------------------------------------------------------


def launched(text: str, cfg: Any = MIXED, **options: Any) -> list[int]:
    """The number of threads of each launch of a call."""
    problem = Problem.parse(text)
    shared_kernels.load([cfg], problem.required_semantics(cfg), arch=90)
    queries, batch = problem.seq_q, problem.batch
    dims = problem.heads_q, problem.d
    strides = options.pop("strides", None)
    cache = np.zeros((batch, problem.seq_k, problem.heads_k, problem.d), np.float16)
    if strides is not None:
        cache = np.lib.stride_tricks.as_strided(cache, strides=strides)
    how = {"left": 100, "right": 0, "softcap": 20.0} | options
    call = prepare_operation(
        cfg,
        problem,
        {
            "q": np.zeros((batch * queries, *dims), np.float16),
            "k_cache": cache,
            "v_cache": cache,
            "cache_lens": np.zeros(batch, np.int32),
            "cu_seqlens_q": np.arange(0, queries * batch + 1, queries, dtype=np.int32),
        },
        options=how,
        emulate=True,
        arch=H200,
    )
    assert call.kernel is not None
    return [launch.block[0] for launch in call.kernel.plan(call.call).launched]


def test_sequences_use_warpgroups_by_their_own_rows_or_where_all_fill_the_device() -> None:
    """A sequence of 2 x 5056 rows fills 79 of 132 SMs, and a call of more may use them for less
    only where its keys may be split by the batch."""
    words = "h8:1 d64 fp16 window softcap packed decode"
    with_warpgroups = 3 * 128
    few, many = f"b1 s1264:2048 {words}", f"b1 s1265:2048 {words}"
    assert with_warpgroups not in launched(few)
    assert launched(many)[0] == with_warpgroups
    batch = f"b16 s100:2048 {words}"
    assert with_warpgroups not in launched(batch)
    assert launched(batch, split="free")[0] == with_warpgroups
    # Some sequences may have few rows: their kernels follow.
    assert len(launched(many)) > 1


def test_caches_that_tma_cannot_copy_use_the_other_kernels() -> None:
    """Rows of one head in a cache whose sequences begin between its rows."""
    text = "b2 s1300:64 h8:1 d64 fp16 window softcap packed decode"
    assert launched(text)[0] == 384
    row = 2 * 64 * 3
    assert 384 not in launched(text, strides=(row * 20 + 128, row, 128, 2))
