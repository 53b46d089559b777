"""Canonical chunks that a cluster computes together: the bits of one CTA, and no races."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import shared_kernels
from guessed_lengths import WRONG_BY_WARPS, WRONG_IN_WARP_0, guessing, wrong_in_warp

from flashsmith import attention_with_cache
from flashsmith.chooser import choose
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import emulation
from flashsmith.runtime.emulation import run_in_emulator
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.verify import prove
from ptxlab.checks import all_checks
from ptxlab.interface import EmulationResult

RELAXED = "ld.relaxed.gpu.global.s32"
CAUSAL = Semantics(mask="causal")
CAPPED = Semantics(mask="window", softcap=True)


def short_form(
    d_head: int, warps: int = 4, stages: int = 2, ctas: int = 0, early: bool = False
) -> str:
    keys = 128 if d_head <= 128 else 64
    cluster = f"+chunk_cluster_{ctas}" if ctas else ""
    return (
        f"(FP16, {d_head}, 16, {keys}, {warps}): decode+stages_{stages}+least_128+parts_1"
        f"{'+early' * early}+canonical_1{cluster}"
    )


EIGHT, FOUR, TWO = (short_form(128, ctas=ctas) for ctas in (8, 4, 2))
EARLY = short_form(64, stages=3, ctas=4, early=True)
NARROW = short_form(64, warps=8, stages=3, ctas=4)
EIGHT_FIRST, EARLY_FIRST = f"{EIGHT}+keys_first", f"{EARLY}+keys_first"
PANELS, WIDE = short_form(96, ctas=2), short_form(256, ctas=8)
for text in (EIGHT, NARROW, EARLY, EIGHT_FIRST):
    shared_kernels.want([parse(text)], CAUSAL, arch=90)
for d_head in (64, 128):
    shared_kernels.want([parse(short_form(d_head))], CAUSAL, arch=90)
shared_kernels.want([parse(EIGHT), parse(short_form(128))], CAPPED, arch=90)


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.itemsize}")


def differing(
    text: str,
    lens: Sequence[int],
    *,
    d: int,
    group: int = 4,
    heads_k: int = 1,
    queries: int = 1,
    page: int = 0,
    **options: Any,
) -> int:
    """How many elements of o and LSE differ from those of a kernel whose chunks are one CTA's."""
    rng = np.random.default_rng(3)
    cfg = parse(text)
    alone = parse(short_form(cfg.d_head))
    batch, keys = len(lens), max(lens)
    q = rng.standard_normal((batch, queries, heads_k * group, d)).astype(np.float16)
    caches = [rng.standard_normal((batch, keys, heads_k, d)).astype(np.float16) for _ in "kv"]
    for cache in caches:
        for i, length in enumerate(lens):
            cache[i, length:] = np.nan
    if page:
        of_each = -(-keys // page)
        table = rng.permutation(batch * of_each).astype(np.int32).reshape(batch, of_each)
        paged = [np.full((batch * of_each, page, heads_k, d), np.nan, np.float16) for _ in "kv"]
        for cache, pages in zip(caches, paged, strict=True):
            for i, numbers in enumerate(table):
                for j, number in enumerate(numbers):
                    part = cache[i, j * page : (j + 1) * page]
                    pages[number, : len(part)] = part
        caches, options = paged, options | {"page_table": table}
    results = [
        attention_with_cache(
            *(q, *caches),
            cache_lens=np.array(lens, np.int32),
            bits="canonical",
            return_lse=True,
            emulate=True,
            config=one,
            **options,
        )
        for one in (alone, cfg)
    ]
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("text", "lens", "how"),
    [
        (EIGHT, (1300, 1, 0), {"d": 128, "queries": 2, "sinks": True}),
        (NARROW, (900,), {"d": 64, "group": 8}),
        pytest.param(EIGHT, (5000, 4097), {"d": 128, "heads_k": 2}, marks=pytest.mark.full),
        pytest.param(FOUR, (700, 129), {"d": 128, "group": 5, "page": 48}, marks=pytest.mark.full),
        pytest.param(TWO, (1500, 77), {"d": 120, "group": 7}, marks=pytest.mark.full),
        pytest.param(NARROW, (600,), {"d": 64, "page": 16}, marks=pytest.mark.full),
        pytest.param(PANELS, (700,), {"d": 96, "page": 7}, marks=pytest.mark.full),
        pytest.param(WIDE, (700, 64), {"d": 256, "group": 8}, marks=pytest.mark.full),
        pytest.param(WIDE, (333,), {"d": 200, "group": 3}, marks=pytest.mark.full),
        *(
            pytest.param(f"{text}+keys_first", lens, how, marks=pytest.mark.full)
            for text, lens, how in (
                (EIGHT, (1300, 1, 0), {"d": 128, "queries": 2, "sinks": True}),
                (EIGHT, (5000, 4097), {"d": 128, "heads_k": 2}),
                (FOUR, (700, 129), {"d": 128, "group": 5, "page": 48}),
                (TWO, (1500, 77), {"d": 120, "group": 7}),
                (NARROW, (900,), {"d": 64, "group": 8}),
                (PANELS, (700,), {"d": 96, "page": 7}),
                (WIDE, (700, 64), {"d": 256, "group": 8}),
            )
        ),
    ],
)
def test_a_cluster_gives_rows_the_bits_of_one_cta(
    text: str, lens: tuple[int, ...], how: dict[str, Any]
) -> None:
    if how.get("sinks"):
        how = how | {"sinks": np.array([0.3, -1.0, 2.0, 0.0], np.float32)}
    assert differing(text, lens, **how) == 0


def test_windows_and_softcap_across_chunks() -> None:
    """The window begins within the first chunk, which then has fewer tiles."""
    options = {"window": (4500, 0), "softcap": 5.0}
    assert differing(EIGHT, (6000,), d=128, queries=2, **options) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(
            EIGHT, "b1 s1:600 h4:1 d128 fp16 causal decode canonical", marks=pytest.mark.full
        ),
        (EIGHT_FIRST, "b1 s1:600 h4:1 d128 fp16 causal decode canonical"),
        pytest.param(
            f"{WIDE}+keys_first",
            "b1 s1:700 h8:1 d256 fp16 decode page16 canonical",
            marks=pytest.mark.full,
        ),
        pytest.param(
            WIDE, "b1 s1:700 h8:1 d256 fp16 decode page16 canonical", marks=pytest.mark.full
        ),
        pytest.param(
            NARROW, "b1 s2:4300 h4:1 d64 fp16 causal decode canonical", marks=pytest.mark.full
        ),
    ],
)
def test_ctas_exchange_scores_without_races(text: str, problem: str) -> None:
    verdict = prove(parse(text), Problem.parse(problem), checks=True, sm_count=16)
    assert verdict.ok, str(verdict)


#: What a length seems to be before the preceding launch is over.
GUESSES = {
    "nothing": "mov.b32 %guess, 0;",
    "the most there is": "mov.b32 %guess, 0x7fffffff;",
    "other warps' are wrong": WRONG_BY_WARPS,
    "warp 0's are wrong": WRONG_IN_WARP_0,
    "the sending warp's are wrong": wrong_in_warp(13),
}


@pytest.mark.parametrize(
    ("text", "guess", "page"),
    [
        (EARLY, "other warps' are wrong", 0),
        *(
            pytest.param(text, guess, page, marks=pytest.mark.full)
            for text in (EARLY, EARLY_FIRST)
            for guess in GUESSES
            for page in (0, 48)
        ),
    ],
)
def test_wrong_guesses_of_lengths_change_no_bit(
    text: str, guess: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a guessed run are started before the lengths are known."""
    launched = []

    def run_guessing(ptx: Mapping[str, str], plan: LaunchPlan, **how: Any) -> EmulationResult:
        main = plan.launches[0].kernel
        changed = guessing(ptx[main], GUESSES[guess]) if plan.launches[0].cluster[0] > 1 else ""
        modules = {**ptx, main: changed} if changed else ptx
        found = run_in_emulator(modules, plan, **how | {"observers": all_checks()})
        launched.append((bool(changed), found.instructions.get(RELAXED, 0)))
        assert not found.findings, found.findings
        return found

    monkeypatch.setattr(emulation, "run_in_emulator", run_guessing)
    assert differing(text, (700, 130), d=64, page=page) == 0
    assert [clusters for clusters, _ in launched] == [False, True]
    assert launched[1][1] > 0, "lengths are guessed"


def test_more_rows_than_a_cluster_serves_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"chunk_cluster: a sequence may have at most 8 rows"):
        differing(EIGHT, (300,), d=128, queries=3)


@pytest.mark.parametrize(
    ("problem", "ctas"),
    [
        ("b1 s1:1024 h32:8 d128 bf16 decode canonical", 8),
        ("b1 s1:8192 h32:8 d128 bf16 decode canonical", 4),
        ("b16 s1:4096 h8:1 d64 bf16 decode canonical", 4),
        ("b1 s1:4096 h16:2 d256 bf16 decode canonical", 8),
        ("b1 s1:512 h32:8 d128 bf16 decode canonical", 4),
        ("b4 s1:4096 h32:8 d128 bf16 decode canonical", 2),
        ("b16 s1:4096 h16:2 d256 bf16 decode canonical", 2),
        # Enough chunks, more than eight rows, few keys.
        ("b8 s1:1024 h32:8 d128 bf16 decode canonical", 0),
        ("b64 s1:4096 h32:8 d128 bf16 decode canonical", 0),
        ("b1 s4:4096 h32:8 d128 bf16 causal decode canonical", 0),
        ("b1 s1:511 h32:8 d128 bf16 decode canonical", 0),
    ],
)
def test_calls_with_few_chunks_get_clusters(problem: str, ctas: int) -> None:
    assert choose(problem, device_spec("H200")).config.chunk_cluster == ctas
    assert choose(problem, device_spec("A100")).config.chunk_cluster == 0


@pytest.mark.parametrize(
    ("problem", "device", "early"),
    [
        ("b1 s1:65536 h32:8 d128 bf16 decode canonical", "H200", True),
        ("b8 s1:1024 h32:8 d128 bf16 decode canonical", "H200", True),
        ("b8 s1:1024 h32:8 d128 bf16 decode canonical", "A100", False),
    ],
)
def test_calls_with_few_rows_begin_early(problem: str, device: str, early: bool) -> None:
    cfg = choose(problem, device_spec(device)).config
    assert (cfg.early, cfg.chunk_cluster) == (early, 0)
